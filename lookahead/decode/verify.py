"""Verify and accept. In: a draft tree and what the model emits after each of its nodes. Out: the tokens it itself would emit.

Source: arXiv 2312.12728, verify-and-accept (VA).
"""

from __future__ import annotations

from collections.abc import Callable

from lookahead.draft.tree import Accepted, DraftTree


def verify_and_accept(tree: DraftTree, next_token: Callable[[int], int], goes_on: Callable[[int], bool]) -> Accepted:
    """Longest path of `tree` that the model would have decoded, and its own next token.

    next_token: the model's token after a node; asked along the accepted path only, once for each token.
    goes_on: called with each token in turn; False ends the answer with it.

    Example: root 5 with children 8 and 9, and 3 below 8. If the model emits 8 after 5, 3 after 8 and 4 after 3, then
    token_ids is [8, 3, 4].
    """
    if len(tree) == 1:
        token = next_token(0)
        goes_on(token)
        return Accepted([token], [0])
    ended = False

    def following(node: int, so_far: list[int]) -> int | None:
        nonlocal ended
        if ended:
            return None
        token = next_token(node)
        ended = not goes_on(token)
        return token

    return Accepted(*tree.follow(following))
