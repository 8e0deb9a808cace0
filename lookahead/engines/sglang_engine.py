"""SGLang as the engine of a job. In: requests, as our own engine takes them. Out: the same, ended, with SGLang's tokens.

SGLang decodes in processes of its own, which draft too; `sglang.Engine` hands requests to them in this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

from lookahead.decode.constraint import Constraint
from lookahead.decode.logprobs import TokenLogprobs
from lookahead.decode.request import Generation
from lookahead.decode.sampling import Sampling
from lookahead.engines.foreign import SGLANG, ForeignEngine, ForeignSettings, ForeignTarget, cause_of, common_params
from lookahead.engines.requests import Link
from lookahead.engines.settings import SETTINGS
from lookahead.engines.sglang import ALGORITHM, unknown_version
from lookahead.errors import LookaheadError, UsageError, first_line

log = logging.getLogger(__name__)

MEMORY = {"mem_fraction_static", "max_total_tokens"}  # arguments of SGLang that set how much an engine takes
MEMORY_FRACTION = 0.85  # of the device, that several engines take together
BATCH_SIZE = 48  # where neither a user nor SGLang sets one
DRAFT_TOKENS = 15  # of a row in one step, where nobody sets it
WAIT_SECONDS = 0.1  # at most, for a request to end
GREEDY_ONLY = ("cpu", "xpu")  # devices on which SGLang verifies greedily, regardless of what a request asks
FAILED: list[int] = []  # signals by which SGLang's processes tell that they fail
OURS = {  # arguments of SGLang that options of a job set
    "model_path": "--model",
    "tokenizer_path": "--tokenizer",
    "revision": "--revision",
    "dtype": "--dtype",
    "trust_remote_code": "--trust-remote-code",
    "max_running_requests": "--batch-size",
    "speculative_algorithm": "--strategy",
    "speculative_num_draft_tokens": "--decoding-length",
    "custom_sigquit_handler": "us, to tell why SGLang ends",
}


@dataclasses.dataclass(frozen=True)
class SglangSettings(ForeignSettings):
    """Holds what SGLang is started with. own: arguments for its own way of drafting."""

    takes_signals = True

    def start(self, tokenizer: Any | None) -> SglangEngine:
        return SglangEngine(self, tokenizer)

    def check_installed(self) -> None:
        unknown_version()

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `ServerArgs`. Raises UsageError for what is set twice."""
        found: dict[str, Any] = {
            **self.common_arguments(OURS, self.engine_args.get("device") == "cpu"),
            "model_path": self.model.name,
            "tokenizer_path": self.model.tokenizer,
            "max_running_requests": self.batch_size,
            "grammar_backend": "llguidance",
            "log_level": "error",
        }
        if self.own is not None:
            found.update({"speculative_num_draft_tokens": self.draft_tokens + 1, **self.own})
        elif self.drafts.strategy != "off":
            found.update({"speculative_algorithm": ALGORITHM, "speculative_num_draft_tokens": self.draft_tokens + 1})
        if self.share > 1 and not MEMORY & self.engine_args.keys():
            each = MEMORY_FRACTION / self.share
            found["mem_fraction_static"] = round(each / (1 - self.running * each), 3)  # of what others have left
        return {**{name: value for name, value in found.items() if value is not None}, **self.engine_args}


class SglangEngine(ForeignEngine):
    """Decodes requests by SGLang, `batch_size` at once. tokenizer: of the model; for stop texts."""

    features = SGLANG
    _settings: SglangSettings

    def _start(self) -> None:
        settings = self._settings
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._link: Link | None = None
        FAILED.clear()  # signals of an engine that has died
        if settings.own is None and settings.drafts.strategy != "off":
            if unknown := unknown_version():
                log.warning("lookahead: %s. SGLang answers without drafts.", unknown)
                settings = dataclasses.replace(settings, drafts=dataclasses.replace(settings.drafts, strategy="off"))
            else:
                os.environ[SETTINGS] = json.dumps(settings.drafting())
                self._link = Link()
        try:
            self._engine = _started(settings.arguments())
        except BaseException:
            if self._link:
                self._link.close()
            raise
        try:
            self._learn(settings)
        except (AttributeError, KeyError, IndexError) as error:  # of a version that is not known
            self.close()
            raise LookaheadError(
                f"SGLang {self.version} is not as the versions that are known ({first_line(error)})."
            ) from error
        self._counts = self._link is not None and any(self._call("count_accepted"))

    def _learn(self, settings: SglangSettings) -> None:
        """Take over what SGLang reports of itself and the model."""
        manager, args = self._engine.tokenizer_manager, self._engine.server_args
        model = manager.model_config
        tokens = int(self._engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])
        self.batch_size = settings.batch_size or int(args.max_running_requests or BATCH_SIZE)
        self.device, self.dtype = str(args.device), str(model.dtype).removeprefix("torch.")
        self.quantization = args.quantization
        longest = min(int(manager.context_len) - int(manager.num_reserved_tokens), tokens - 1)
        config = getattr(model, "hf_generation_config", None)
        own = {"repetition_penalty": getattr(config, "repetition_penalty", None)}
        drafts = settings.own is not None or settings.drafts.strategy != "off"
        self.target = ForeignTarget(settings.model.name, int(model.vocab_size), longest, own, drafts)

    def _check(self, sampling: Sampling) -> None:
        super()._check(sampling)
        if not self.target.drafts:
            return
        if sampling.temperature and self.device in GREEDY_ONLY:
            raise UsageError(
                f"temperature is set, and SGLang verifies drafts greedily on {self.device}, so set --strategy off (engine hf "
                "has it)."
            )
        if self._penalty != 1.0 and sampling.repetition_penalty is None:
            raise UsageError(
                "the model's generation config has a repetition_penalty, which SGLang does not keep to with drafts: set "
                "--strategy off, or --repetition-penalty 1."
            )

    def _add(self, name: str, generation: Generation) -> None:
        asked: dict[str, Any] = {"input_ids": generation.prompt_ids, "rid": name}
        asked["sampling_params"] = params_of(generation, self._penalty)
        if generation.logprobs is not None:
            asked.update(return_logprob=True, top_logprobs_num=generation.logprobs)
        task = self._engine.loop.create_task(self._engine.async_generate(**asked))
        self._tasks[task] = name

    def _abort(self, names: list[str]) -> None:
        self._engine.tokenizer_manager.abort_request(abort_all=True)
        ended, pending = self._engine.loop.run_until_complete(asyncio.wait(self._tasks, timeout=1.0))
        for task in ended:
            task.exception()  # else it would be reported as not looked at
        for task in pending:
            task.cancel()
        self._tasks.clear()

    def _advance(self) -> Iterator[tuple[str, Generation]]:
        """Yield what has ended meanwhile."""
        ready = asyncio.wait(self._tasks, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        done, _ = self._engine.loop.run_until_complete(ready)
        if FAILED:
            raise LookaheadError("one of its processes has ended")
        for task in done:
            name = self._tasks.pop(task)
            generation = self._running[name].generation
            try:
                answered = task.result()
            except Exception as error:  # it raises many kinds
                generation.fail(LookaheadError(f"SGLang refuses it: {first_line(error)}."))
            else:
                self._take(answered, generation)
            yield name, generation

    def _take(self, answered: dict[str, Any], generation: Generation) -> None:
        """End a request. Its seconds are SGLang's, with the time that it waited for a slot."""
        about = answered["meta_info"]
        generation.token_ids = list(map(int, answered["output_ids"]))
        generation.token_logprobs = _logprobs(about, generation.logprobs)
        generation.seconds = float(about.get("e2e_latency") or 0.0)
        steps = int(about.get("spec_verify_ct") or max(0, len(generation.token_ids) - 1))
        drafted = about.get("spec_num_proposed_drafts", 0)
        reason = about["finish_reason"]
        matched = isinstance(reason.get("matched"), str)
        named = reason["type"] if reason["type"] in ("stop", "length") else str(reason.get("message") or reason["type"])
        self._end(generation, steps, int(drafted), named, matched)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._link.call(method, *arguments) if self._link else []

    @property
    def version(self) -> str:
        import sglang

        return str(sglang.__version__)

    def forget(self) -> None:
        self._call("forget")
        self._engine.flush_cache()

    def close(self) -> None:
        self._engine.shutdown()
        if self._link:
            self._link.close()


def _logprobs(about: dict[str, Any], most: int | None) -> list[TokenLogprobs]:
    """Return those of each emitted token; SGLang gives (log-probability, token id, text or None)."""
    if most is None:
        return []
    scored = about["output_token_logprobs"]
    best = about.get("output_top_logprobs") or [None] * len(scored)
    found = []
    for (logprob, token, _), top in zip(scored, best, strict=True):
        found.append(TokenLogprobs(int(token), float(logprob), tuple((int(each[1]), float(each[0])) for each in top or ())))
    return found


def _started(arguments: dict[str, Any]) -> Any:
    """Start `sglang.Engine`. Raises UsageError if it is not installed or knows no such argument, LookaheadError if it fails."""
    os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")  # before temperature, as our own engine
    try:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree
    except ImportError as error:
        raise UsageError(f"--engine sglang: needs pip install 'lookahead[sglang]' ({first_line(error)}).") from None
    known = set(ServerArgs.__struct_fields__)
    for name in arguments:
        if name not in known:
            raise UsageError(f"--engine-arg {name}: SGLang has no such argument, see python -m sglang.launch_server --help.")
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        engine = Engine(**arguments, custom_sigquit_handler=_ended)
        engine.loop.run_until_complete(_receiving(engine.tokenizer_manager))
        watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:  # newer versions end this process, too, some seconds after one of theirs has ended
            watchdog._hard_exit_fn = lambda code: None
        for each in (signal.SIGTERM, signal.SIGQUIT):  # SGLang's end this process, and rows that are not written yet
            engine.loop.remove_signal_handler(each)
        signal.signal(signal.SIGQUIT, lambda number, frame: FAILED.append(number))  # a loop would drop an exception
        return engine
    except BaseException as error:
        with contextlib.suppress(Exception):
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # of more than one process
            kill_process_tree(os.getpid(), include_parent=False)
        if isinstance(error, LookaheadError) or not isinstance(error, Exception):
            raise
        raise LookaheadError(f"SGLang does not start: {cause_of(error)}.") from error
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


async def _receiving(manager: Any) -> None:
    """Let SGLang set its signal handlers, in the running loop: they are those of its servers."""
    manager.auto_create_handle_loop()


def _ended(number: int, frame: Any) -> None:
    """Handle the SIGQUIT that SGLang's processes send when they fail; the reason is on stderr."""
    raise LookaheadError("SGLang does not start: one of its processes has failed, see above.")


def params_of(generation: Generation, repetition_penalty: float) -> dict[str, Any]:
    """Return fields of SGLang's SamplingParams, see `common_params`."""
    sampling = generation.sampling
    return {
        **common_params(generation, repetition_penalty),
        "top_k": sampling.top_k or -1,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        "sampling_seed": generation.seed if sampling.temperature else None,  # with enable_deterministic_inference
        "min_new_tokens": min(sampling.min_new_tokens or 0, generation.room),
        "max_new_tokens": generation.room,
        "no_stop_trim": True,
        **structured(sampling.constraint),
    }


def structured(constraint: Constraint | None) -> dict[str, str]:
    """Return SGLang's field for a constraint. Raises UsageError for a grammar in Lark's form, which it does not read."""
    if constraint is None:
        return {}
    if constraint.kind == "choice":
        return {"regex": f"({'|'.join(map(re.escape, json.loads(constraint.text)))})"}
    if constraint.kind == "grammar":
        if "::=" not in constraint.text:
            raise UsageError("grammar: SGLang reads EBNF (root ::= ...), not Lark's form (engine hf reads both)")
        return {"ebnf": constraint.text}
    return {constraint.kind: constraint.text}
