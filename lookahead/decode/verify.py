"""Verify and accept. In: a draft tree and the model's scores for its nodes. Out: the tokens the model itself would say.

Source: arXiv 2312.12728, verify-and-accept (VA).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from lookahead.draft.tree import DraftTree

# (token ids so far int64 [1, length], scores [1, vocab]) -> scores [1, vocab]: transformers' LogitsProcessorList
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Accepted:
    """What a step yields.

    token_ids: 1 to branch_length + 1 tokens; the last is the model's own.
    nodes: the root and the accepted draft nodes, in path order; one fewer draft node than token_ids has tokens.
    """

    token_ids: list[int]
    nodes: list[int]


def verify_and_accept(
    tree: DraftTree, logits: torch.Tensor, processor: Processor | None = None, text: torch.Tensor | None = None
) -> Accepted:
    """Longest path of `tree` that the model would have decoded greedily, and its own next token.

    logits: [nodes, vocab]; row i scores the token after node i.
    processor: applied along the visited path only; needs `text`, int64 [1, length], the tokens up to the root.
    Raises ValueError if rows and nodes differ.

    Example: root 5 with children 8 and 9, and 3 below 8. If the model says 8 after 5, 3 after 8 and 4 after 3, then
    token_ids is [8, 3, 4].
    """
    if logits.shape[0] != len(tree):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(tree)} nodes")
    if processor is None and len(tree) == 1:
        return Accepted([int(logits[0].argmax())], [0])
    if processor is None:
        best = logits.argmax(-1).tolist()  # the one moment a step waits for the device
        return Accepted(*tree.follow(lambda node, so_far: best[node]))
    assert text is not None

    def say(node: int, so_far: list[int]) -> int:
        ids = torch.cat([text, torch.tensor([so_far], dtype=text.dtype, device=text.device)], dim=1)
        return int(processor(ids, logits[node : node + 1].float()).argmax(-1))

    return Accepted(*tree.follow(say))
