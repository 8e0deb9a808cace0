"""How a model verifies drafts, found by trying. In: a loaded model. Out: a TargetModel whose mode gives the right scores.

Each mode, the fastest first, prefills prompts in pieces, verifies drafts, keeps a part and continues, in two slots and in one.
Its scores, and keys and values, are right if they are as near to precise ones as the stock model's own are (reference.py): how
far rounding moves them is a matter of the model, not a constant. Where steps can be packed, a program
(lower.py) is compared with the model's modules as well, which on a CPU round where it does: so differences that rounding would
hide are found too. Windows that no short text shows are looked for in the model's own masks (far_masks.py).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numba.core.errors import NumbaError

from lookahead.draft.tree import DraftTree, Wanted, chain, side_by_side
from lookahead.errors import ModelError
from lookahead.forward.backend import QUANTIZED, ForwardProgram, backend_of
from lookahead.forward.backends import by_own_settings, without_cudnn
from lookahead.forward.slots import PackedSlots, Slots, slots_of
from lookahead.forward.target import Mode, TargetModel
from lookahead.models.far_masks import far_masks_differ
from lookahead.models.reference import HALF, Reference, likely_texts, perturbed, stock, wide, widened
from lookahead.tokenizer import first_line

log = logging.getLogger(__name__)

PROMPTS = (20, 9)  # tokens
PIECE = 12  # of them that are prefilled first
#      0
#    1   2
#   3 4   5
BUSH = np.array([-1, 0, 0, 1, 1, 2], np.int32)
BUSH_KEPT = [0, 2, 5]
CHAIN_KEPT = [0, 1, 2]
# Right scores were 0.88 to 1.12 times as far from the precise ones as the stock model's in all layers of the real models tried,
# wrong ones in float32 20 times or more.
FACTOR = 2.0  # of the mean over tokens
FACTOR_OF_ONE = 8.0  # of the farthest token: one rounding on the other side can move all that follows
LEAST = 0.125  # units of rounding that are always allowed
OF_FLOAT32 = 1 / 16  # of what rounding to half precision moves, which is 2**13 times as coarse or more
# Between a program and the modules, as shares of what rounding moves
OF_FIRST_LAYER = 0.15  # of half of the tokens, in keys and values of the first layer, before rounding can have grown
STRAY, SAME = 0.1, 1e-3  # a token's numbers are others, or the same
RARE, MOST = 0.25, 0.75  # shares of tokens: others in layers that are right, and in one that is wrong
ENOUGH = 6  # tokens, for a share of them to count
MOST_OF_ERROR = 300  # characters of numba's, which has many lines
# Modes, and whether the op computes their attention
TRIED: tuple[tuple[Mode, bool], ...] = (
    ("packed", True),
    ("packed", False),
    ("tree", False),
    ("chain", False),
    ("replay", False),
)
TREES = ("packed", "tree")
IN_PANELS = ("panels", "gguf", *QUANTIZED)  # kinds of linear layers that programs multiply
Text = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Observed:
    """Results that a target computed. scores: after the last token of each text. layers: of each text that a slot held, keys
    and values of each layer, [tokens, numbers], by what they are called.
    """

    scores: dict[Text, torch.Tensor]
    layers: dict[Text, dict[str, torch.Tensor]]


class _Yardstick:
    """Right scores of texts, and how far rounding moves them."""

    def __init__(self, target: TargetModel):
        self._model, self._vocab_size = target.model, target.vocab_size
        self._is_rounded = rounds(target)
        self._known: dict[frozenset[Text], tuple[Observed, Observed]] = {}
        self.texts = likely_texts(self._model, self._vocab_size, [length + 2 * len(BUSH) for length in PROMPTS])

    def of(self, found: Observed) -> tuple[Observed, Observed]:
        """(What rounding makes of them, precise) of the same texts."""
        asked = frozenset((*found.scores, *found.layers))
        if asked in self._known:
            return self._known[asked]
        texts = sorted(asked)  # what others begin with comes right before them
        longest = [a for a, b in zip(texts, [*texts[1:], ()], strict=True) if b[: len(a)] != a]
        args = self._model, longest, bool(found.layers)
        own = stock(*args)
        precise = None
        if self._is_rounded:
            try:
                precise = wide(*args)
            except Exception as error:  # a library that quantizes has operations of its own
                log.info("its scores cannot be computed in float32 (%s)", first_line(error))
        both = (own, precise) if precise is not None else (perturbed(*args), own)
        moved, right = (self._as_observed(each, longest, found) for each in both)
        self._known[asked] = moved, right
        return moved, right

    def _as_observed(self, reference: Reference, longest: list[Text], found: Observed) -> Observed:
        row_of = {text[: size + 1]: row for row, text in enumerate(longest) for size in range(len(text))}
        scores = {text: reference.scores[row_of[text], len(text) - 1] for text in found.scores}
        layers = {
            text: _named(
                (number, *(each[row_of[text], :, : len(text)] for each in held)) for number, held in reference.layers.items()
            )
            for text in found.layers
        }
        return Observed(scores, layers)


def op_may_serve(target: TargetModel) -> bool:
    """Tell whether to try lookahead::tree_attention: where it is fast, for models that do not ask for eager attention."""
    backend = backend_of(target.device.type)
    served = backend is not None and backend.serves(target.device, target.dtype)
    return served and target.text_config._attn_implementation != "eager"


def kind_of_linear(model: Any) -> str:
    """Who computes its linear layers: the library that they are laid out for, "torch" if they are not; "int8", "int4" or "gguf"
    where some are quantized.
    """
    kinds = [module.laid_out.library for module in model.modules() if hasattr(module, "laid_out")]
    return next((kind for kind in (*QUANTIZED, "gguf") if kind in kinds), kinds[0] if kinds else "torch")


def program_of(target: TargetModel) -> ForwardProgram:
    """See `Backend.program_of`."""
    backend = backend_of(target.device.type)
    if backend is None:
        raise ModelError(f"there is no backend for {target.device.type}")
    return backend.program_of(target)


def rounds(target: TargetModel) -> bool:
    """Tell whether numbers between layers, or of tokens, are rounded to something coarser than float32."""
    return target.dtype in HALF or target.linear in QUANTIZED


def _may_be_program(target: TargetModel) -> bool:
    """Tell whether there are products for its linear layers."""
    if target.device.type == "cuda":
        return target.linear == "torch" and target.dtype != torch.float32
    return target.linear in IN_PANELS


@by_own_settings
@torch.inference_mode()
@without_cudnn()
def probed(model: Any, name: str = "model", may_be_program: bool = True) -> TargetModel:
    """Wrap a loaded model, finding out how it verifies. may_be_program: its whole forward may be one native call."""
    reasons: list[str] = []
    linear = kind_of_linear(model)
    yardstick: _Yardstick | None = None
    for mode, by_op in TRIED:
        bucketed = mode == "packed" and model.device.type == "cuda"
        target = TargetModel(model, name, mode, "; ".join(reasons), bucketed=bucketed, attends_by_op=by_op, linear=linear)
        if by_op and not op_may_serve(target):
            continue
        try:
            yardstick = yardstick or _Yardstick(target)
            slots = slots_of(target)
            found = _observed(target, slots, yardstick.texts)
            error = _wrong(target, found, *yardstick.of(found)) or (far_masks_differ(target) if mode in TREES else "")
            if not error and mode != "packed" and target.dtype in HALF:
                error = _wrong_in_float32(target, yardstick)
        except Exception as failure:  # a model that cannot take the mask or the cache fails in its own way
            error = _reason_of(failure, name)
        if not error:
            assert yardstick
            if isinstance(slots, PackedSlots):
                target = dataclasses.replace(target, kv_bytes=slots.kv_bytes(), layers=slots.cache.shapes())
                if not by_op:
                    target = dataclasses.replace(target, not_program="its attention is a function of its own")
                elif may_be_program:
                    target = _with_program(target, found, yardstick)
            cuda = backend_of("cuda") if bucketed else None
            return cuda.tried_capture(target) if cuda else target
        if not by_op:
            reasons.append(f"no {mode} ({error})")
        elif target.device.type != "cpu":
            log.warning("%s: attention goes without lookahead::tree_attention: %s", name, error)
    return TargetModel(model, name, "plain", "; ".join(reasons), linear=linear)


def _with_program(target: TargetModel, by_modules: Observed, yardstick: _Yardstick) -> TargetModel:
    """The same with its whole forward as a program, if there is one and it is right; else why not is kept as `not_program`."""
    if not _may_be_program(target):
        return dataclasses.replace(target, not_program=f"linear layers by {target.linear}, in {target.setting.dtype}")
    try:
        programmed = dataclasses.replace(target, program=program_of(target))
        found = _observed(programmed, slots_of(programmed), yardstick.texts)
        own, precise = yardstick.of(found)
        error = _wrong(target, found, own, precise)
        if not error and target.device.type == "cpu" and rounds(target):
            error = _strays(found, by_modules, own, precise)
    except Exception as failure:
        error = _reason_of(failure, target.name)
    if not error:
        return programmed
    log.info("%s: its forward is run module by module (%s)", target.name, error)
    return dataclasses.replace(target, not_program=error)


def _reason_of(failure: Exception, name: str) -> str:
    if isinstance(failure, NumbaError):  # an error of this package or of numba, not of the model
        why = " ".join(str(failure).split())[:MOST_OF_ERROR]
        log.warning("%s: a kernel does not compile, decoding continues without it, more slowly: %s", name, why)
    known = isinstance(failure, ModelError)
    return first_line(failure) if known else f"{type(failure).__name__}: {first_line(failure)}"


def _observed(target: TargetModel, slots: Slots, texts: Sequence[list[int]]) -> Observed:
    """Decode a little in the target's mode: along `texts`, with drafts some of which leave them."""
    generator = np.random.default_rng(0)
    scores: dict[Text, torch.Tensor] = {}
    layers: dict[Text, dict[str, torch.Tensor]] = {}
    bush = target.mode in TREES
    kept = BUSH_KEPT if bush else CHAIN_KEPT
    held: list[list[int]] = [[], []]  # of each slot

    def draft(slot: int, size: int) -> DraftTree:
        """The next tokens of the slot's text along the nodes that will be kept, any of its tokens elsewhere."""
        text, start = texts[slot], len(held[slot])
        tree = chain(generator.choice(text, size).astype(np.int32))
        if size == len(BUSH) and bush:
            tree = dataclasses.replace(tree, parents=BUSH)
        path = kept if size == len(BUSH) else range(size)
        tree.token_ids[[*path]] = text[start : start + len(path)]
        return tree

    def step(trees: Sequence[DraftTree], keep: list[list[int]], wanted: Sequence[Wanted] = ("all", "all")) -> None:
        found = slots.forward(side_by_side(trees, wanted[: len(trees)]))
        for slot, tree in enumerate(trees):
            paths: list[list[int]] = []
            for node in range(len(tree)):
                parent = int(tree.parents[node])
                paths.append([*(paths[parent] if parent >= 0 else held[slot]), int(tree.token_ids[node])])
            shown = paths if wanted[slot] == "all" else paths[-1:]
            scores.update((tuple(path), row.clone()) for path, row in zip(shown, found.of(slot), strict=True))
            held[slot] = paths[keep[slot][-1]]
        slots.keep(keep)

    def note(slot: int, at: int) -> None:
        if isinstance(slots, PackedSlots):
            text = tuple(held[slot])
            held_here = [(n, each) for n, each in enumerate(slots.cache.layers) if each.is_initialized]
            layers[text] = _named(
                (n, *(part[at, :, : len(text)].clone() for part in (each.keys, each.values))) for n, each in held_here
            )

    for text, size in zip(texts, PROMPTS, strict=True):
        slots.begin(slots.add(text[:size]))
    pieces = [draft(slot, min(PIECE, size)) for slot, size in enumerate(PROMPTS)]
    step(pieces, [[*range(len(piece))] for piece in pieces], ["last", "all"])
    rest = draft(0, PROMPTS[0] - PIECE)
    step([rest, draft(1, 3)], [[*range(len(rest))], [0, 1]])
    step([draft(0, 6), draft(1, 1)], [kept, [0]])
    step([draft(0, 1), draft(1, 6)], [[0], kept])
    note(0, 0)
    slots.close(0)  # the other is now alone, in another slot than before
    held[0], texts = held[1], [texts[1]]
    for size in (1, 6):
        step([draft(0, size)], [[0]])
    note(0, 0)
    return Observed(scores, layers)


def _named(layers: Iterable[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    """[tokens, numbers] of the keys and values [heads, tokens, width] of each layer, by its number."""
    return {
        f"{name} of layer {number}": each.transpose(0, 1).flatten(1)
        for number, *both in sorted(layers, key=lambda layer: layer[0])
        for name, each in zip(("keys", "values"), both, strict=True)
    }


def _wrong(target: TargetModel, found: Observed, own: Observed, precise: Observed) -> str:
    """Describe what is wrong with what a target computed, compared with the stock model's own; "" if nothing is."""
    least = LEAST * torch.finfo(target.dtype).eps
    for where, ours, theirs, right in _compared(found, own, precise):
        if not (
            torch.isfinite(ours).all() and torch.isfinite(right).all()
        ):  # a difference that is not a number is not greater than any
            return "scores are not finite"
        apart, rounded = (_distances(each, right) + least for each in (ours, theirs))
        mean = float((apart / rounded).log().mean().exp())
        if not (mean <= FACTOR and float(apart.max()) <= FACTOR_OF_ONE * float(rounded.max())):
            share = float((ours - right).abs().max()) / (float(right.std()) or 1.0)
            return f"{where} differ by {share:.2g} of their spread, by {mean:.2g} times what rounding moves them"
    return ""


def _wrong_in_float32(target: TargetModel, yardstick: _Yardstick) -> str:
    """Return what is wrong with a mode itself, which half precision may hide; "" if nothing is, or nobody can tell."""
    try:
        with widened(target.model):
            found = _observed(target, slots_of(target), yardstick.texts)
    except Exception as error:
        log.info("%s: mode %s is not tried in float32 (%s)", target.name, target.mode, first_line(error))
        return ""
    own, precise = yardstick.of(found)
    for where, ours, theirs, right in _compared(found, own, precise):
        apart, rounded = (float(_distances(each, right).mean()) for each in (ours, theirs))
        if not apart <= rounded * OF_FLOAT32:
            return f"in float32, {where} differ by {apart:.2g} of their size"
    return ""


def _compared(*observed: Observed) -> Iterator[tuple[Any, ...]]:
    """(what, [tokens, numbers] of each of these) in the order of the forward."""
    texts = observed[0].layers
    for where in next(iter(texts.values()), ()):
        yield where, *(torch.cat([each.layers[text][where] for text in texts]).double() for each in observed)
    scores = [torch.stack([each.scores[text] for text in observed[0].scores]).double() for each in observed]
    yield "scores", *(each - each.mean(-1, keepdim=True) for each in scores)


def _distances(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[tokens]: how far numbers [tokens, numbers] are apart, as shares of the right ones."""
    return (found - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(torch.finfo(right.dtype).tiny)


def _strays(program: Observed, modules: Observed, own: Observed, precise: Observed) -> str:
    """Return where a program computes something else than the modules, which round where it does; "" if nowhere.

    Sums in another order move a number across a step of rounding now and then, and from there on all that follows. So the first
    difference of a token is looked for: where tokens rarely part, there is no layer in which most of them do.
    """
    all_four = program, modules, own, precise
    same = {text: torch.ones(len(text), dtype=torch.bool) for text in program.layers}  # in all layers so far, and before it
    most = 0.0
    for index, where in enumerate([*next(iter(program.layers.values())), "scores"]):
        apart = {text: _roundings(text, where, *all_four) for text in same}
        of_same = torch.cat([apart[text][same[text]] for text in same]).nan_to_num(nan=-1)
        of_same = of_same[of_same >= 0]
        if index < 2 and not (moved := float(of_same.median())) <= OF_FIRST_LAYER:
            return f"{where} are {moved:.2g} of a rounding from those of its modules"
        if index >= 2 and len(of_same) >= ENOUGH:
            share = float((of_same > STRAY).double().mean())
            if share >= MOST and most <= RARE:
                return f"{where} are not those of its modules"
            most = max(most, share)
        for text in same:
            same[text] &= (apart[text] <= SAME).cpu().cumprod(0).bool()
    return ""


def _roundings(text: Text, where: str, program: Observed, modules: Observed, own: Observed, precise: Observed) -> torch.Tensor:
    """[tokens]: how far a program is from the modules, in units of what rounding moves the token; nan where it is not known."""
    observed = program, modules, own, precise
    if where != "scores":
        ours, theirs, rounded, right = (o.layers[text][where].double() for o in observed)
        return _distances(ours, theirs) / _distances(rounded, right).clamp_min(1e-9)
    found = torch.full((len(text),), torch.nan, dtype=torch.float64)
    for position in range(len(text)):
        if (path := text[: position + 1]) in program.scores:
            ours, theirs, rounded, right = (o.scores[path].double() for o in observed)
            found[position] = _distances(ours, theirs) / _distances(rounded, right).clamp_min(1e-9)
    return found
