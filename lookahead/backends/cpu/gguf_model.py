"""GGUF files loaded into panels that hold their blocks as they are (blocks.py). In: a file. Out: a model.

transformers names the file's tensors and orders their rows as its models have them. To find out how without unpacking a
matrix, it is given stand-ins [rows, 2], which hold the numbers of the row and of the tensor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lookahead.backends.cpu.blocks import NUMBER_OF, BlockPanels, scales_of
from lookahead.backends.cpu.linear import plain_linears
from lookahead.backends.cpu.packed_model import model_of
from lookahead.backends.cpu.panels import KINDS, Panels
from lookahead.files.hub import located
from lookahead.models.checkpoint import damaged_of, refuse_weights

log = logging.getLogger(__name__)

STAND_IN = torch.float64  # what is unpacked is float32
Matrix = tuple[np.ndarray, str]  # uint8 [out, bytes], the name of the format


@contextlib.contextmanager
def _with_stand_ins(tensors: list[Matrix]) -> Iterator[None]:
    """While open, matrices in formats of ours are not unpacked; each is added to `tensors` instead. And names of tensors, which
    transformers asks for in each module of a model, are listed once.
    """
    import gguf

    original, names = gguf.dequantize, gguf.get_tensor_name_map

    def stand_in(blocks: np.ndarray, kind: Any) -> np.ndarray:
        if kind.name not in NUMBER_OF:
            return original(blocks, kind)
        if blocks.ndim > 2:
            raise ValueError("experts, for which there are no panels")
        rows = np.stack([np.arange(len(blocks)), np.full(len(blocks), len(tensors))], 1)
        tensors.append((blocks, kind.name))
        return rows.astype(np.float64)

    vars(gguf).update(dequantize=stand_in, get_tensor_name_map=functools.cache(names))
    try:
        yield
    finally:
        vars(gguf).update(dequantize=original, get_tensor_name_map=names)


def gguf_model(
    name: str, revision: str | None, config: Any, empty: Any, dtype: torch.dtype, wishes: dict[str, Any]
) -> Any | None:
    """The causal LM of a GGUF file; None for one that transformers is to load, as none of its matrices can be in panels.

    empty: the model without memory for its weights. wishes: further arguments of `from_pretrained`. Raises ModelError for a
    file that is damaged or another model's.
    """
    import gguf
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import cached_file

    if not (Panels.takes_here() and type(config) in AutoModelForCausalLM._model_mapping and dtype in KINDS):
        return None
    repository, further = located(name, "a model folder", revision)
    file, tensors = cached_file(repository, further.pop("gguf_file"), **further), list[Matrix]()
    try:
        with _with_stand_ins(tensors):
            state = load_gguf_checkpoint(file, return_tensors=True, model_to_load=empty)["tensors"]
        found = {key: _ordered(state.pop(key), tensors) for key in list(state) if state[key].dtype == STAND_IN}
    except Exception as error:  # of many kinds; what is wrong with the file, transformers tells when it loads it
        log.debug("%s: its blocks are not kept: %s", name, error)
        return None
    names = {id(module): path for path, module in empty.named_modules()}
    layers = {names[id(getattr(*user))] for users in plain_linears(empty) for user in users}
    layers.add(names[id(empty.get_input_embeddings())])
    damaged = damaged_of((key, scales_of(kind, blocks)) for key, (blocks, kind, _) in found.items())
    refuse_weights(name, dict(zip(("not finite", "all zero"), damaged, strict=True)))
    panels = dict[str, Panels]()
    for key, (blocks, kind, order) in found.items():
        layer = key.removesuffix(".weight")
        if layer in layers:
            panels[layer] = BlockPanels(kind, blocks, dtype, order)
        else:
            state[key] = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])[order])
    if not panels:
        return None
    return model_of(name, config, state, panels, dtype, wishes)[0]


def _ordered(stand_in: torch.Tensor, tensors: list[Matrix]) -> tuple[np.ndarray, str, np.ndarray]:
    """(blocks of a tensor, their format, which of its rows each row of the model's weight is). Raises ValueError if they are
    not all there.
    """
    order, number = stand_in.numpy().astype(np.int64).T  # other shapes are a ValueError, too
    blocks, kind = tensors[number[0]]
    if (number != number[0]).any() or not np.array_equal(np.sort(order), np.arange(len(blocks))):
        raise ValueError("rows that are not those of the file")
    return blocks, kind, order
