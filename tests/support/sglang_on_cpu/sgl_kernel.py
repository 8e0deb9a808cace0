"""Stands in for SGLang's kernels on a CPU: its CPU build is not on the package index, and needs AVX-512 or AMX.

With this folder on PYTHONPATH, SGLang 0.5.23 runs on any CPU with `attention_backend="torch_native"`. What verification of
draft trees needs is written in PyTorch below, as SGLang's own kernels define it; all else fails once it is called.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "0.4.10"
__path__: list[str] = []


class Missing:
    """A kernel that is imported and never called, or a table of constants."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self.name}: SGLang's kernel is not here")


class Submodule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return globals().get(name, Missing(name))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Submodule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)


sys.meta_path.append(Finder())


def reconstruct_indices_from_tree_mask(
    tree_mask: Any, lengths: Any, positions: Any, index: Any, next_token: Any, next_sibling: Any, rows: int, nodes: int
) -> None:
    """Of each node its position, its first child and its next sibling, -1 for none."""
    attend_to_trees()
    mask = tree_mask.view(rows, nodes, nodes).tolist()
    for row in range(rows):
        parents = [max((k for k in range(node) if mask[row][node][k]), default=-1) for node in range(nodes)]
        for node, parent in enumerate(parents):
            positions[row * nodes + node] = lengths[row] + sum(mask[row][node][:node])
            index[row, node] = row * nodes + node
            later = range(node + 1, nodes)
            next_token[row, node] = next((k for k in later if mask[row][k][node]), -1)
            next_sibling[row, node] = next((k for k in later if parent >= 0 and parents[k] == parent), -1)


def verify_tree_greedy_cpu(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """The longest path of each tree that the model would have decoded. accept_token_num: without the model's own token."""
    for row in range(len(candidates)):
        node = count = 0
        accept_index[row, 0] = retrive_index[row, 0]
        while True:
            token = int(target_predict[row, node])
            predicts[retrive_index[row, node]] = token
            child = int(retrive_next_token[row, node])
            while child >= 0 and int(candidates[row, child]) != token:
                child = int(retrive_next_sibling[row, child])
            if child < 0 or count + 1 >= accept_index.shape[1]:
                break
            node, count = child, count + 1
            accept_index[row, count] = retrive_index[row, node]
        accept_token_num[row] = count


def assign_extend_cache_locs_cpu(rows: Any, table: Any, start: Any, end: Any, out: Any, width: int) -> None:
    """out: the slots [start, end) of each row of the table, one row behind the other."""
    found = [table[row, first:last] for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)]
    slots = torch.cat(found)
    out[: len(slots)] = slots


def assign_req_to_token_pool_cpu(rows: Any, table: Any, start: Any, end: Any, slots: Any, width: int) -> None:
    """The other way round."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[taken : taken + last - first].to(table.dtype)
        taken += last - first


def fill_accept_out_cache_loc_cpu(accept_index: Any, slots: Any, out: Any) -> None:
    """out: the slots of accepted nodes."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    out[: len(accepted)] = slots[accepted]


def copy_all_layer_kv_cache_cpu(pointers: Any, strides: Any, to: Any, source: Any) -> None:
    """Copy slots of each layer's keys and values. pointers: of their first bytes. strides: bytes of a slot."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        copied = [ctypes.string_at(pointer + slot * stride, stride) for slot in source.tolist()]
        for slot, content in zip(to.tolist(), copied, strict=True):
            ctypes.memmove(pointer + slot * stride, content, stride)


def attend_to_trees() -> None:
    """Let the PyTorch attention of SGLang verify trees: a node attends to the text and to its path."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if hasattr(Backend, "of_text"):
        return
    Backend.of_text = Backend.forward_extend

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        if not batch.forward_mode.is_target_verify():
            return self.of_text(q, k, v, layer, batch, save_kv_cache)
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
        keys, values = (
            get(layer.layer_id) for get in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer)
        )
        nodes = batch.spec_info.draft_token_num
        queries = q.view(-1, nodes, layer.tp_q_head_num, layer.qk_head_dim)
        masks = batch.spec_info.custom_mask.view(-1, nodes, nodes)
        output = torch.empty(len(queries), nodes, layer.tp_q_head_num, layer.v_head_dim, dtype=q.dtype)
        for row, text in enumerate(batch.seq_lens.tolist()):
            slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[row], : text + nodes]
            mask = torch.cat((torch.ones(nodes, text, dtype=torch.bool), masks[row]), 1)
            heads = scaled_dot_product_attention(
                queries[row].movedim(0, 1)[None],
                keys[slots].movedim(0, 1)[None],
                values[slots].movedim(0, 1)[None],
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            output[row] = heads[0].movedim(0, 1)
        return output.view(len(q), -1)

    Backend.forward_extend = forward_extend
