"""What a bench or a replay compares. In: strategies and lengths as they are typed. Out: options of each run.

In vLLM and SGLang, of the engine's own ways to draft those are compared that know no more than ours: n-gram and suffix drafts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lookahead.bench.options import BenchOptions
from lookahead.errors import UsageError
from lookahead.job.plan import draft_options
from lookahead.models.options import ModelOptions

if TYPE_CHECKING:
    from lookahead.draft.options import DraftOptions


PLAIN = "plain"
STRATEGIES = ["auto", "hierarchical", "parallel", "single"]  # auto, the first, needs a model


DECODING_LENGTHS = (2, 4, 8, 16, 32, 64)
BRANCH_LENGTHS = (4, 8, 16, 64)


def grid(decoding_lengths: Iterable[int], branch_lengths: Iterable[int]) -> list[tuple[int, int]]:
    """(decoding length, branch length) of settings that differ: 4 and 16 with 4, 8, 16: (4, 4), (16, 4), (16, 8), (16, 16)."""
    pairs = []
    for length in sorted(set(decoding_lengths)):
        for branch in sorted(set(branch_lengths)):
            pairs.append((length, branch))
            if branch >= length - 1:
                break
    return pairs


def batch_sizes_of(text: str) -> list[int]:
    """ "1,8" -> [1, 8]. Raises UsageError."""
    return list(dict.fromkeys(_numbers("--batch-size", text, "prompts", "several such as 1,4,8")))


def _lengths(option: str, text: str) -> list[int]:
    return _numbers(option, text, "tokens", "with --sweep several such as 4,8,16")


def _numbers(option: str, text: str, unit: str, several: str) -> list[int]:
    """ "4,8" -> [4, 8]. Raises UsageError for anything but numbers from 1 to 1024."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts):
        raise UsageError(f"{option} {text}: give a number of {unit} from 1 to 1024, or {several}.")
    return [int(part) for part in parts]


def options_of(bench: BenchOptions, timed: bool) -> list[DraftOptions]:
    """Options of each run. timed: what forwards cost is known. Raises UsageError for unknown names and lengths."""
    if bench.sweep:
        return _swept(bench, timed)
    names = _strategies(bench.strategy, STRATEGIES if timed else STRATEGIES[1:])
    lengths = bench.decoding_length.split(",") if bench.decoding_length else ["16" if timed else "64"]
    (branch, *more) = _lengths("--branch-length", bench.branch_length) if bench.branch_length else [64]
    if more:
        raise UsageError(f"--branch-length {bench.branch_length}: several branch lengths need --sweep.")
    options, kept = [], (bench.session_tokens, bench.price)
    for name, length in itertools.product(names, lengths):
        if length == "auto" and not timed:
            raise UsageError("--decoding-length auto needs a model: a replay has no forwards to price.")
        fixed = draft_options(name, length, branch, *kept)  # refuses what is not a length, for auto as well
        options.append(draft_options(name, "auto", branch, *kept) if name == "auto" else fixed)
    return list(dict.fromkeys(options))


def _swept(bench: BenchOptions, timed: bool) -> list[DraftOptions]:
    known, kept = STRATEGIES if timed else STRATEGIES[1:], (bench.session_tokens, bench.price)
    names = [name for name in _strategies(bench.strategy or "hierarchical", known) if name != "auto"]
    if not names:
        raise UsageError(f"--sweep --strategy {bench.strategy}: auto has no lengths to sweep; it runs in any case.")
    lengths = _lengths("--decoding-length", bench.decoding_length) if bench.decoding_length else DECODING_LENGTHS
    branches = _lengths("--branch-length", bench.branch_length) if bench.branch_length else BRANCH_LENGTHS
    options = [draft_options("auto", "auto", max(branches), *kept)] if timed else []
    return [*options, *(draft_options(name, n, b, *kept) for name in names for n, b in grid(lengths, branches))]


def _strategies(asked: str | None, possible: list[str]) -> list[str]:
    names = list(dict.fromkeys(asked.split(","))) if asked else possible
    unknown = [name for name in names if name not in possible]
    if unknown:
        raise UsageError(f"--strategy {unknown[0]}: choose from {', '.join(possible)}.")
    return names


NEEDS = {"suffix": "arctic_inference"}  # package of one of the engines' own ways


@dataclasses.dataclass(frozen=True)
class DraftMethods:
    """Strategies of ours that an engine verifies, its usual decoding length, its own ways with their arguments."""

    strategies: tuple[str, ...]
    drafts: str
    decoding_length: int
    own: Mapping[str, Mapping[str, Any]]


METHODS = {
    "vllm": DraftMethods(
        ("auto", "single"),
        "vLLM verifies single branches",
        9,  # a chain is saturated at 8 to 15 draft tokens
        {"ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}, "suffix": {"method": "suffix"}},
    ),
    "sglang": DraftMethods(
        ("hierarchical",),
        "SGLang is given one tree of all branches, always of one size",
        16,
        {"ngram": {"speculative_algorithm": "NGRAM"}},
    ),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A run. options: how we draft; None: in the engine's own way `own`. draft_tokens: of a row, at most."""

    name: str
    options: DraftOptions | None
    draft_tokens: int
    own: Mapping[str, Any] | None = None


def contenders(engine: str, typed: BenchOptions) -> list[Contender]:
    """Plain decoding, the engine's own ways to draft that are installed, ours. Raises UsageError for what it does not have."""
    from lookahead.draft.options import DraftOptions

    methods, strategy, branch_length = METHODS[engine], typed.strategy, typed.branch_length
    names = list(dict.fromkeys(strategy.split(","))) if strategy else list(methods.strategies)
    for name in names:
        if name not in methods.strategies:
            raise UsageError(f"--strategy {name}: {methods.drafts}. Choose {' or '.join(methods.strategies)}.")
    lengths = list(dict.fromkeys((typed.decoding_length or str(methods.decoding_length)).split(",")))
    if branch_length and "single" not in methods.strategies:
        raise UsageError("--branch-length: SGLang's draft trees may be as deep as they have nodes. Set --decoding-length.")
    if branch_length and (not branch_length.isdecimal() or not 1 <= int(branch_length) <= 1024):
        raise UsageError(f"--branch-length {branch_length}: give a number of tokens from 1 to 1024.")
    branch = int(branch_length or 64)
    found: dict[str, Contender] = {}
    for name, length in itertools.product(names, lengths):
        adaptive = name == "auto" or (length == "auto" and "auto" in methods.strategies)
        number = str(methods.decoding_length) if length == "auto" else length
        kept = typed.session_tokens, typed.price
        options = draft_options("single" if name == "auto" else name, number, branch, *kept, recycle=False)
        drafted = max(1, options.decoding_length - 1)
        if options.strategy == "single":
            drafted = min(options.branch_length, drafted)
        options = dataclasses.replace(options, decoding_length=drafted + 1, branch_length=drafted, adaptive=adaptive)
        label = "auto" if adaptive and len(lengths) == 1 else f"{'auto' if adaptive else name} {number}"
        found[label] = Contender(label, options, drafted)
    ours = list(found.values())
    most = max(each.draft_tokens for each in ours)
    installed = {name: given for name, given in methods.own.items() if name not in NEEDS or find_spec(NEEDS[name])}
    own = [Contender(name, None, most, arguments) for name, arguments in installed.items()] if typed.peers else []
    return [Contender(PLAIN, DraftOptions("off"), 0), *own, *ours]


@dataclasses.dataclass(frozen=True)
class ModelBench:
    """A model, and what is compared on it.

    options: of each run of ours. contenders: instead of these, in vLLM or SGLang. tries, weights: as typed. rows: of the
    prompts; None: all. repeats: how often all is answered, what was learned forgotten in between; a turn counts as its repeat
    of median time did. recycling: each of `options` that recycles also runs with nothing recycled, and where there are tries
    both also without. lossless_rows: the first rows, whose outputs are compared with plain decoding; None: all.
    """

    model: ModelOptions
    options: Sequence[DraftOptions] = ()
    contenders: Sequence[Contender] = ()
    tries: Sequence[str] = ()
    weights: Sequence[str] | None = None
    max_new_tokens: int = 256
    rows: int | None = None
    batch_sizes: Sequence[int] = (1,)
    peers: bool = True
    repeats: int = 1
    recycling: bool = False
    lossless_rows: int | None = 64

    def checked_of(self, rows: int) -> int:
        """Return how many of the rows are compared with plain decoding."""
        return rows if self.lossless_rows is None else min(rows, self.lossless_rows)
