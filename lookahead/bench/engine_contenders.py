"""What a bench in vLLM or SGLang compares. In: strategies and lengths as typed. Out: contenders, and settings of an engine.

Of the engine's own ways to draft, those are compared that know no more than ours do: its n-gram and suffix drafts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lookahead.bench.compare import PLAIN
from lookahead.draft.options import DraftOptions
from lookahead.errors import UsageError
from lookahead.job.drafting import draft_options
from lookahead.job.spec import SESSION_TOKENS
from lookahead.models.options import ModelOptions

if TYPE_CHECKING:
    from lookahead.engines.foreign import ForeignSettings

NEEDS = {"suffix": "arctic_inference"}  # package of one of the engines' own ways


@dataclasses.dataclass(frozen=True)
class Ways:
    """How an engine can draft.

    strategies: ours that it verifies, all of them by default. drafts: what it verifies. decoding_length: of a row in a
    forward, the root included, where nobody sets it. own: the engine's own ways, by name: arguments of it (of vLLM: a
    speculative config).
    """

    strategies: tuple[str, ...]
    drafts: str
    decoding_length: int
    own: Mapping[str, Mapping[str, Any]]


WAYS = {
    "vllm": Ways(
        ("auto", "single"),
        "vLLM verifies single branches",
        9,  # a chain is saturated at 8 to 15 draft tokens
        {
            "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
            "suffix": {"method": "suffix"},
        },
    ),
    "sglang": Ways(
        ("hierarchical",),
        "SGLang is given one tree of all branches, always of one size",
        16,
        {"ngram": {"speculative_algorithm": "NGRAM"}},
    ),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """name: of its run. options: how we draft; None: the engine's own way `own`, see `Ways`. draft_tokens: of a row, at
    most.
    """

    name: str
    options: DraftOptions | None
    draft_tokens: int
    own: Mapping[str, Any] | None = None


def contenders(
    engine: str,
    strategy: str | None = None,
    decoding_length: str | None = None,
    branch_length: str | None = None,
    session_tokens: int = SESSION_TOKENS,
    price: float = 0.0,
    peers: bool = True,
) -> list[Contender]:
    """Plain decoding, the engine's own ways to draft that are installed, ours.

    engine: "vllm" or "sglang". Strategies and lengths as typed, several with commas. Raises UsageError for what it does not
    have.
    """
    ways = WAYS[engine]
    names = list(dict.fromkeys(strategy.split(","))) if strategy else list(ways.strategies)
    for name in names:
        if name not in ways.strategies:
            raise UsageError(f"--strategy {name}: {ways.drafts}. Choose {' or '.join(ways.strategies)}.")
    lengths = list(dict.fromkeys((decoding_length or str(ways.decoding_length)).split(",")))
    branch = _branch_length(engine, branch_length)
    found: dict[str, Contender] = {}
    for name in names:
        for length in lengths:
            adaptive = name == "auto" or (length == "auto" and "auto" in ways.strategies)
            number = str(ways.decoding_length) if length == "auto" else length
            typed = draft_options("single" if name == "auto" else name, number, branch, session_tokens, price, recycle=False)
            drafted = max(1, typed.decoding_length - 1)
            if typed.strategy == "single":
                drafted = min(typed.branch_length, drafted)
            options = dataclasses.replace(typed, decoding_length=drafted + 1, branch_length=drafted, adaptive=adaptive)
            label = f"{'auto' if adaptive else name} {number}"
            found["auto" if adaptive and len(lengths) == 1 else label] = Contender("", options, drafted)
    ours = [dataclasses.replace(each, name=name) for name, each in found.items()]
    most = max(each.draft_tokens for each in ours)
    own = [Contender(name, None, most, arguments) for name, arguments in ways.own.items()] if peers else []
    return [Contender(PLAIN, DraftOptions("off"), 0), *filter(_installed, own), *ours]


def _branch_length(engine: str, typed: str | None) -> int:
    """Draft tokens on one path, at most. Raises UsageError where they cannot be limited, or for what is not one number."""
    if typed and "single" not in WAYS[engine].strategies:
        raise UsageError("--branch-length: SGLang's draft trees may be as deep as they have nodes. Set --decoding-length.")
    if typed and (not typed.isdecimal() or not 1 <= int(typed) <= 1024):
        raise UsageError(f"--branch-length {typed}: give a number of tokens from 1 to 1024.")
    return int(typed or 64)


def _installed(contender: Contender) -> bool:
    package = NEEDS.get(contender.name)
    return package is None or importlib.util.find_spec(package) is not None


@dataclasses.dataclass(frozen=True)
class EngineBench:
    """A model in another engine, and what is compared on it. engine: "vllm" or "sglang". engine_args: of it, by name.

    Others as of `on_model.ModelBench`.
    """

    engine: str
    model: ModelOptions
    contenders: Sequence[Contender]
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 1
    lossless_rows: int | None = 64
    engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    def settings(
        self, contender: Contender, tries: Sequence[str], weights: Sequence[float], batch_size: int, running: int = 0
    ) -> ForeignSettings:
        """What the engine is started with for a contender. running: contenders that have been started before it."""
        from lookahead.engines.sglang_engine import SglangSettings
        from lookahead.engines.vllm_engine import VllmSettings

        of: type[ForeignSettings] = SglangSettings if self.engine == "sglang" else VllmSettings
        return of(
            self.model,
            tuple(tries),
            tuple(weights),
            contender.options or DraftOptions("off"),
            contender.draft_tokens,
            batch_size,
            self.engine_args,
            contender.own,
            len(self.contenders),
            running,
        )
