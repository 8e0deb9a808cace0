"""What the options of a job stand for. In: a `JobSpec`. Out: a `JobPlan`, or an error before a model is looked at: of options
that do not go together, then of values, then of small files that are read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lookahead.decode.sampling_options import SamplingFields
from lookahead.errors import ConstraintError, UsageError
from lookahead.job.fields import RowFields, keep_of, template_of
from lookahead.job.inputs import Shard
from lookahead.job.progress import labels_of
from lookahead.job.spec import HISTORY_TOKENS, OPTIONS, SESSION_TOKENS, Constraints, JobSpec, SamplingOptions
from lookahead.options import typed

if TYPE_CHECKING:
    from lookahead.decode.constraint import Constraint
    from lookahead.decode.sampling import Sampling
    from lookahead.draft.options import DraftOptions
    from lookahead.engines.foreign import ForeignSettings
    from lookahead.job.runner import JobOptions
    from lookahead.job.setup import EngineSettings
    from lookahead.models.options import ModelOptions
    from lookahead.trie.file import Trie


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """Values of options, read. batch_size: None: auto. tries, weights: to draft from, opened."""

    spec: JobSpec
    model: str
    drafts: DraftOptions
    batch_size: int | None
    constraint: Constraint | None
    fields: RowFields
    shard: Shard
    labels: dict[str, str]
    tries: list[Trie]
    weights: tuple[float, ...]

    @property
    def trie_files(self) -> tuple[str, ...]:
        return tuple(str(trie.path) for trie in self.tries)

    def engine_settings(self) -> EngineSettings:
        """Importing what this and `row_options` need takes seconds: they wait until the files are known to be right."""
        from lookahead.job.setup import EngineSettings

        chunk = self.spec.scale_out.prefill_chunk
        return EngineSettings(self.spec.model, self.trie_files, self.weights, self.drafts, self.batch_size, chunk)

    def foreign_settings(self) -> ForeignSettings:
        from lookahead.engines import sglang_engine, vllm_engine

        spec, drafts = self.spec, self.drafts
        sglang = spec.model.engine == "sglang"
        of: type[ForeignSettings] = sglang_engine.SglangSettings if sglang else vllm_engine.VllmSettings
        most = sglang_engine.DRAFT_TOKENS if sglang else vllm_engine.DRAFT_TOKENS
        if spec.drafting.decoding_length != "auto":
            most = max(1, drafts.decoding_length - 1)
        most, engine_arguments = min(drafts.branch_length, most), engine_args(spec.model.engine_arg or ())
        return of(spec.model, self.trie_files, self.weights, drafts, most, self.batch_size, engine_arguments)

    def row_options(self) -> JobOptions:
        """Return what holds for rows that ask for nothing else. Raises UsageError for sampling that makes no sense."""
        from lookahead.job.runner import JobOptions

        io, sampling = self.spec.io, self.spec.sampling
        return JobOptions(
            sampling.max_new_tokens,
            sampling_of(sampling, self.constraint),
            sampling.samples,
            sampling.seed,
            in_order=io.order == "input",
            **{name: getattr(io, name) for name in ("chat", "system", "token_ids", "echo", "logprobs")},
        )


def plan_of(spec: JobSpec) -> JobPlan:
    """Raises UsageError for options that are missing, wrong or do not go together, LookaheadError for files that are."""
    model = _check(spec)
    spec = _with_history(spec)
    io, drafting = spec.io, spec.drafting
    learned = SESSION_TOKENS if drafting.session_tokens is None else drafting.session_tokens
    lengths = drafting.decoding_length, drafting.branch_length
    kept = learned if drafting.learn else 0
    drafts = draft_options(drafting.strategy, *lengths, kept, drafting.price, drafting.recycle)
    if spec.reporting.metrics_label and not spec.reporting.metrics:
        raise UsageError("--metrics-label labels what --metrics FILE keeps: name that file.")
    labels = labels_of(spec.reporting.metrics_label or [], os.path.abspath(io.out) if io.out else "stdout", model)
    shard = Shard.parse(spec.scale_out.shard)
    size = None if spec.scale_out.batch_size in (None, "auto") else str(spec.scale_out.batch_size)
    if size and (not size.isdecimal() or int(size) < 1):
        raise UsageError(f"--batch-size {size}: give a number of rows, or auto.")
    batch_size = 1 if spec.reporting.explain else int(size) if size else None  # what is explained comes row by row
    constraint = constraint_of(spec.constraints)
    fields = RowFields(io.prompt_field, template_of(io.template), keep_of(io.keep_fields), io.echo, spec.model.adapter_names)
    tries = open_tries(drafting.trie, spec.model)
    weights = tuple(trie_weights(drafting.trie_weight, [tries])[0])
    return JobPlan(spec, model, drafts, batch_size, constraint, fields, shard, labels, tries, weights)


def _check(spec: JobSpec) -> str:
    """The model's name. Raises UsageError for what is missing, and for options that do not go together."""
    io, drafting, model, scale_out, reporting = spec.io, spec.drafting, spec.model, spec.scale_out, spec.reporting
    several = bool(scale_out.ray or (scale_out.workers or 1) > 1)
    spread, batched = model.tp_plan or model.device_map, scale_out.batch_size is not None
    alone, one_model = "leave --workers and --ray out", "give --adapter without NAME="
    _refuse(
        (model.model is None, "name a model: --model org/name or a folder. To try without one: lookahead demo"),
        (not io.input, "name a file of prompts: --input prompts.jsonl (or - for stdin)."),
        (io.system and not io.chat, "--system needs --chat."),
        (reporting.explain and drafting.strategy == "off", "--explain: --strategy off drafts nothing."),
        (reporting.explain and several, f"--explain shows the steps of one engine: {alone}."),
        (reporting.explain and batched, "--explain shows one row after the other: leave --batch-size out."),
        (model.tp_plan and several, f"--tp-plan takes all processes for one model: {alone}."),
        (spread and model.device is not None, "--device-map and --tp-plan choose the devices: leave --device out."),
        (model.adapter and model.tp_plan, "--adapter is merged into whole weights: leave --tp-plan out."),
        (model.adapter_names and several, f"--adapter NAME=... is for one engine: {alone}, or {one_model}."),
        (model.adapter_names and reporting.explain, f"--explain shows the steps of one model: {one_model}."),
    )
    if spec.sampling.sampling not in ("greedy", "model"):
        raise UsageError(f"--sampling {spec.sampling.sampling}: choose greedy or model.")
    token_id_lists(spec.sampling.bad_words_ids)
    biases(spec.sampling.logit_bias)
    check_engine(spec)
    unnamed = drafting.source_name is not None and drafting.save_trie is None and drafting.history is None
    limits_nothing = drafting.history_tokens != HISTORY_TOKENS and not drafting.history
    forgets = not drafting.learn and drafting.session_tokens is not None
    _refuse(
        (io.order not in ("input", "completion"), f"--order {io.order}: choose input or completion."),
        (unnamed, "--source-name names the outputs in --save-trie FILE: give that file."),
        (drafting.history and drafting.save_trie, "--history saves the outputs: leave --save-trie out."),
        (limits_nothing, "--history-tokens limits --history FILE: name that file."),
        (forgets, "--no-learn remembers no answers: leave --session-tokens out."),
    )
    return model.name


def _with_history(spec: JobSpec) -> JobSpec:
    """--history FILE is --save-trie FILE, by default with the time as --source-name, and --trie FILE where there is one."""
    drafting = spec.drafting
    if not drafting.history:
        return spec
    if exists := Path(drafting.history).exists():
        from lookahead.trie.file import Trie

        Trie(drafting.history)  # raises for any other file: --trie would take a corpus for one
    known = [drafting.history] if exists and drafting.history not in (drafting.trie or ()) else []
    name = drafting.source_name or time.strftime("%Y-%m-%d %H:%M:%S")
    tries = [*(drafting.trie or ()), *known]
    drafting = dataclasses.replace(drafting, trie=tries, save_trie=drafting.history, source_name=name)
    return dataclasses.replace(spec, drafting=drafting)


def _refuse(*problems: tuple[Any, str]) -> None:
    """Raise UsageError for the first that there is."""
    for found, problem in problems:
        if found:
            raise UsageError(problem)


AS_GIVEN = (*(field.name for field in dataclasses.fields(SamplingFields)), "sampling", "min_new_tokens", "include_stop")


def sampling_of(options: SamplingOptions, constraint: Constraint | None) -> Sampling:
    """Return what holds for rows that ask for nothing else. Raises UsageError for values that make no sense."""
    from lookahead.decode.sampling import Sampling

    fields: dict[str, Any] = {name: getattr(options, name) for name in AS_GIVEN}
    fields.update({name: tuple(getattr(options, name) or ()) for name in ("stop", "stop_token_ids", "bad_words")})
    fields["bad_words_ids"] = token_id_lists(options.bad_words_ids)
    fields["logit_bias"] = biases(options.logit_bias)
    return Sampling(**fields, constraint=constraint)


def token_id_lists(items: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """["17,4", "[5, 6]"] -> ((17, 4), (5, 6)). Raises UsageError for anything else."""
    for item in items or ():
        if not re.fullmatch(r"\[?\s*\d{1,18}(\s*,\s*\d{1,18})*\s*\]?", item):
            raise UsageError(f"--bad-words-ids {item:.80}: give token ids with commas between them, such as 17,4.")
    return tuple(tuple(map(int, re.findall(r"\d+", item))) for item in items or ())


def biases(items: Sequence[str] | None) -> dict[int, float]:
    """["17=-5"] -> {17: -5.0}. Raises UsageError for anything but an id and number, and for an id given twice."""
    found: dict[int, float] = {}
    for item in items or ():
        token, bias = _named_number(item)
        if not re.fullmatch(r"\s*\d{1,18}\s*", token) or math.isnan(bias):
            raise UsageError(f"--logit-bias {item:.80}: give ID=B with a token id and a number, such as 17=-5.")
        if int(token) in found:
            raise UsageError(f"--logit-bias {item}: token {token} is given twice.")
        found[int(token)] = bias
    return found


def _named_number(item: str) -> tuple[str, float]:
    """NAME=NUMBER; nan for what is none."""
    name, _, value = item.rpartition("=")
    try:
        return name, float(value)
    except ValueError:
        return name, math.nan


def constraint_of(options: Constraints) -> Constraint | None:
    """What answers must be; None: anything. Raises UsageError for options, ConstraintError for files that are wrong."""
    from lookahead.decode.constraint import Constraint

    values = {name: getattr(options, name) for name in ("json_schema", "regex", "choice", "grammar")}
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(map(typed, given))}: give one of them.")
    if not given:
        return None
    ((kind, value),) = given.items()
    where = typed(kind)
    in_words = kind in ("regex", "choice")
    if not in_words:
        where = str(value)
        try:
            value = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConstraintError(f"{where}: cannot be read ({why}).") from None
    constraint = Constraint.of(kind, list(value) if isinstance(value, tuple) else value)
    try:
        constraint.check()
    except ConstraintError as error:
        raise (UsageError if in_words else ConstraintError)(f"{where}: {error}") from None
    return constraint


def draft_options(
    strategy: str,
    decoding_length: str | int,
    branch_length: int,
    session_tokens: int = SESSION_TOKENS,
    price: float = 0.0,
    recycle: bool = True,
) -> DraftOptions:
    """Strategy auto is hierarchical, sized by what pays up to the length given. Raises UsageError for unknown values."""
    from lookahead.draft.options import DraftOptions

    fixed = decoding_length != "auto"
    if fixed and not str(decoding_length).isdecimal():
        raise UsageError(f"--decoding-length {decoding_length}: give a number of tokens from 1 to 1024, or auto.")
    kind: Any = "hierarchical" if strategy == "auto" else strategy
    adaptive = strategy != "off" and (strategy == "auto" or not fixed)
    length = int(decoding_length) if fixed else 64
    return DraftOptions(kind, length, branch_length, price, session_tokens, adaptive, recycle=recycle)


def open_tries(paths: Sequence[str] | None, model: ModelOptions | None = None) -> list[Trie]:
    """Open tries; their tokenizer is checked once the model is known. model: by whose tokenizer corpus files are made tries."""
    from lookahead.corpus_build import open_trie

    def load() -> tuple[Any | None, str]:
        return (model.load_tokenizer(), model.tokenizer or model.name) if model else (None, "")

    return [open_trie(path, load) for path in paths or []]


def weights_by_name(items: Sequence[str] | None, option: str) -> dict[str, float]:
    """["faq=2.0"] -> {"faq": 2.0}. Raises UsageError for a weight that is not above 0, and for a name that is given twice."""
    weights: dict[str, float] = {}
    for item in items or []:
        name, weight = _named_number(item)
        if not name or not 0 < weight < math.inf:
            raise UsageError(f"{option} {item}: give NAME=W with a number W above 0, such as faq=2.0.")
        if name in weights:
            raise UsageError(f"{option} {item}: {name} is given twice.")
        weights[name] = weight
    return weights


def trie_weights(items: Sequence[str] | None, groups: Sequence[Sequence[Trie]]) -> list[list[float]]:
    """The weight of each trie in groups of tries that draft together. Raises UsageError for a NAME that no trie has."""
    from lookahead.trie.file import names_of

    weights = weights_by_name(items, "--trie-weight")
    names = [names_of([trie.path for trie in tries]) for tries in groups]
    known = dict.fromkeys(name for some in names for name in some)
    for name in weights:
        if name not in known:
            raise UsageError(f'--trie-weight: no --trie is named "{name}" (known: {", ".join(known) or "none"}).')
    return [[weights.get(name, 1.0) for name in some] for some in names]


ENGINES = ("hf", "vllm", "sglang")
NO_OPTION = {  # options that no other engine has: what does the same there
    "adapter": "merge it into the model",
    **dict.fromkeys(("engine_mode", "exact", "threads", "ray", "explain"), ""),
    "attn": "--engine-arg attention_backend=NAME",
    "quantize": "--engine-arg quantization=NAME",
    "kv_dtype": "--engine-arg kv_cache_dtype=NAME",
}
INSTEAD = {  # likewise, by engine
    "vllm": {
        **NO_OPTION,
        "device": "vLLM takes the devices of its platform",
        "workers": "--engine-arg data_parallel_size=N",
        "device_map": "--engine-arg pipeline_parallel_size=N",
        "tp_plan": "--engine-arg tensor_parallel_size=N",
        "prefill_chunk": "--engine-arg max_num_batched_tokens=N",
        "bad_words_ids": "--bad-words",
    },
    "sglang": {
        **NO_OPTION,
        "device": "--engine-arg device=NAME",
        "workers": "",
        "device_map": "--engine-arg pp_size=N",
        "tp_plan": "--engine-arg tp_size=N",
        "prefill_chunk": "--engine-arg chunked_prefill_size=N",
    },
}
STRATEGIES = {  # those it has: why not the others
    "vllm": (("auto", "single", "off"), "vLLM verifies single branches"),
    "sglang": (("auto", "hierarchical", "off"), "SGLang is given one tree of all branches"),
}


def check_other_engine(model: ModelOptions, given: Collection[str]) -> None:
    """Raises UsageError for an unknown engine, for arguments of none, and for options that it does not have. given: names."""
    engine = model.engine
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: choose {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    if engine == "hf" and model.engine_arg:
        raise UsageError("--engine-arg is of vLLM and SGLang: name it with --engine vllm or sglang.")
    if engine == "hf":
        return
    from lookahead.engines.foreign import FEATURES  # loads torch

    for name, instead in {**dict.fromkeys(FEATURES[engine].missing, ""), **INSTEAD[engine]}.items():
        if name in given:
            raise UsageError(f"--engine {engine} has no {typed(name)}{f': {instead}' if instead else ''}.")


def check_engine(spec: JobSpec) -> None:
    """Raises UsageError for an unknown engine, and for options that it does not have."""
    model, drafting, sampling = spec.model, spec.drafting, spec.sampling
    engine = model.engine
    given = {name: value for name, value in spec.options().items() if value != OPTIONS[name].field.default}
    check_other_engine(model, given.keys() - {"workers"} if given.get("workers") == 1 else given.keys())
    if engine == "hf":
        return
    from lookahead.engines.foreign import FEATURES, OFF

    able = FEATURES[engine]
    for name in able.not_with_drafts:
        value = getattr(sampling, name)
        if value and value != OFF.get(name) and drafting.strategy != "off":
            raise UsageError(
                f"--engine {engine}: {able.title} {able.objection} {typed(name)} with drafts. Leave it out, or set "
                "--strategy off."
            )
    if sampling.sampling == "model":
        raise UsageError(f"--engine {engine} has no --sampling model: give --temperature and its like.")
    known, why = STRATEGIES[engine]
    if drafting.strategy not in known:
        raise UsageError(f"--strategy {drafting.strategy}: {why}. Choose {', '.join(known[:-1])} or {known[-1]}.")
    engine_args(model.engine_arg or ())


def engine_args(items: Sequence[str]) -> dict[str, Any]:
    """["max_model_len=512"] -> {"max_model_len": 512}. Raises UsageError for no name or value, and for a name given twice."""
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not name.isidentifier() or not equals or not text.strip():
            raise UsageError(f"--engine-arg {item}: give NAME=VALUE, such as max_model_len=4096.")
        if name in found:
            raise UsageError(f"--engine-arg {item}: {name} is given twice.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = {"True": True, "False": False, "None": None}.get(text, text)
    return found
