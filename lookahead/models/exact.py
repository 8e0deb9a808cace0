"""Whether a model gives a token the same scores, bit for bit, in any forward. In: a probed model. Out: what differs, or "".

Attention by lookahead::tree_attention does, and so do most ways of multiplying by a matrix, but not all (linear.py). So it is
tried: a text goes through the model token by token, then in forwards of other sizes, in a tree, alongside other texts, and its
beginning in other pieces. Where all of these agree, drafts and batches change no score, and so no token, in any dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from lookahead.draft.tree import DraftTree, chain, side_by_side
from lookahead.forward.slots import Scores, Slots, slots_of
from lookahead.forward.target import TargetModel

BEGINNING, LENGTH = 40, 33  # tokens that are prefilled, and that follow
SIZES = (2, 3, 4, 6, 8, 16, 33)  # tokens at once
PIECES = ((1, 39), (2, 3, 4, 6, 8, 17), (33, 7))  # of the beginning
LARGE = 96  # tokens of a tree in which the text is one path


def tried_for_exactness(target: TargetModel) -> TargetModel:
    """The same model; `exact` tells what was found, now or before."""
    return target if target.exact else dataclasses.replace(target, exact=not batch_invariance_violation(target))


def tried_in_half(target: TargetModel) -> TargetModel:
    """The same model; where it is in half precision, `exact` or `inexact` tells what drafts and batches may do to its answers.

    On a CPU a program sums in an order that does not depend on other tokens, in any model: it is not tried here.
    """
    if target.exact or target.mode == "plain" or target.dtype == torch.float32:
        return target
    if target.program is not None and target.program.exact:
        return dataclasses.replace(target, exact=True)
    where = batch_invariance_violation(target)
    return dataclasses.replace(target, exact=not where, inexact=where)


def exact_or_plain(target: TargetModel) -> TargetModel:
    """The same for a quantized model: in mode "plain" if it is not exact.

    Where forwards round differently, tokens are quantized to other numbers: answers part far more often than in float32.
    """
    where = batch_invariance_violation(target)
    if not where:
        return dataclasses.replace(target, exact=True)
    reason = f"quantized, and not the same bits in every forward ({where})"
    return dataclasses.replace(target, mode="plain", reason=reason, attends_by_op=False, program=None)


@torch.inference_mode()
def batch_invariance_violation(target: TargetModel) -> str:
    """Next to which other tokens the scores of a token are other bits than alone; "" if nowhere."""
    if target.mode != "packed" or not target.attends_by_op:
        return "attention is not computed in a fixed order"
    random, length = np.random.default_rng(0), BEGINNING + LARGE + 1
    if target.longest_text < length:
        return f"it has positions for {target.longest_text} tokens only"
    texts = [random.integers(1, target.vocab_size, length).astype(np.int32) for _ in range(3)]
    text, path = texts[0], texts[0][BEGINNING : BEGINNING + LENGTH]
    slots = begun(target, [text])
    alone = torch.stack([_taken(slots, [chain(path[node : node + 1])]).of(0)[0] for node in range(LENGTH)])
    for size in SIZES:
        if not _scores(begun(target, [text]), [chain(path[:size])]).equal(alone[:size]):
            return f"with {size} tokens of one text in a forward"
    for pieces in PIECES:
        if not _scores(begun(target, [text], pieces), [chain(path)]).equal(alone):
            return f"behind a text that was prefilled {', '.join(map(str, pieces))} tokens at a time"
    order = [0, *(1 + np.sort(random.permutation(LARGE - 1)[: LENGTH - 1]))]  # where in the tree the path stands
    if not _scores(begun(target, [text]), [_tree(path, order, random, target.vocab_size)])[order].equal(alone):
        return "in a draft tree"
    for sizes in ((1, 1, 1), (2, 1, 4), (8, 33, 5)):
        trees = [chain(each[BEGINNING : BEGINNING + size]) for each, size in zip(texts, sizes, strict=True)]
        if not _scores(begun(target, texts), trees).equal(alone[: sizes[0]]):
            return f"alongside other texts, which bring {sizes[1]} and {sizes[2]} tokens to its {sizes[0]}"
    return ""


def begun(target: TargetModel, texts: Sequence[np.ndarray], pieces: Sequence[int] = (BEGINNING,)) -> Slots:
    """Slots that hold the beginnings of these texts, which were prefilled in such pieces."""
    slots = slots_of(target)
    for text in texts:
        slots.begin(slots.add(text[: sum(pieces)].tolist(), LARGE))
    start = 0
    for size in pieces:
        slots.forward(side_by_side([chain(text[start : start + size]) for text in texts], ["last"] * len(texts)))
        slots.keep([range(size)] * len(texts))
        start += size
    return slots


def _taken(slots: Slots, trees: list[DraftTree]) -> Scores:
    """Scores of one token of each text, which is kept. They stay: those of a captured step are overwritten by the next."""
    scores = slots.forward(side_by_side(trees, ["all"] * len(trees)))
    slots.keep([[0]] * len(trees))
    return Scores(scores.logits.clone(), [1] * len(trees))


def _scores(slots: Slots, trees: list[DraftTree]) -> torch.Tensor:
    """[nodes, vocab] of the first text's tree."""
    return slots.forward(side_by_side(trees, ["all"] * len(trees))).of(0)


def _tree(path: np.ndarray, order: Sequence[int], random: np.random.Generator, vocab_size: int) -> DraftTree:
    """A tree of LARGE nodes, of which those in `order` are `path`; the others follow any node before them."""
    tree = chain(random.integers(1, vocab_size, LARGE).astype(np.int32))
    tree.parents = np.array([-1, *(random.integers(0, node) for node in range(1, LARGE))], np.int32)
    tree.token_ids[order] = path
    tree.parents[order[1:]] = order[:-1]
    return tree
