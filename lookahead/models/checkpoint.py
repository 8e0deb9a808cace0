"""Whether a model has all weights of its checkpoint. In: a loaded model, what transformers reports. Out: nothing, or an error.

transformers fills weights that are missing with random numbers, others in each run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lookahead.errors import ModelError
from lookahead.model_files import RECOMPUTED, some_of

MAY_BE_ZERO = ("bias", "router")  # in names of matrices, such as biases of experts; routers begin as zeros


def check_weights(name: str, model: Any, found: Mapping[str, Any]) -> str:
    """As `check_keys`. Raises ModelError for weights that are all zero or not finite, too."""
    unused = check_keys(name, model, found)
    check_values(name, model.named_parameters())
    return unused


def check_keys(name: str, model: Any, found: Mapping[str, Any]) -> str:
    """found: what `from_pretrained` reports with output_loading_info. Returns names of weights that are not part of a causal
    LM, such as those of another head.

    Raises ModelError for weights that are missing, of other shapes, or unknown to a layer that the model has.
    """
    modules = dict(model.named_modules())
    unknown = [key for key in sorted(found["unexpected_keys"]) if not key.endswith(RECOMPUTED)]
    inside = [key for key in unknown if _is_inside(key, modules, model.base_model_prefix)]
    for keys, what in (
        (sorted(found["missing_keys"]), "lacks weights of this model"),
        ([_shapes(each) for each in sorted(found["mismatched_keys"])], "has weights of other shapes than this model"),
        (inside, "has weights that this model has no use for"),
    ):
        if keys:
            also = f"; it holds {some_of(unknown)}, which the model does not know" if unknown and keys is not inside else ""
            raise ModelError(
                f"{name}: {what}: {some_of(keys)}{also}. config.json and weights belong to different models, or a file is "
                "damaged: download or save the checkpoint again."
            )
    return some_of([key for key in unknown if key not in inside])


def check_values(name: str, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ModelError for weights that are not finite, and for matrices of zeros. Reads each once.

    A norm's weight may be zero where those of all layers are, as in models that add 1 to it.
    """
    broken, zero = [], []
    vectors: dict[str, list[str]] = {}  # by name without numbers of layers: those of zeros; "": one that is not
    for key, weight in weights:
        if weight.is_meta or not weight.is_floating_point() or not weight.numel():
            continue
        total = weight.detach().sum(dtype=torch.float32)
        if not torch.isfinite(total) and not torch.isfinite(weight).all():
            broken.append(key)
        elif weight.numel() > 1 and not _may_be_zero(key):
            is_zero = bool(total == 0) and not weight.any()
            if weight.ndim > 1:
                zero += [key] * is_zero
            else:
                vectors.setdefault(re.sub(r"\d+", "", key), []).append(key if is_zero else "")
    zero += [key for alike in vectors.values() if "" in alike for key in alike if key]
    for keys, what in ((broken, "not finite (NaN or infinite)"), (zero, "all zero")):
        if keys:
            raise ModelError(f"{name}: weights are {what}: {some_of(keys)}. Download or save the checkpoint again.")


def _is_inside(key: str, modules: Mapping[str, Any], base: str) -> bool:
    """The weight is named as one of a layer, or of a list of layers, that the model has."""
    parts = key.split(".")
    known = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in modules), 0)
    return known > (parts[0] == base)


def _shapes(mismatched: Any) -> str:
    """transformers gives a name, or (name, shape in the file, shape in the model)."""
    if isinstance(mismatched, str):
        return mismatched
    name, in_file, in_model = mismatched
    return f"{name} ({list(in_file)} in the file, {list(in_model)} in the model)"


def _may_be_zero(key: str) -> bool:
    return any(part in key for part in MAY_BE_ZERO)
