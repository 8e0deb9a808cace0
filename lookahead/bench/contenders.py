"""What a bench or a replay compares. In: strategies and lengths as they are typed. Out: options of each run."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lookahead.errors import UsageError
from lookahead.job.drafting import draft_options
from lookahead.job.spec import SESSION_TOKENS

if TYPE_CHECKING:
    from lookahead.draft.options import DraftOptions

MOST_AT_ONCE = 1024
STRATEGIES = ["auto", "hierarchical", "parallel", "single"]  # auto, the first, needs a model


def batch_sizes_of(text: str) -> list[int]:
    """ "1,8" -> [1, 8]. Raises UsageError."""
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and 1 <= int(size) <= MOST_AT_ONCE for size in sizes):
        raise UsageError(f"--batch-size {text}: give a number of prompts from 1 to {MOST_AT_ONCE}, or several such as 1,4,8.")
    return list(dict.fromkeys(map(int, sizes)))


@dataclasses.dataclass(frozen=True)
class Contenders:
    """Which runs are wanted, as it was typed: several names or lengths with commas between them; None: the usual ones.

    sweep: every decoding length with every branch length.
    """

    strategy: str | None = None
    decoding_length: str | None = None
    branch_length: str | None = None
    session_tokens: int = SESSION_TOKENS
    price: float = 0.0
    sweep: bool = False

    def options(self, timed: bool) -> list[DraftOptions]:
        """Of each run. timed: what forwards cost is known. Raises UsageError for unknown names and lengths."""
        return self._swept(timed) if self.sweep else self._one_by_one(timed)

    def _one_by_one(self, timed: bool) -> list[DraftOptions]:
        names = _strategies(self.strategy, STRATEGIES if timed else STRATEGIES[1:])
        lengths = self.decoding_length.split(",") if self.decoding_length else ["16" if timed else "64"]
        (branch, *more) = _lengths("--branch-length", self.branch_length) if self.branch_length else [64]
        if more:
            raise UsageError(f"--branch-length {self.branch_length}: several branch lengths need --sweep.")
        options = []
        for name in names:
            for length in lengths:
                if length == "auto" and not timed:
                    raise UsageError("--decoding-length auto needs a model: a replay has no forwards to price.")
                fixed = self._of(name, length, branch)  # refuses what is not a length, for auto as well
                options.append(self._of(name, "auto", branch) if name == "auto" else fixed)
        return list(dict.fromkeys(options))

    def _swept(self, timed: bool) -> list[DraftOptions]:
        """Where costs are known auto comes first."""
        from lookahead.bench.sweep import BRANCH_LENGTHS, DECODING_LENGTHS, grid

        known = STRATEGIES if timed else STRATEGIES[1:]
        names = [name for name in _strategies(self.strategy or "hierarchical", known) if name != "auto"]
        if not names:
            raise UsageError(f"--sweep --strategy {self.strategy}: auto has no lengths to sweep; it runs in any case.")
        lengths = _lengths("--decoding-length", self.decoding_length) if self.decoding_length else DECODING_LENGTHS
        branches = _lengths("--branch-length", self.branch_length) if self.branch_length else BRANCH_LENGTHS
        options = [self._of("auto", "auto", max(branches))] if timed else []
        for name in names:
            options += [self._of(name, str(n), b) for n, b in grid(lengths, branches)]
        return options

    def _of(self, strategy: str, decoding_length: str, branch_length: int) -> DraftOptions:
        return draft_options(strategy, decoding_length, branch_length, self.session_tokens, self.price)


def _strategies(asked: str | None, possible: list[str]) -> list[str]:
    names = list(dict.fromkeys(asked.split(","))) if asked else possible
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise UsageError(f"--strategy {unknown[0]}: choose from {', '.join(possible)}.")
    return names


def _lengths(option: str, text: str) -> list[int]:
    """ "4,8" -> [4, 8]. Raises UsageError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise UsageError(f"{option} {text}: give a number of tokens from 1 to 1024, or with --sweep several such as 4,8,16.")
    return [int(part) for part in parts]
