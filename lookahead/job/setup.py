"""What a job's engine is made of. In: names and options, which can be sent to another process. Out: an engine that is ready."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lookahead.arguments import numbers_of, paths_of
from lookahead.decode.chooser import check_generation_config
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.generation_config import not_used
from lookahead.decode.sampling import GREEDY, Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.sources import DraftSource
from lookahead.forward.backends import by_own_settings
from lookahead.forward.target import TargetModel
from lookahead.job.events import COMPILING
from lookahead.models.load import load_model
from lookahead.models.options import ModelOptions
from lookahead.native.threads import c_function
from lookahead.step import kernels
from lookahead.token_documents import TokenizerIdentity
from lookahead.tokenizer import identity, without_limits
from lookahead.trie.file import Trie

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """tries, weights: see `draft.drafter.Drafter`. batch_size: rows at once; None: what suits the device."""

    model: ModelOptions
    tries: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    drafts: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    batch_size: int | None = None
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "tries", paths_of(self.tries, "tries"))
        object.__setattr__(self, "weights", numbers_of(self.weights, "weights"))

    def load(self, with_spinner: Callable[[Callable[[], Any], str], Any] = lambda act, why: act()) -> LoadedEngine:
        """Open the tries, load the model, compile the kernels. Raises LookaheadError if model or tries cannot be used."""
        tries = [Trie(path) for path in self.tries]  # first, as that is quick and often what is wrong
        model = self.model
        named = model.load_tokenizer() if model.tokenizer else None
        loading = f"Loading {os.path.basename(model.name) or model.name} ..."
        target, tokenizer = with_spinner(lambda: (load_model(model), named or model.load_tokenizer()), loading)
        compiling = lambda compile_kernels: with_spinner(compile_kernels, COMPILING)  # noqa: E731
        drafting = tries, self.weights or None, self.drafts
        return assemble(target, tokenizer, *drafting, self.batch_size, self.prefill_chunk, compiling, model.tokenizer)


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """tokenizer: None if the model has none. identity: what its token ids are."""

    engine: DecodingEngine
    tokenizer: Any | None
    identity: TokenizerIdentity

    def notices(self, sampling: Sampling = GREEDY) -> list[str]:
        """What a user should know of the model. Raises ModelError if `sampling` wants its own sampling, and that is wrong."""
        target = self.engine.target
        if sampling.sampling == "model":
            check_generation_config(target, self.tokenizer, Sampling(sampling="model"))
        return [notice for notice in (*target.notices, not_used(target, sampling)) if notice]


def rows_at_once(device: torch.device) -> int:
    """The batch size, where none is asked for."""
    return 8 if device.type == "cpu" else 32


@by_own_settings
def assemble(
    target: TargetModel,
    tokenizer: Any | None,
    tries: Sequence[Trie],
    weights: Sequence[float] | None,
    drafts: DraftOptions,
    batch_size: int | None = None,
    prefill_chunk: int = 512,
    compiling: Callable[[Callable[[], None]], None] = lambda compile: compile(),
    tokenizer_name: str | None = None,
    sources: DraftSource | Sequence[DraftSource] = (),
) -> LoadedEngine:
    """An engine of its parts, with compiled kernels. Raises LookaheadError for a trie or config that cannot be used."""
    check_generation_config(target, without_limits(tokenizer), GREEDY)
    known = TokenizerIdentity(target.vocab_size, "", target.name)
    if tokenizer is not None:
        known = identity(tokenizer, tokenizer_name or target.name)
    for trie in tries:
        trie.check_tokenizer(known.fingerprint, max(target.vocab_size, known.vocab_size), target.name)
    drafter = Drafter(tries, drafts, weights, sources=sources)

    def compile_kernels() -> None:
        drafter.warm_up()
        c_function(kernels.propose)
        c_function(kernels.accept)

    compiling(compile_kernels)
    size = batch_size or rows_at_once(target.device)
    engine = DecodingEngine(target, drafter, size, prefill_chunk, tokenizer)
    lengths = f"decoding length {drafts.decoding_length}, branch length {drafts.branch_length}"
    log.info("costs of forwards: measured %s", "earlier" if engine.budget.is_measured else "before the first row")
    log.info("batch size %d, strategy %s%s, %s", size, drafts.strategy, " (auto)" if drafts.adaptive else "", lengths)
    return LoadedEngine(engine, tokenizer, known)
