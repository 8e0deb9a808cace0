"""What a bench or a replay compares: options of each run, from those of the line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lookahead_cli.options import draft_options

if TYPE_CHECKING:
    from lookahead.draft.options import DraftOptions

MOST_AT_ONCE = 1024
STRATEGIES = ["auto", "hierarchical", "parallel", "single"]  # auto, the first, needs a model


def batch_sizes_of(text: str) -> list[int]:
    """ "1,8" -> [1, 8]. Raises UsageError."""
    from lookahead.errors import UsageError

    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and 1 <= int(size) <= MOST_AT_ONCE for size in sizes):
        raise UsageError(f"--batch-size {text}: give a number of prompts from 1 to {MOST_AT_ONCE}, or several such as 1,4,8.")
    return list(dict.fromkeys(map(int, sizes)))


def contenders(
    strategy: str | None,
    decoding_length: str | None,
    branch_length: str | None,
    session_tokens: int,
    price: float,
    with_model: bool,
) -> list[DraftOptions]:
    """Options of each run. Raises UsageError for unknown names and lengths."""
    from lookahead.errors import UsageError

    names = _strategies(strategy, STRATEGIES if with_model else STRATEGIES[1:])
    lengths = decoding_length.split(",") if decoding_length else ["16" if with_model else "64"]
    (branch, *more) = _lengths("--branch-length", branch_length) if branch_length else [64]
    if more:
        raise UsageError(f"--branch-length {branch_length}: several branch lengths need --sweep.")
    options = []
    for name in names:
        for length in lengths:
            if length == "auto" and not with_model:
                raise UsageError("--decoding-length auto needs a model: a replay has no forwards to price.")
            fixed = draft_options(name, length, branch, session_tokens, price)  # refuses what is no length, for auto as well
            options.append(draft_options(name, "auto", branch, session_tokens, price) if name == "auto" else fixed)
    return list(dict.fromkeys(options))


def swept(
    strategy: str | None,
    decoding_length: str | None,
    branch_length: str | None,
    session_tokens: int,
    price: float,
    with_model: bool = True,
) -> list[DraftOptions]:
    """Options of each run of a sweep, with a model auto first. Raises UsageError for unknown names and lengths."""
    from lookahead.bench.sweep import BRANCH_LENGTHS, DECODING_LENGTHS, grid
    from lookahead.errors import UsageError

    known = STRATEGIES if with_model else STRATEGIES[1:]
    names = [name for name in _strategies(strategy or "hierarchical", known) if name != "auto"]
    if not names:
        raise UsageError(f"--sweep --strategy {strategy}: auto has no lengths to sweep; it runs beside what is swept.")
    lengths = _lengths("--decoding-length", decoding_length) if decoding_length else DECODING_LENGTHS
    branches = _lengths("--branch-length", branch_length) if branch_length else BRANCH_LENGTHS
    options = [draft_options("auto", "auto", max(branches), session_tokens, price)] if with_model else []
    for name in names:
        options += [draft_options(name, str(n), b, session_tokens, price) for n, b in grid(lengths, branches)]
    return options


def _strategies(asked: str | None, possible: list[str]) -> list[str]:
    from lookahead.errors import UsageError

    names = list(dict.fromkeys(asked.split(","))) if asked else possible
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise UsageError(f"--strategy {unknown[0]}: choose from {', '.join(possible)}.")
    return names


def _lengths(option: str, text: str) -> list[int]:
    """ "4,8" -> [4, 8]. Raises UsageError."""
    from lookahead.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise UsageError(f"{option} {text}: give a number of tokens from 1 to 1024, or with --sweep several such as 4,8,16.")
    return [int(part) for part in parts]
