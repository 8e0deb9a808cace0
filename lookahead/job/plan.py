"""What the options of a job stand for. In: a `JobSpec`. Out: a `JobPlan`, or an error before a model is looked at.

Checks come in the order of their cost: options that do not go together, then values, then small files that are read.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from lookahead.errors import UsageError
from lookahead.job.choose_engine import check_engine, engine_args
from lookahead.job.drafting import batch_size_of, draft_options, open_tries, trie_weights
from lookahead.job.fields import RowFields, keep_of, template_of
from lookahead.job.inputs import Shard
from lookahead.job.progress import labels_of
from lookahead.job.sampling import check_sampling_options, constraint_of, sampling_of
from lookahead.job.spec import SESSION_TOKENS, JobSpec

if TYPE_CHECKING:
    from lookahead.decode.constraint import Constraint
    from lookahead.draft.options import DraftOptions
    from lookahead.engines.foreign import ForeignSettings
    from lookahead.job.runner import JobOptions
    from lookahead.job.setup import EngineSettings
    from lookahead.trie.file import Trie


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """model: its name. drafts, batch_size (None: auto), constraint, fields, shard, labels: of the options of these names.

    tries, weights: those to draft from, opened.
    """

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
        """Of a job that vLLM or SGLang answers."""
        from lookahead.engines import sglang_engine, vllm_engine

        spec, drafts = self.spec, self.drafts
        of: type[ForeignSettings] = vllm_engine.VllmSettings
        most = vllm_engine.DRAFT_TOKENS
        if spec.model.engine == "sglang":
            of, most = sglang_engine.SglangSettings, sglang_engine.DRAFT_TOKENS
        fixed = spec.drafting.decoding_length != "auto"
        return of(
            spec.model,
            self.trie_files,
            self.weights,
            drafts,
            min(drafts.branch_length, max(1, drafts.decoding_length - 1) if fixed else most),
            self.batch_size,
            engine_args(spec.model.engine_arg or ()),
        )

    def row_options(self) -> JobOptions:
        """What holds for rows that ask for nothing else. Raises UsageError for sampling that makes no sense."""
        from lookahead.job.runner import JobOptions

        io, sampling = self.spec.io, self.spec.sampling
        return JobOptions(
            max_new_tokens=sampling.max_new_tokens,
            sampling=sampling_of(sampling, self.constraint),
            n=sampling.samples,
            seed=sampling.seed,
            chat=io.chat,
            system=io.system,
            token_ids=io.token_ids,
            echo=io.echo,
            in_order=io.order == "input",
            logprobs=io.logprobs,
        )


def plan_of(spec: JobSpec) -> JobPlan:
    """Raises UsageError for options that are missing, wrong or do not go together, LookaheadError for files that are."""
    model = _check(spec)
    io, drafting = spec.io, spec.drafting
    learned = SESSION_TOKENS if drafting.session_tokens is None else drafting.session_tokens
    drafts = draft_options(
        drafting.strategy,
        drafting.decoding_length,
        drafting.branch_length,
        learned if drafting.learn else 0,
        drafting.price,
        drafting.recycle,
    )
    if spec.reporting.metrics_label and not spec.reporting.metrics:
        raise UsageError("--metrics-label labels what --metrics FILE keeps: name that file.")
    labels = labels_of(spec.reporting.metrics_label or [], os.path.abspath(io.out) if io.out else "stdout", model)
    shard = Shard.parse(spec.scale_out.shard)
    batch_size = 1 if spec.reporting.explain else batch_size_of(spec.scale_out.batch_size)  # what is explained comes row by row
    constraint = constraint_of(spec.constraints)
    fields = RowFields(io.prompt_field, template_of(io.template), keep_of(io.keep_fields), io.echo)
    tries = open_tries(drafting.trie, spec.model)
    weights = tuple(trie_weights(drafting.trie_weight, [tries])[0])
    return JobPlan(spec, model, drafts, batch_size, constraint, fields, shard, labels, tries, weights)


def _check(spec: JobSpec) -> str:
    """The model's name. Raises UsageError for what is missing, and for options that do not go together."""
    io, drafting, model, scale_out, reporting = spec.io, spec.drafting, spec.model, spec.scale_out, spec.reporting
    several = bool(scale_out.ray or (scale_out.workers or 1) > 1)
    if model.model is None:
        raise UsageError("name a model: --model org/name or a folder. To try without one: lookahead demo")
    if not io.input:
        raise UsageError("name a file of prompts: --input prompts.jsonl (or - for stdin).")
    if io.system and not io.chat:
        raise UsageError("--system needs --chat.")
    if reporting.explain and drafting.strategy == "off":
        raise UsageError("--explain: --strategy off drafts nothing.")
    if reporting.explain and several:
        raise UsageError("--explain shows the steps of one engine: leave --workers and --ray out.")
    if reporting.explain and scale_out.batch_size is not None:
        raise UsageError("--explain shows one row after the other: leave --batch-size out.")
    if model.tp_plan and several:
        raise UsageError("--tp-plan takes all processes for one model: leave --workers and --ray out.")
    if (model.tp_plan or model.device_map) and model.device is not None:
        raise UsageError("--device-map and --tp-plan choose the devices: leave --device out.")
    if model.adapter and model.tp_plan:
        raise UsageError("--adapter is merged into whole weights: leave --tp-plan out.")
    check_sampling_options(spec.sampling)
    check_engine(spec)
    if io.order not in ("input", "completion"):
        raise UsageError(f"--order {io.order}: choose input or completion.")
    if drafting.source_name is not None and drafting.save_trie is None:
        raise UsageError("--source-name names the outputs in --save-trie FILE: give that file.")
    if not drafting.learn and drafting.session_tokens is not None:
        raise UsageError("--no-learn remembers no answers: leave --session-tokens out.")
    return model.name
