"""Checks of a model's weights. In: what transformers has read, and its report. Out: nothing, or one ModelError.

transformers fills a weight that it does not find with random numbers, and converts integers to floats.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lookahead.errors import ModelError

log = logging.getLogger(__name__)

RECOMPUTED = re.compile(r"inv_freq|masked_bias|cos_cached|sin_cached|rotary|rope|alibi|embed_scale|_extra_state")
MAY_BE_ZERO = re.compile(r"bias|router")  # which are zero before training
OTHER_LAYERS = re.compile(r"mtp|nextn")  # of config.json: the checkpoint has layers that predict further tokens
INDEX = "model.safetensors.index.json"
SHOWN = 3  # weights of each kind in an error


def check_weights(
    name: str, model: Any, found: dict[str, Any], other: Collection[str] = (), folder: Path | None = None
) -> None:
    """Raises ModelError that names the weights which are missing, damaged, or of another model. Reads each weight once.

    found: the loading info of `from_pretrained`. other: names of weights that are not in the model. folder: of the checkpoint,
    whose dtypes are checked, too. Weights that are not used are an error where the model has the module or the list of layers
    that they belong to; others, such as vision parts, are logged.
    """
    quantized = getattr(model, "hf_quantizer", None) is not None
    unexpected = sorted(found["unexpected_keys"])
    unfit = [] if quantized else list(_unfit(model, unexpected))
    buffers = {key for key, buffer in model.named_buffers() if not buffer.is_floating_point() or RECOMPUTED.search(key)}
    frequencies = ((key, buffer) for key, buffer in model.named_buffers() if key.endswith("inv_freq"))  # of a config's rope
    read = ((key, weight) for key, weight in model.named_parameters() if key not in other)
    not_finite, zero = damaged_of(itertools.chain(read, frequencies))
    refuse_weights(
        name,
        {
            "missing": sorted(found["missing_keys"] - buffers),
            "of another shape": [
                f"{key} ({_by(held)}, the model's is {_by(needed)})" for key, held, needed in sorted(found["mismatched_keys"])
            ],
            "not in this model": unfit,
            "not floats": [] if quantized or folder is None else sorted(_integers(model, folder)),
            "not finite": not_finite,
            "all zero": zero,
        },
    )
    if unused := sorted({*unexpected} - {*unfit}):
        log.warning("%s: %d weights of the checkpoint are not used: %s", name, len(unused), _listed(unused))


def refuse_weights(name: str, faults: dict[str, list[str]]) -> None:
    """Raises ModelError if there are any. faults: names of weights by what is wrong with them."""
    if listed := "; ".join(f"{what}: {_listed(weights)}" for what, weights in faults.items() if weights):
        raise ModelError(
            f"{name}: its weights are not those of this model ({listed}). Get the checkpoint again, or its own config.json."
        )


def damaged_of(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[str]]:
    """Names of the weights that hold infinities or no numbers, and of those that are zero: matrices, and vectors where those of
    the same name in other layers are not (norms that add 1 to their weights may begin as zeros).
    """
    not_finite, zero = [], []
    vectors: dict[str, list[str]] = {}  # by name without numbers of layers: names of those that are zero, "" of others
    for key, weight in weights:
        local = weight.to_local() if hasattr(weight, "to_local") else weight  # of a tensor parallel model
        if local.is_meta or not local.numel() or not local.is_floating_point() or local.dtype.itemsize < 2:
            continue
        low, high = map(float, local.detach().aminmax())  # not a number if any is
        if not math.isfinite(low) or not math.isfinite(high):
            not_finite.append(key)
        elif local.numel() > 1 and not MAY_BE_ZERO.search(key):
            is_zero = low == high == 0
            if local.ndim == 1:
                vectors.setdefault(re.sub(r"\d+", "", key), []).append(key if is_zero else "")
            elif is_zero:
                zero.append(key)
    zero += [key for alike in vectors.values() if "" in alike for key in alike if key]
    return not_finite, zero


def shards_of(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if (folder / INDEX).exists():
        names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in dict.fromkeys(names)]
    return sorted(folder.glob("*.safetensors"))


def tensors_in(shards: list[Path]) -> Iterator[tuple[str, Any]]:
    """Names of all tensors, and what reads them: `read.get_tensor(name)`. Raises ModelError for a file that cannot be read."""
    for shard in shards:
        try:
            opened = safe_open(shard, "pt")
        except Exception as error:  # safetensors raises errors of its own
            raise ModelError(f"{shard}: cannot be read as safetensors ({error}).") from error
        with opened as file:
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                yield name, file


def _unfit(model: Any, unexpected: list[str]) -> Iterator[str]:
    """Weights without which the model's own modules compute something else."""
    modules = dict(model.named_modules())
    lists = {path: len(module) for path, module in modules.items() if isinstance(module, torch.nn.ModuleList)}
    has_other_layers = OTHER_LAYERS.search(str(model.config)) is not None
    for key in unexpected:
        path, _, leaf = key.rpartition(".")
        of_module = leaf in ("weight", "bias") and any(True for _ in modules.get(path, model).parameters(recurse=False))
        indices = re.finditer(r"\.(\d+)\.", key)
        if of_module or any(int(at[1]) >= lists.get(key[: at.start()], 1 << 62) and not has_other_layers for at in indices):
            yield key


def _integers(model: Any, folder: Path) -> Iterator[str]:
    """Weights of a folder's files that are not floats."""
    from transformers.modeling_utils import load_state_dict

    parameters = {key for key, _ in model.named_parameters()}
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        for key, weight in load_state_dict(str(file), map_location="meta").items():
            if not weight.is_floating_point() and (key in parameters or key.endswith(".weight")):
                yield key


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _listed(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
