"""How a model verifies drafts, found by trying. In: a loaded model. Out: a TargetModel whose mode gives the right scores.

Each mode, the fastest first, prefills prompts in pieces, verifies drafts, keeps a part and continues, in two slots and in one;
every score must be what the model gives for that text alone, without cache, masks or neighbours. Windows that no short text
shows are looked for in the model's own masks (far_masks.py).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import torch
from numba.core.errors import NumbaError

from lookahead.draft.tree import DraftTree, chain
from lookahead.errors import ModelError
from lookahead.forward.backends import without_cudnn
from lookahead.forward.panels import Panels
from lookahead.forward.quantized import QUANTIZED
from lookahead.forward.slots import PackedSlots, Slots, Wanted, slots_of
from lookahead.forward.target import Mode, TargetModel
from lookahead.forward.tree_attention import serves_on
from lookahead.models.captured import tried_capture
from lookahead.models.far_masks import far_masks_differ
from lookahead.models.linear import kind_of_linear
from lookahead.models.lower import program_of
from lookahead.tokenizer import first_line

log = logging.getLogger(__name__)

PROMPTS = (12, 5)  # tokens
PIECE = 8  # of them that are prefilled first
#      0
#    1   2
#   3 4   5
BUSH = np.array([-1, 0, 0, 1, 1, 2], np.int32)
BUSH_KEPT = [0, 2, 5]
CHAIN_KEPT = [0, 1, 2]
MOST_NOISE = 0.1  # of the spread of scores: what rounding may be blamed for
MOST_OF_ERROR = 300  # characters of numba's, which has many lines
MOST_OF_QUANTIZED = 0.5  # the same for quantized tokens, which a small difference rounds to other numbers
# Modes, whether the op computes their attention, and whether the whole forward is a program
TRIED: tuple[tuple[Mode, bool, bool], ...] = (
    ("packed", True, True),
    ("packed", True, False),
    ("packed", False, False),
    ("tree", False, False),
    ("chain", False, False),
    ("replay", False, False),
)
TREES = ("packed", "tree")
IN_PANELS = (Panels.library, *QUANTIZED)  # kinds of linear layers that programs multiply


def op_may_serve(target: TargetModel) -> bool:
    """Whether to try lookahead::tree_attention: where it is fast, for models that do not ask for eager attention."""
    own = target.text_config._attn_implementation
    return own != "eager" and serves_on(target.device, target.dtype)


def _may_be_program(target: TargetModel) -> bool:
    """Whether there are products for its linear layers."""
    if target.device.type == "cuda":
        return target.linear == "torch" and target.dtype != torch.float32
    return target.linear in IN_PANELS


@torch.inference_mode()
@without_cudnn()
def probed(model: Any, name: str = "model", may_be_program: bool = True) -> TargetModel:
    """Wrap a loaded model, finding out how it verifies. may_be_program: its whole forward may be one native call."""
    reasons: list[str] = []
    linear = kind_of_linear(model)
    for mode, by_op, by_program in TRIED:
        bucketed = mode == "packed" and model.device.type == "cuda"
        target = TargetModel(model, name, mode, "; ".join(reasons), bucketed=bucketed, attends_by_op=by_op, linear=linear)
        if (by_op and not op_may_serve(target)) or (by_program and not (may_be_program and _may_be_program(target))):
            continue
        try:
            if by_program:
                target = dataclasses.replace(target, program=program_of(target))
            slots = slots_of(target)
            error = _probe(target, slots) or (far_masks_differ(target) if mode in TREES else "")
        except Exception as failure:  # a model that cannot take the mask or the cache fails in its own way
            known = isinstance(failure, ModelError)
            error = first_line(failure) if known else f"{type(failure).__name__}: {first_line(failure)}"
            if isinstance(failure, NumbaError):  # an error of this package or of numba, not of the model
                why = " ".join(str(failure).split())[:MOST_OF_ERROR]
                log.warning("%s: a kernel does not compile, decoding continues without it, more slowly: %s", name, why)
        if not error:
            layers = slots.cache.shapes() if isinstance(slots, PackedSlots) else ()
            return tried_capture(dataclasses.replace(target, place_bytes=slots.place_bytes(), layers=layers))
        if by_program:
            log.info("%s: its forward is run module by module (%s)", name, error)
        if not by_op:
            reasons.append(f"no {mode} ({error})")
        elif target.device.type != "cpu" and not by_program:
            log.warning("%s: attention goes without lookahead::tree_attention: %s", name, error)
    return TargetModel(model, name, "plain", "; ".join(reasons), linear=linear)


def _probe(target: TargetModel, slots: Slots) -> str:
    """Decode a little in the target's mode. Returns what differs from the model's own scores, or ""."""
    generator = np.random.default_rng(0)

    def random(size: int) -> np.ndarray:
        return generator.integers(1, target.vocab_size, size).astype(np.int32)

    scored: list[tuple[list[int], torch.Tensor]] = []  # text, scores after it
    prompts = [random(size) for size in PROMPTS]
    for prompt in prompts:
        slots.begin(slots.add(prompt.tolist()))
    pieces: list[DraftTree | None] = [chain(prompt[:PIECE]) for prompt in prompts]
    _step(slots, pieces, [list(range(PIECE))[: len(prompt)] for prompt in prompts], [[], []], scored, "last")
    rest = chain(prompts[0][PIECE:])
    drafts = [_draft(target, random(6)), _draft(target, random(3))]
    shorter = chain(drafts[1].token_ids)
    _step(slots, [rest, shorter], [list(range(len(rest))), [0, 1]], [prompts[0][:PIECE], prompts[1]], scored)
    texts = [[*prompts[0]], [*prompts[1], *shorter.token_ids[:2]]]
    kept = BUSH_KEPT if target.mode in TREES else CHAIN_KEPT
    one = chain(random(1))
    _step(slots, [drafts[0], one], [kept, [0]], texts, scored)
    texts = [[*texts[0], *drafts[0].token_ids[kept]], [*texts[1], *one.token_ids]]
    bush = _draft(target, random(6))
    _step(slots, [chain(random(1)), bush], [[0], kept], texts, scored)
    slots.close(0)  # now alone, in another slot than before
    texts = [[*texts[1], *bush.token_ids[kept]]]
    for alone in (chain(random(1)), _draft(target, random(6))):
        _step(slots, [alone], [[0]], texts, scored)
        texts = [[*texts[0], *alone.token_ids[:1]]]
    return _difference(target, scored)


def _draft(target: TargetModel, token_ids: np.ndarray) -> DraftTree:
    tree = chain(token_ids)
    if len(tree) == len(BUSH) and target.mode in TREES:
        return dataclasses.replace(tree, parents=BUSH)
    return tree


def _step(
    slots: Slots,
    trees: list[DraftTree | None] | list[DraftTree],
    kept: list[list[int]],
    texts: list[Any],
    scored: list[tuple[list[int], torch.Tensor]],
    wanted: Wanted = "all",
) -> None:
    """Verify `trees` behind `texts`, note the scores, and keep a part."""
    scores = slots.forward(trees, [wanted] * len(trees))
    for slot, (tree, text) in enumerate(zip(trees, texts, strict=True)):
        assert tree is not None
        paths: list[list[int]] = []
        for node in range(len(tree)):
            parent = int(tree.parents[node])
            paths.append([*(paths[parent] if parent >= 0 else ()), int(tree.token_ids[node])])
        shown = paths if wanted == "all" else paths[-1:]
        scored += [([*map(int, text), *path], row) for path, row in zip(shown, scores.of(slot), strict=True)]
    slots.keep(kept)


def _difference(target: TargetModel, scored: list[tuple[list[int], torch.Tensor]]) -> str:
    """What is wrong with the scores, each compared with those of its text alone; "" if nothing is."""
    worst, noise = 0.0, 2 * torch.finfo(target.dtype).eps
    quantized = target.linear in QUANTIZED  # where a small difference becomes a large one
    rounded = quantized or target.dtype != torch.float32
    alone: dict[tuple[int, ...], torch.Tensor] = {}
    for text, row in sorted(scored, key=lambda pair: -len(pair[0])):  # the longer, the more beginnings of it are known too
        if tuple(text) not in alone:
            scores = _scores_alone(target, text)
            if not torch.isfinite(scores).all():
                return "scores are not finite"
            alone.update((tuple(text[: place + 1]), scores[place]) for place in range(len(text)))
            if rounded or len(alone) == len(text):  # how far rounding moves scores: other shapes
                others = [_scores_alone(target, [*text, 1])[: len(text)]]
                others += [] if not rounded or len(alone) > len(text) else _scores_in_pieces(target, text)
                others += [_scores_of_perturbed(target, text)] if quantized else []
                moved = max(float((scores - other).abs().max()) for other in others)
                noise = max(noise, moved / (float(scores[-1].std()) or 1.0))
        if not torch.isfinite(row).all():  # no difference is greater than one that is not a number
            return "scores are not finite"
        expected = alone[tuple(text)]
        spread = float(expected.std()) or 1.0
        worst = max(worst, float((expected - row.float()).abs().max()) / spread)
    if quantized:
        bound = max(MOST_NOISE / 2, 2 * min(noise, MOST_OF_QUANTIZED))
    else:
        bound = max(1e-2, 4 * min(noise, MOST_NOISE)) if rounded else max(1e-3, 4 * min(noise, 2.5e-3))
    if not worst <= bound:
        return f"scores differ by {worst:.2g} of their spread"
    return ""


def _scores_alone(target: TargetModel, text: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]: scores after each token of `text`, computed without a cache."""
    logits: torch.Tensor = target.model(input_ids=torch.tensor([text], device=target.device), use_cache=False).logits
    return logits[0].float()


def _scores_of_perturbed(target: TargetModel, text: list[int]) -> torch.Tensor:
    """The same with embeddings that are multiplied by 1 +- a few units of rounding."""

    def perturb(_: Any, given: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows * (1 + 4 * torch.finfo(rows.dtype).eps * torch.linspace(-1, 1, rows.shape[-1], device=rows.device)).to(rows)

    hook = target.model.get_input_embeddings().register_forward_hook(perturb)
    try:
        return _scores_alone(target, text)
    finally:
        hook.remove()


def _scores_in_pieces(target: TargetModel, text: list[int]) -> list[torch.Tensor]:
    """The same by the model's own cache, 3 tokens at a time; nothing if it takes no pieces."""
    cache, scores = None, []
    try:
        for start in range(0, len(text), 3):
            ids = torch.tensor([text[start : start + 3]], device=target.device)
            step = target.model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            scores.append(step.logits[0])
    except Exception:  # as the probe's own forwards, in a way of its own
        return []
    return [torch.cat(scores).float()]
