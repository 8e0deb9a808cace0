"""The engine from Python. In: prompts as text, chat messages or token ids. Out: results, or one answer's text as it comes.

A thin face over `decode.engine.DecodingEngine`, which jobs use; it knows nothing of files of prompts. Any failure is a
`LookaheadError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lookahead.arguments import BYTES, numbers_of, paths_of
from lookahead.corpus_build import open_trie
from lookahead.decode.engine import FinishReason, Generation
from lookahead.decode.limits import check_logprobs, is_count, shown
from lookahead.decode.logprobs import TokenLogprobs
from lookahead.decode.sampling import Sampling, seed_of
from lookahead.decode.text import TextStream, length_before
from lookahead.draft.counts import DraftCounts
from lookahead.draft.options import DraftOptions
from lookahead.draft.sources import DraftSource
from lookahead.errors import LookaheadError, UsageError
from lookahead.forward.target import TargetModel
from lookahead.job.rows import local_time, parse_row, prompts_of
from lookahead.job.setup import assemble
from lookahead.models.load import load_model
from lookahead.models.options import ModelOptions
from lookahead.models.probe import probed
from lookahead.trie.file import Trie

log = logging.getLogger(__name__)

Message = dict[str, str]  # {"role": ..., "content": ...}
Prompt = str | Sequence[Message] | Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationParams(Sampling):
    """Parameters of an answer: everything that `Sampling` holds, and

    max_new_tokens: at most. seed: with the prompt's index in the list it makes the random stream of its answer.
    logprobs: with each token come its log-probability and those of that many of the most probable; None: without.
    prompt_logprobs: the same of the prompt's tokens; max_new_tokens may be 0 then, so that the prompt is only scored.
    prompt_logprobs_start: index of the first of these tokens; of those before it, what other prompts begin with is not computed
    again.
    """

    max_new_tokens: int = 256
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.max_new_tokens) is not int or self.max_new_tokens < (self.prompt_logprobs is None):
            raise UsageError(
                f"max_new_tokens is {self.max_new_tokens}: it must be a whole number above 0 (or 0 with prompt_logprobs)."
            )
        for name in ("seed", "prompt_logprobs_start"):
            if not is_count(getattr(self, name)):
                raise UsageError(f"{name} is {shown(getattr(self, name))}: it must be a whole number.")
        check_logprobs(self.logprobs)
        check_logprobs(self.prompt_logprobs, "prompt_logprobs")


@dataclasses.dataclass
class GenerationResult(DraftCounts):
    """An answer, or why there is none.

    text: without special tokens and the token that ended the answer; a stop text that ended it is part of it, but for
    params.include_stop. None if there is no tokenizer.
    token_ids: all, the token that ended the answer included.
    finish_reason: "stop", "length" (max_new_tokens, or the model's positions), or "error"; then `error` tells what happened,
    and text and token_ids hold what was emitted until then.
    edl: tokens per decode step, None without one. logprobs: one for each token, if they were asked for (decode/logprobs.py);
    prompt_logprobs: one for each token of the prompt, None for the first and those before prompt_logprobs_start. complete:
    whether a constrained answer is all that the constraint asks for; None: unconstrained. steps, draft_tokens,
    accepted_tokens, accepted_by_source: see `DraftCounts`.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    edl: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    complete: bool | None = None
    error: LookaheadError | None = None


# what may be asked of a model that `LookaheadEngine` loads
OF_A_NAMED_MODEL = "dtype", "device", "trust_remote_code", "revision", "adapter", "gguf_file", "quantize", "kv_dtype"


class LookaheadEngine:
    """Answers prompts with a model, drafting from tries, the prompts and what it has emitted before, in all calls so far.

    It does one thing at a time: while a stream is open, or another thread generates, a call raises LookaheadError.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        tries: str | Path | Trie | Sequence[str | Path | Trie] = (),
        *,
        weights: float | Sequence[float] | None = None,
        batch_size: int | None = None,
        drafts: DraftOptions | None = None,
        prefill_chunk: int = 512,
        sources: DraftSource | Sequence[DraftSource] = (),
        **options: Any,
    ):
        """model: a stock Hugging Face causal LM, which is put into eval mode; a folder or hub name; or a `TargetModel`.

        tokenizer: a Hugging Face tokenizer. None: the model's own if the model is given by name, else none: prompts are then
        token ids, and answers have no text. tries: one or several to draft from, of this tokenizer, or corpus files; weights:
        how much an occurrence in each counts (default 1). batch_size: prompts that are answered at once (default: 8 on a CPU,
        32 on a GPU). drafts: default: DraftOptions().
        prefill_chunk: tokens of prompts that a step prefills at most. sources: draft sources of your own, see `DraftSource`.
        options: dtype, device, trust_remote_code, revision, adapter, quantize, kv_dtype and gguf_file of a model that is given
        by name, as of `ModelOptions`; FOLDER/FILE.gguf as the model is the same as a gguf_file.
        Raises LookaheadError if model, tokenizer or tries cannot be used, or not together.
        """
        for name, size in (("batch_size", batch_size), ("prefill_chunk", prefill_chunk)):
            if size is not None and (type(size) is not int or size < 1):
                raise UsageError(f"{name} is {size!r}: it must be a whole number above 0.")
        named = paths_of(tries, "tries", Trie)
        weights = None if weights is None else numbers_of(weights, "weights")
        if weights is not None and (len(weights) != len(named) or not all(0 < weight < math.inf for weight in weights)):
            raise UsageError(f"weights {list(weights)}: give a number above 0 for each of {len(named)} tries.")
        by_name = isinstance(model, str | Path)
        if unknown := options.keys() - {*OF_A_NAMED_MODEL}:
            raise TypeError(f"LookaheadEngine has no argument {min(unknown)!r}.")
        wished = ModelOptions(str(model) if by_name else None, **options)

        def own() -> Any | None:
            return wished.load_tokenizer() if by_name and tokenizer is None else tokenizer

        def of_corpora() -> tuple[Any | None, str]:
            return own(), wished.name if by_name and tokenizer is None else getattr(tokenizer, "name_or_path", "")

        opened = [trie if isinstance(trie, Trie) else open_trie(trie, of_corpora) for trie in named]
        if by_name:
            target = load_model(wished)
            tokenizer = own()
        elif wished != ModelOptions(device=wished.device and "auto"):
            *names, last = OF_A_NAMED_MODEL
            raise UsageError(f"{', '.join(names)} and {last} are for a model given by name: this one has its own.")
        elif isinstance(model, TargetModel):
            target = model
        elif any(getattr(each, "alora_invocation_tokens", None) for each in dict(getattr(model, "peft_config", {})).values()):
            raise UsageError("model has an aLoRA adapter, which depends on where its prompt invokes it: give one without.")
        elif isinstance(model, nn.Module) and hasattr(model, "generate"):
            target = probed(model.eval(), getattr(model, "name_or_path", "") or type(model).__name__)
        else:
            raise UsageError(f"model is a {type(model).__name__}: give a Hugging Face causal LM, its folder or its hub name.")
        drafts = drafts or DraftOptions()
        loaded = assemble(target, tokenizer, opened, weights, drafts, batch_size, prefill_chunk, sources=sources)
        for notice in loaded.notices():
            log.warning("%s", notice)
        self.tokenizer = tokenizer
        self._engine = loaded.engine
        self._in_use = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[GenerationResult]:
        """Answer prompts, `batch_size` at a time. Returns a list in their order, for a single prompt a list of one.

        prompts: one, or a sequence: each is text, chat messages [{"role", "content"}, ...] or token ids (a list, or a row of an
        array). params: for all of them, or a sequence with one for each. A prompt that cannot be answered has a result with
        `finish_reason` "error" and does not disturb the others. The same call gives the same tokens at any batch size.
        progress: is called with (finished prompts, all prompts) as each is finished.
        Raises UsageError if there is not one `params` for each prompt, LookaheadError if the engine is in use.
        """
        listed, several = _listed(prompts, params)
        results: dict[int, GenerationResult] = {}
        for index, result in self._finished(listed, several):
            results[index] = result
            if progress:
                progress(len(results), len(listed))
        return [results[index] for index in range(len(listed))]

    def generate_iter(
        self, prompts: Prompt | Sequence[Prompt], params: GenerationParams | Sequence[GenerationParams] | None = None
    ) -> Generator[tuple[int, GenerationResult]]:
        """Generate as `generate` does, but yield (index of the prompt, result) as each is finished. close() gives up those that
        are not.

        Raises UsageError at once, LookaheadError at the first result if the engine is in use.
        """
        return self._finished(*_listed(prompts, params))

    def _finished(
        self, prompts: Sequence[Prompt], params: Sequence[GenerationParams]
    ) -> Generator[tuple[int, GenerationResult]]:
        failed: list[tuple[int, GenerationResult]] = []
        indices: dict[int, int] = {}  # by id of each generation

        now = local_time()  # one for all, where a chat template writes it

        def generations() -> Iterator[Generation]:
            for index, (prompt, wishes) in enumerate(zip(prompts, params, strict=True)):
                try:
                    generation = self._request(prompt, wishes, index, now)
                except Exception as error:
                    text = None if self.tokenizer is None else ""
                    failed.append((index, GenerationResult(text, [], "error", 0, error=_of_family(error))))
                    continue
                indices[id(generation)] = index
                yield generation

        with self._alone(), contextlib.closing(self._engine.run(generations())) as running:
            for generation in running:
                yield indices.pop(id(generation)), self._result(generation)
                yield from failed
                failed.clear()
        yield from failed

    def stream(self, prompt: Prompt, params: GenerationParams | None = None) -> Generator[str, None, GenerationResult]:
        """Answer one prompt; yields its text as it is accepted. All pieces together are the text that `generate` gives.

        A character comes when all its bytes are there, text that a later token may change (see decode/text.py) when it is
        certain. The first tokens come with the prefill, the rest step by step; all at once where the model's own `generate`
        decodes (models that take no drafts). What the generator returns is the result. To stop early, close() it.
        Raises LookaheadError: at once if the prompt cannot be used, at the first piece if the engine is in use, and later if
        decoding fails.
        """
        if self.tokenizer is None:
            raise LookaheadError("there is no tokenizer, so no text to stream: give LookaheadEngine one.")
        return self._pieces(self._request(prompt, _checked(params), 0, local_time()))

    def _pieces(self, generation: Generation) -> Generator[str, None, GenerationResult]:
        text, held = TextStream(self.tokenizer), ""
        stops = () if generation.sampling.include_stop else generation.stop
        with self._alone(), contextlib.closing(self._engine.stream(generation)) as steps:
            try:
                for _ in steps:
                    held += text.push(generation.text_ids[len(text.token_ids) :])
                    if length := length_before(held, stops, continues=True):
                        yield held[:length]
                        held = held[length:]
            except LookaheadError:
                raise
            except Exception as error:
                raise _of_family(error) from error
            held += text.finish()
            if length := length_before(held, stops):
                yield held[:length]
        return self._result(generation)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nothing else runs meanwhile. Raises LookaheadError if something does."""
        if not self._in_use.acquire(blocking=False):
            raise LookaheadError(
                "this engine is in use: read its open stream to the end or close() it, or wait until generate has returned."
            )
        try:
            yield
        finally:
            self._in_use.release()

    def _request(self, prompt: Prompt, params: GenerationParams, index: int, now: datetime.datetime) -> Generation:
        """A request that has not begun. Its seed is that of a row of a job, whose id is its line.

        Raises LookaheadError for a prompt that cannot be used.
        """
        number = index + 1
        request = parse_row(_as_row(prompt), number)
        if request.problem:
            raise LookaheadError(f"prompt {number}: {request.problem}.")
        if self.tokenizer is None and request.prompt_ids is None:
            raise LookaheadError(f"prompt {number}: there is no tokenizer: give token ids, or LookaheadEngine a tokenizer.")
        if request.messages and not getattr(self.tokenizer, "chat_template", None):
            raise LookaheadError(f"prompt {number}: the tokenizer has no chat template: give text.")
        try:
            (prompt_ids,) = prompts_of(request, self.tokenizer, longest=self._engine.target.longest_text, now=now)
            seed = seed_of(params.seed, number)
            names = ("logprobs", "prompt_logprobs", "prompt_logprobs_start")
            scored = {name: getattr(params, name) for name in names}
            return self._engine.request(prompt_ids, params.max_new_tokens, params, seed, **scored)
        except LookaheadError as error:
            raise LookaheadError(f"prompt {number}: {error}") from error

    def _result(self, generation: Generation) -> GenerationResult:
        text = None if self.tokenizer is None else generation.text(self.tokenizer)
        before = [None] * min(generation.prompt_logprobs_start, generation.prompt_tokens)
        return GenerationResult(
            text,
            generation.token_ids,
            generation.finish_reason,
            generation.prompt_tokens,
            generation.edl,
            None if generation.logprobs is None else generation.token_logprobs,
            None if generation.prompt_logprobs is None else [*before, *generation.prompt_token_logprobs],
            generation.complete,
            _of_family(generation.error) if generation.error else None,
            **{field.name: getattr(generation, field.name) for field in dataclasses.fields(DraftCounts)},
        )


def _checked(params: Any) -> GenerationParams:
    """None: greedy, 256 tokens. Raises UsageError for what are none."""
    if params is not None and not isinstance(params, GenerationParams):
        raise UsageError(f"params is a {type(params).__name__}: give GenerationParams.")
    return params or GenerationParams()


def _listed(
    prompts: Prompt | Sequence[Prompt], params: GenerationParams | Sequence[GenerationParams] | None
) -> tuple[list[Any], list[GenerationParams]]:
    """The prompts, and the params of each. Raises UsageError if there are not as many."""
    listed: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
    several = [*map(_checked, params)] if isinstance(params, Sequence) else [_checked(params)] * len(listed)
    if len(several) != len(listed):
        raise UsageError(f"{len(several)} params for {len(listed)} prompts: give one for all, or one for each.")
    return listed, several


def _is_one(prompts: Any) -> bool:
    """A prompt, not several."""
    if isinstance(prompts, str):
        return True
    if getattr(prompts, "ndim", 0) and not isinstance(prompts, BYTES):  # an array
        return bool(prompts.ndim == 1)
    if not isinstance(prompts, Sequence) or isinstance(prompts, BYTES):
        raise UsageError(f"prompts is a {type(prompts).__name__}: give text, chat messages or token ids, or a list of such.")
    return len(prompts) > 0 and not isinstance(prompts[0], Sequence) and not getattr(prompts[0], "ndim", 0)


def _as_row(prompt: Any) -> dict[str, Any]:
    """A prompt as it would stand in a row of a job."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, BYTES) or not (isinstance(prompt, Sequence) or bool(getattr(prompt, "ndim", 0))):
        raise LookaheadError(f"a prompt is a {type(prompt).__name__}: give text, chat messages or token ids.")
    parts = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if any(isinstance(part, dict) for part in parts):
        return {"messages": parts}
    return {"prompt_ids": [part.item() if hasattr(part, "item") else part for part in parts]}


def _of_family(error: Exception) -> LookaheadError:
    if isinstance(error, LookaheadError):
        return error
    raised = LookaheadError(f"{type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised
