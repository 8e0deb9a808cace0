"""Settings of a drafter."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from lookahead.errors import UsageError

Strategy = Literal["hierarchical", "parallel", "single", "off"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """Settings of how much is drafted in a step.

    decoding_length  tokens in one forward: the root + the draft tokens
    branch_length    draft tokens on one path below the root
    price            probability that a path must have to be worth one more token in the forward
    session_tokens   output tokens of the job that are remembered
    adaptive         decoding_length is the limit; in an engine, each step verifies the nodes that pay at measured costs, none
                     if none do (budget/policy.py). False: each step drafts up to decoding_length, regardless of its cost. A
                     `Row` that is used without an engine has no budget and always does so. "off" drafts nothing: always False
    learn            learn from what is accepted; else every job drafts by the shipped priors
    recycle          draft from runner-up tokens, too (recycled.py)
    """

    strategy: Strategy = "hierarchical"
    decoding_length: int = 64
    branch_length: int = 64
    price: float = 0.0
    session_tokens: int = 4_000_000
    adaptive: bool = True
    learn: bool = True
    recycle: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}.")
        if self.strategy == "off":
            object.__setattr__(self, "adaptive", False)
        if not 1 <= self.decoding_length <= 1024 or not 1 <= self.branch_length <= 1024:
            raise UsageError("decoding length and branch length must lie between 1 and 1024 tokens.")
        if not 0 <= self.price <= 1:
            raise UsageError("the price of a draft token must lie between 0 and 1.")
        if self.session_tokens < 0:
            raise UsageError("session tokens must be 0 or more.")
