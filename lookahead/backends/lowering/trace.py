"""A model's packed forward as a graph of torch operations. In: a loaded model. Out: an fx graph of one forward over few tokens.

The model's own code runs once, and what it computes is written down (make_fx). Its linear layers, its cache and its attention
are replaced by operations of ours that only record what they are given:

    lookahead::linear(tokens, number, outputs)            a product with the number-th laid out matrix, and its bias
    lookahead::looked_up(ids, number, width, dtype)       rows of the number-th quantized embedding table
    lookahead::placed(states, number)                     keys or values of this step, as a layer hands them to the cache
    lookahead::attended(query, key, value, lines, scale)  attention over what the cache then holds
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface

from lookahead.forward.backend import packed_layers
from lookahead.forward.kv_cache import NotedCache
from lookahead.forward.target import TargetModel
from lookahead.forward.tree_attention import checked_scale
from lookahead.forward.tree_meta import FIELDS

NAME = "lookahead_traced"
COUNTS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73)  # tokens of a traced forward: one that no size is

_library = torch.library.Library("lookahead", "FRAGMENT")
for _schema, _function in {
    "linear(Tensor tokens, int number, int outputs) -> Tensor": lambda x, number, outputs: x.new_zeros(*x.shape[:-1], outputs),
    "looked_up(Tensor ids, int number, int width, ScalarType dtype) -> Tensor": (
        lambda ids, number, width, dtype: ids.new_zeros(*ids.shape, width, dtype=dtype)
    ),
    "placed(Tensor states, int number) -> Tensor": lambda states, number: states.clone(),
    "attended(Tensor query, Tensor key, Tensor value, Tensor lines, float scale) -> Tensor": (
        lambda query, key, value, lines, scale: query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    ),
}.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")


@dataclasses.dataclass(frozen=True)
class Traced:
    """graph: of a function of ids and positions [1, tokens], of what lies before each token [tokens], and of the lines of each
    kind of layer; returns scores [1, tokens, vocab]. tokens: how many. linears, tables: the layers that lookahead::linear and
    looked_up number.
    """

    graph: torch.fx.GraphModule
    tokens: int
    linears: list[Any]
    tables: list[Any]


class _TracedCache(NotedCache):
    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: object, **kwargs: object) -> tuple[Any, Any]:
        placed = torch.ops.lookahead.placed
        return placed(key_states, 2 * layer_idx), placed(value_states, 2 * layer_idx + 1)


def _attended(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """Attention that layers of a traced model call."""
    scale = checked_scale(query, attention_mask, scaling, arguments)
    return torch.ops.lookahead.attended(query, key, value, attention_mask, scale), None


AttentionInterface.register(NAME, _attended)


@contextlib.contextmanager
def _layers_as_operations(linears: list[Any], tables: list[Any]) -> Iterator[None]:
    """While open, laid out layers are lookahead::linear, and look-ups in quantized tables lookahead::looked_up."""
    for number, layer in enumerate(linears):
        outputs = layer.out_features
        vars(layer)["forward"] = lambda x, number=number, outputs=outputs: torch.ops.lookahead.linear(x, number, outputs)
    for number, table in enumerate(tables):
        about = number, table.laid_out.inner, table.laid_out.dtype
        vars(table)["rows"] = lambda ids, about=about: torch.ops.lookahead.looked_up(ids, *about)
    try:
        yield
    finally:
        for layer in linears:
            del vars(layer)["forward"]
        for table in tables:
            del vars(table)["rows"]


@torch.no_grad()
def traced(target: TargetModel) -> Traced:
    """The forward of a packed model whose attention lookahead::tree_attention computes. Raises what the model raises."""
    model = target.model
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    linears, tables = packed_layers(model)
    sizes.update(size for layer in linears for size in (layer.in_features, layer.out_features))
    sizes.update(size for table in tables for size in (table.num_embeddings, table.embedding_dim))
    sizes.update(value for value in vars(target.text_config).values() if isinstance(value, int))
    tokens = next(count for count in COUNTS if count not in sizes)
    plan = target.mask_plan
    where = target.device
    ids, positions = torch.ones(1, tokens, dtype=torch.int64, device=where), torch.arange(tokens, device=where)[None]

    def forward(ids: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor, *lines: torch.Tensor) -> torch.Tensor:
        seen = dict(zip(plan.windows, lines, strict=True)) if plan.by_type else lines[0]
        given: dict[str, Any] = {"attention_mask": seen, "use_cache": True, target.state_name: _TracedCache(offsets)}
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, **given).logits
        return logits

    lines = [torch.zeros(1, 1, tokens, FIELDS, dtype=torch.int32, device=where) for _ in plan.windows]
    offsets = torch.zeros(tokens, dtype=torch.int64, device=where)
    one_mode = tracing(TracingContext(FakeTensorMode()))  # else each operation makes a mode, with a stack trace: 3x the time
    with _layers_as_operations(linears, tables), target.packed_attention.named(NAME), one_mode:
        graph = make_fx(forward, tracing_mode="real")(ids, positions, offsets, *lines)
    graph.graph.eliminate_dead_code()
    return Traced(graph, tokens, linears, [table.laid_out for table in tables])
