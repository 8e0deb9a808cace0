"""A bench of one model in several quantizations. In: a `ModelBench`, schemes as they are typed. Out: figures of each scheme.

One model is loaded at a time, so speeds of schemes are not interleaved: their ratios are as exact as the machine is steady.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lookahead.errors import UsageError

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.on_model import Look, ModelBench
    from lookahead.forward.target import TargetModel

    Measure = Callable[[ModelBench, Look], tuple[list[Comparison], list[str]]]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """weight_bytes: of all weights as they are held. kv_bytes_per_token: 0 where that is not known. loss: nats per token of the
    prompts, None for random weights. comparisons: one for each batch size.
    """

    quantize: str
    kv_dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    loss: float | None
    comparisons: list[Comparison]

    def as_json(self) -> dict[str, Any]:
        """One of "schemes" in the object that `bench --json` prints."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "comparisons": [each.as_json() for each in self.comparisons]}


def schemes_of(option: str, typed: str, known: Sequence[str]) -> list[str]:
    """ "none,int8" -> ["none", "int8"]. Raises UsageError."""
    names = list(dict.fromkeys(part.strip() for part in typed.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: choose {', '.join(known)}, or several such as none,int8.")
    return names


def weight_bytes(model: Any) -> int:
    """Of a model's weights, each counted once."""
    held = {id(tensor): tensor.nbytes for tensor in model.parameters()}
    held |= {id(layer.laid_out): layer.laid_out.nbytes for layer in model.modules() if hasattr(layer, "laid_out")}
    return sum(held.values())


def bench_schemes(bench: ModelBench, quantize: str, kv_dtype: str, measure: Measure) -> tuple[list[Scheme], list[str]]:
    """(figures of each combination, what is wrong with rows that were left out)

    quantize, kv_dtype: several with commas between them. measure: `bench_prompts` or `bench_logged`, given the bench and what
    to call with the loaded model and its prompts. Raises UsageError for unknown schemes, and as `measure` does.
    """
    from lookahead.bench.quality import loss_of
    from lookahead.forward.backend import SCHEMES

    combinations = [
        (weights, keys)
        for weights in schemes_of("--quantize", quantize, SCHEMES)
        for keys in schemes_of("--kv-dtype", kv_dtype, SCHEMES)
    ]
    schemes, failed = [], list[str]()
    for weights, keys in combinations:
        figures = dict[str, Any]()

        def look(target: TargetModel, prompts: list[list[int]], figures: dict[str, Any] = figures) -> None:
            figures.update(weight_bytes=weight_bytes(target.model), kv_bytes_per_token=target.place_bytes)
            figures["loss"] = loss_of(target, prompts) if prompts else None

        model = dataclasses.replace(bench.model, quantize=weights, kv_dtype=keys)
        comparisons, failed = measure(dataclasses.replace(bench, model=model), look)
        schemes.append(Scheme(weights, keys, comparisons=comparisons, **figures))
    return schemes, failed
