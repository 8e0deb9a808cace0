"""Inputs of linear layers on texts. In: a model, a function that runs it. Out: their sizes and second moments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lookahead.backends.cpu.linear import LaidOutLinear
from lookahead.backends.cpu.quantized import GROUP

HELD_BYTES = 1 << 30  # of second moments that are held at once; others are summed when they are asked for
See = Callable[[str, torch.Tensor], None]


@dataclasses.dataclass(frozen=True)
class InputSizes:
    """Sizes of inputs by the names of linear layers, [in] each. largest: absolute values; squares: means of squares."""

    largest: dict[str, torch.Tensor]
    squares: dict[str, torch.Tensor]


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """All but the output layer, and layers whose inputs do not fill groups of 64."""
    for name, layer in model.named_modules():
        linear = isinstance(layer, LaidOutLinear | torch.nn.Linear) and layer.in_features % GROUP == 0
        if linear and layer is not model.get_output_embeddings():
            yield name, layer


@contextlib.contextmanager
def _seen(layers: Mapping[str, Any], see: See) -> Iterator[None]:
    """While open, inputs [tokens, in] of these layers are shown to `see` as they are about to be multiplied."""
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0].detach()))
            stack.callback(hook.remove)
        yield


@torch.no_grad()
def input_sizes(model: Any, run: Callable[[], object]) -> InputSizes:
    """Measure the inputs while `run` runs. Left out are the output layer, layers whose inputs do not fill groups of 64, and
    layers that do not run.
    """
    largest, squares, counts = dict[str, torch.Tensor](), dict[str, torch.Tensor](), dict[str, int]()

    def see(name: str, tokens: torch.Tensor) -> None:
        tokens = tokens.float().flatten(0, -2)
        if not len(tokens):
            return
        most, sums = tokens.abs().amax(0), tokens.square().sum(0)
        largest[name] = torch.maximum(largest[name], most) if name in largest else most
        squares[name] = squares[name] + sums if name in squares else sums
        counts[name] = counts.get(name, 0) + len(tokens)

    with _seen(dict(_layers(model)), see):
        run()
    return InputSizes(largest, {name: sums / counts[name] for name, sums in squares.items()})


class Moments:
    """Second moments of the inputs of layers: means of products of two inputs of a token, float32 [in, in].

    Those of two different inputs are smaller by n / (n + in), where n tokens were seen: few texts do not tell how many inputs
    vary together, and weights that are rounded on them as if they did lose more than others.

    As many as HELD_BYTES holds are summed by one run of the model. Layers with the same input share theirs. names: of the
    layers in the order in which they are asked for.
    """

    def __init__(self, model: Any, run: Callable[[], object], names: list[str]):
        layers = dict(_layers(model))
        self._layers = {name: layers[name] for name in names if name in layers}
        self._run = run
        self._held: dict[str, torch.Tensor] = {}

    def of(self, name: str) -> torch.Tensor | None:
        """None for a layer that is left out (see `input_sizes`), and for one that does not run."""
        if name not in self._layers:
            return None
        if name not in self._held:
            self._sum_from(name)
        return self._held.get(name)

    @torch.no_grad()
    def _sum_from(self, first: str) -> None:
        self._held.clear()
        names = list(self._layers)
        chosen = dict[str, Any]()
        size = 0
        for name in names[names.index(first) :]:
            size += 4 * self._layers[name].in_features ** 2
            if chosen and size > HELD_BYTES:
                break
            chosen[name] = self._layers[name]
        held, counts = self._held, dict[int, int]()
        before: tuple[torch.Tensor, torch.Tensor] | None = None  # a copy of the latest input, and its moments

        def see(name: str, given: torch.Tensor) -> None:
            nonlocal before
            tokens = given.float().flatten(0, -2)
            if before is not None and tokens.equal(before[0]) and held.setdefault(name, before[1]) is before[1]:
                return
            sums = held.get(name)
            if sums is None:
                with torch.inference_mode(False):  # a tensor that may change after the run
                    sums = held[name] = torch.zeros(tokens.shape[1], tokens.shape[1])
            sums.addmm_(tokens.T, tokens)
            counts[id(sums)] = counts.get(id(sums), 0) + len(tokens)
            before = tokens.clone(), sums

        with _seen(chosen, see):
            self._run()
        for each in {id(sums): sums for sums in held.values()}.values():
            count, inner = counts[id(each)], len(each)
            variances = each.diagonal() / count
            each.div_(count + inner).diagonal().copy_(variances)
