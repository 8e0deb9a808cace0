"""Whether packed steps can be captured as graphs. In: a probed model. Out: the same, with `capture` where replays are right.

A step is captured, then replayed with other trees, and its scores are compared with those of the model's own forward.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import torch

from lookahead.backends.cuda.graphs import Capture, CudaCapture
from lookahead.draft.tree import DraftTree, chain, side_by_side
from lookahead.forward.slots import PackedSlots
from lookahead.forward.target import TargetModel
from lookahead.models.exact import begun
from lookahead.tokenizer import first_line

log = logging.getLogger(__name__)

PROMPT = 12  # tokens
# Trees of two slots, by parents: both steps are of 8 tokens, filled up or not
FIRST = ((-1, 0, 0, 1), (-1, 0, 1, 2))
SECOND = ((-1, 0, 1, 1, 0), (-1, 0))
FAR = {torch.float32: 1e-4}  # of the spread of scores, by which a replay may differ from the forward; others: 1e-2


def tried_capture(target: TargetModel, capture: Capture | None = None) -> TargetModel:
    """The same model, whose steps are captured if that is right. capture: how; None: as CUDA does."""
    if target.mode != "packed" or not target.attends_by_op or not target.bucketed or target.is_shared:
        return target
    captured = dataclasses.replace(target, capture=capture or CudaCapture(target.device))
    try:
        error = _differs(captured)
    except Exception as failure:  # each library fails in its own way
        error = f"{type(failure).__name__}: {first_line(failure)}"
    if error:
        log.warning("%s: steps are not captured as graphs: %s", target.name, error)
        return target
    return captured


@torch.inference_mode()
def _differs(target: TargetModel) -> str:
    """Describe how a replay differs from the model's own forward; "" if it does not."""
    random = np.random.default_rng(0)
    texts = [random.integers(1, target.vocab_size, PROMPT).astype(np.int32) for _ in FIRST]
    first, second = (
        [_tree(random.integers(1, target.vocab_size, len(parents)), parents) for parents in step] for step in (FIRST, SECOND)
    )
    replayed, plain = (begun(each, texts, [PROMPT]) for each in (target, dataclasses.replace(target, capture=None)))
    for trees in (first, second):
        total = sum(map(len, trees))
        scores, expected = (
            slots.forward(side_by_side(trees, ["all", "all"])).logits[:total].float() for slots in (replayed, plain)
        )
        worst = float((scores - expected).abs().max()) / (float(expected.std()) or 1.0)
        if not worst <= FAR.get(target.dtype, 1e-2):
            return f"scores differ by {worst:.2g} of their spread"
    assert isinstance(replayed, PackedSlots)
    assert replayed.captured
    return "" if replayed.captured.replays == 2 else "a step could not be captured"


def _tree(token_ids: np.ndarray, parents: tuple[int, ...]) -> DraftTree:
    return dataclasses.replace(chain(token_ids.astype(np.int32)), parents=np.array(parents, np.int32))
