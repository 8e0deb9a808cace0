"""An engine of others that answers a job. In: requests, as our own engine takes them. Out: the same, ended, with its tokens.

What vLLM and SGLang share: each stands where `decode.engine.DecodingEngine` does. `request` makes a `Generation` or raises what
is wrong with it, `run` decodes as many at once as the engine takes. What our drafter counts is asked of it from time to time,
as it may live in another process: requests are identified by their text.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from lookahead.decode.request import Generation, room_of
from lookahead.decode.sampling import GREEDY, Sampling, check_vocabulary
from lookahead.decode.text import found_in, text_of
from lookahead.draft.options import DraftOptions
from lookahead.errors import EngineDiedError, LookaheadError, UsageError, first_line
from lookahead.models.options import ModelOptions

log = logging.getLogger(__name__)

OFF = {"typical_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # values that ask for nothing, as 0 and nothing at all
DEAD = "EngineDeadError"  # vLLM's, which it also raises where it gets a request
AHEAD = 2  # batches of requests that an engine holds, so that a row begins as soon as one has ended
ASK_SECONDS = 0.25  # between two calls to the drafter, which may be in another process; answers wait for it that long


@dataclasses.dataclass(frozen=True)
class EngineFeatures:
    """Names what an engine cannot do of all that a request may ask.

    title: of the engine. missing: fields that it does not have. not_with_drafts: fields that it does not have while it verifies
    drafts; objection: what it does then.
    """

    title: str
    missing: tuple[str, ...]
    not_with_drafts: tuple[str, ...]
    objection: str

    def check(self, sampling: Sampling, drafts: bool = True) -> None:
        """Raises UsageError for what the engine cannot do. drafts: it is asked to verify some."""
        if sampling.sampling == "model":
            raise UsageError(
                f"sampling is model: {self.title} does not sample by all of the model's generation config, give a temperature."
            )
        for name in self.missing + (self.not_with_drafts if drafts else ()):
            value = getattr(sampling, name)
            if value and value != OFF.get(name):
                refused = f"{self.title} {self.objection} it with drafts, so set --strategy off"
                raise UsageError(
                    f"{name} is set, and {f'{self.title} has none' if name in self.missing else refused} (engine hf has it)."
                )


VLLM = EngineFeatures(
    "vLLM", ("typical_p", "no_repeat_ngram_size", "bad_words_ids", "processors"), ("min_p", "logit_bias"), "refuses"
)
SGLANG = EngineFeatures(  # penalties count the text before a draft tree for all of its nodes there
    "SGLang",
    ("typical_p", "no_repeat_ngram_size", "bad_words_ids", "bad_words", "processors"),
    ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens"),
    "does not keep to",
)
FEATURES = {"vllm": VLLM, "sglang": SGLANG}  # by --engine


@dataclasses.dataclass(frozen=True)
class ForeignSettings(abc.ABC):
    """Holds what an engine is started with. engine_args: further arguments of its own, by name. batch_size: None: its own.

    drafts: of which strategy, price, session tokens and whether they adapt count. draft_tokens: of a row in one step, at most.
    own: the engine's own way of drafting, instead of ours. share: engines that share the device's memory; running: those of
    them that have been started. Others as of `setup.EngineSettings`. takes_signals: signals report that the engine has failed,
    so it starts in the main thread, and a process holds one.
    """

    takes_signals: ClassVar[bool] = False
    model: ModelOptions
    tries: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    drafts: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    draft_tokens: int = 8
    batch_size: int | None = None
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Any] | None = None
    share: int = 1
    running: int = 0

    @abc.abstractmethod
    def start(self, tokenizer: Any | None) -> ForeignEngine:
        """Start the engine. tokenizer: of the model. Raises LookaheadError if it cannot be started."""

    def check_installed(self) -> None:  # noqa: B027 - some engines have nothing to check
        """Raises UsageError where the engine is not installed, if that is known before it is started."""

    def drafting(self) -> dict[str, Any]:
        """Return the object of JSON that `DraftSettings.of` reads."""
        drafts = self.drafts
        return {
            "tries": [os.path.abspath(trie) for trie in self.tries],
            "trie_weights": list(self.weights),
            "price": drafts.price,
            "session_tokens": drafts.session_tokens,
            "adaptive": drafts.adaptive,
        }

    def common_arguments(self, ours: Mapping[str, str], on_cpu: bool) -> dict[str, Any]:
        """Arguments that engines name alike. ours: argument -> option of a job. Raises UsageError for one that is set twice."""
        for name in self.engine_args:
            if name in ours:
                raise UsageError(f"--engine-arg {name}: is set by {ours[name]}.")
        dtype = "float32" if self.model.dtype == "auto" and on_cpu else self.model.dtype
        return {"revision": self.model.revision, "trust_remote_code": self.model.trust_remote_code, "dtype": dtype}


@dataclasses.dataclass(frozen=True)
class ForeignTarget:
    """Answers what a job asks of a model. longest_text: tokens of a text. own: sampling parameters of the generation config."""

    name: str
    vocab_size: int
    longest_text: int
    own: Mapping[str, Any]
    drafts: bool


@dataclasses.dataclass
class Running:
    """Tracks a request that the engine has. updates: steps in which it has emitted tokens, where the engine reports them."""

    generation: Generation
    began: float = 0.0
    updates: int = 0


class ForeignEngine(abc.ABC):
    """Decodes requests by another engine, `batch_size` at once. steps: of it, if known.

    A subclass sets what is declared here in `_start`; tokenizer: of the model, for stop texts. deaths: of engines before.
    """

    features: EngineFeatures
    batch_size: int
    device: str
    dtype: str
    quantization: str | None
    target: ForeignTarget
    steps = 0
    deaths = 0

    def __init__(self, settings: ForeignSettings, tokenizer: Any | None):
        self._settings, self._tokenizer = settings, tokenizer
        self._running: dict[str, Running] = {}
        self._ended: list[Generation] = []  # which wait for their counts
        self._asked = 0.0  # clock reading, in seconds
        self._numbers = itertools.count()
        self._counts = False  # our drafter is asked
        self._start()

    def _check(self, sampling: Sampling) -> None:
        """Raise UsageError for what the engine cannot do."""
        self.features.check(sampling, self.target.drafts)

    @property
    def _penalty(self) -> float:
        """Return the repetition penalty of the model's generation config."""
        return float(self.target.own.get("repetition_penalty") or 1.0)

    @abc.abstractmethod
    def _start(self) -> None:
        """Start the engine. Raises LookaheadError if it cannot be started."""

    @abc.abstractmethod
    def _add(self, name: str, generation: Generation) -> None:
        """Hand over a request. Raises any exception where it is refused."""

    @abc.abstractmethod
    def _advance(self) -> Iterator[tuple[str, Generation]]:
        """Wait for the engine, a fraction of a second at most; yields the requests that have ended, with their names."""

    @abc.abstractmethod
    def _abort(self, names: list[str]) -> None:
        """Give these requests up."""

    @abc.abstractmethod
    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Ask each process that may draft, see `Requests.answer`; nothing where that fails."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """Return the engine's version."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Forget the answers of earlier requests, cached prompts too. No request may be running."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the engine and free what it holds. It cannot be used any more."""

    def restart(self) -> None:
        """Start another engine instead of one that has died. Raises LookaheadError if it cannot be started."""
        self.deaths += 1
        with contextlib.suppress(Exception):  # of what is left of it
            self.close()
        self._start()

    def request(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Generation:
        """Make a request that has not begun.

        Raises LookaheadError for an empty prompt, one that leaves no room, unknown ids, and for what the engine cannot do.
        """
        room = room_of(prompt_ids, max_new_tokens, self.target.vocab_size, self.target.longest_text)
        check_vocabulary(sampling, self.target.vocab_size)
        self._check(sampling)
        if prompt_logprobs is not None:
            raise UsageError(f"{self.features.title} is not asked for prompt_logprobs: leave them or --engine out.")
        if sampling.stop and self._tokenizer is None:
            raise UsageError("stop texts need the model's tokenizer, and there is none: use stop_token_ids.")
        stop_ids, stop = frozenset(sampling.stop_token_ids), sampling.stop
        return Generation(list(prompt_ids), room, stop_ids, sampling, seed, logprobs=logprobs, stop=stop)

    def run(
        self, generations: Iterable[Generation | None], stopped: Callable[[], bool] = lambda: False
    ) -> Generator[Generation]:
        """Decode requests; yields each as it ends. As `DecodingEngine.run`."""
        waiting = iter(generations)
        try:
            while True:
                yield from self._admit(waiting)
                if not self._running:
                    return
                try:
                    yield from self._step()
                except LookaheadError:
                    if stopped():  # Ctrl-C reaches the engine's processes, too
                        return
                    raise
                if stopped():
                    yield from self._counted()
                    return
        finally:
            if self._running:
                with contextlib.suppress(Exception):  # it may have ended itself
                    self._abort(list(self._running))
                self._running.clear()

    def _admit(self, waiting: Iterator[Generation | None]) -> Iterator[Generation]:
        """Hand requests to the engine, as many as it is to hold; yields those that it refuses."""
        while len(self._running) < AHEAD * self.batch_size:
            generation = next(waiting, None)
            if generation is None:
                return
            try:
                name = str(next(self._numbers))
                self._add(name, generation)
            except Exception as error:  # engines raise many kinds
                if type(error).__name__ == DEAD:
                    raise self._died(error) from error
                generation.fail(LookaheadError(f"{self.features.title} refuses it: {first_line(error)}."))
                yield generation
                continue
            self._running[name] = Running(generation, time.perf_counter())

    def _step(self) -> Iterator[Generation]:
        """Wait for the engine; yields the requests that have ended and need not wait for their counts."""
        try:
            for name, generation in self._advance():
                del self._running[name]
                self._ended.append(generation)
        except Exception as error:
            yield from self._ended
            self._ended = []
            raise self._died(error) from error
        due = not self._counts or not self._running or time.perf_counter() - self._asked >= ASK_SECONDS
        if self._ended and due:
            yield from self._counted()

    def _died(self, error: Exception) -> EngineDiedError:
        return EngineDiedError(f"{self.features.title} has died ({type(error).__name__}: {first_line(error)})")

    def _counted(self) -> Iterator[Generation]:
        """Yield those that have ended, with who drafted what they accepted."""
        ended, self._ended = self._ended, []
        if self._counts and ended:
            texts = [(np.array(each.prompt_ids + each.token_ids, np.int32).tobytes(), len(each.prompt_ids)) for each in ended]
            found: list[dict[str, int]] = next((each for each in self._call("accepted", texts) if each is not None), [])
            for generation, counts in zip(ended, found, strict=False):
                generation.accepted_by_source.update(counts)
                generation.accepted_tokens = sum(counts.values()) if counts else generation.accepted_tokens
            self._asked = time.perf_counter()
        yield from ended

    def _end(self, generation: Generation, steps: int, draft_tokens: int | None, reason: str, stop_text: bool) -> None:
        """End a request. draft_tokens: of all its steps, None where unknown. stop_text: a stop text is complete."""
        generation.steps = steps
        generation.accepted_tokens = max(0, len(generation.token_ids) - 1 - steps)
        generation.draft_tokens = generation.accepted_tokens if draft_tokens is None else draft_tokens
        if reason not in ("stop", "length"):
            generation.fail(LookaheadError(f"{self.features.title} ended it: {reason}."))
            return
        generation.finish_reason = reason  # type: ignore[assignment]
        if reason == "stop" and not stop_text:
            generation.stop_ids |= {*generation.token_ids[-1:]}  # those of its model are known to the engine
        if stop_text:
            # Engines leave the tokens that were accepted behind a stop text: count those until it is complete.
            counts, ids, stop = range(1, len(generation.token_ids)), generation.token_ids, generation.stop
            tokens = 1 + bisect.bisect_left(counts, True, key=lambda n: found_in(text_of(self._tokenizer, ids[:n]), stop))
            del generation.token_ids[tokens:], generation.token_logprobs[tokens:]


def common_params(generation: Generation, repetition_penalty: float) -> dict[str, Any]:
    """Return the sampling parameters that vLLM and SGLang name alike. repetition_penalty: of the model."""
    sampling = generation.sampling
    return {
        "temperature": sampling.temperature or 0.0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": repetition_penalty if sampling.repetition_penalty is None else sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
    }


def cause_of(error: BaseException) -> str:
    """Describe in one line the first of errors that caused each other, if it is ours or holds more than its kind."""
    while error.__cause__ is not None and not isinstance(error, LookaheadError):
        error = error.__cause__
    if hasattr(error, "errors") and callable(error.errors):  # of pydantic, whose first line is a title
        with contextlib.suppress(Exception):
            return " ".join(str(error.errors()[0]["msg"]).split())[:300].rstrip(".")
    return first_line(error) or type(error).__name__
