"""A job as a value. In: options, from Python, a command line or job.yaml. Out: a `JobSpec`, for `run.run_job`.

Each group of options is a panel of `lookahead generate --help`. Each option declares whether it changes answers (see
options.py): a job that is resumed must agree in those, and may differ in the others. No file is read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.errors import UsageError
from lookahead.job.answer_options import Constraints, SamplingOptions
from lookahead.models.options import ModelOptions
from lookahead.options import Option, OptionGroup, declared, option

SESSION_TOKENS = 4_000_000
PREFILL_CHUNK = 512
MOST_WORKERS = 1024


@dataclass(frozen=True)
class InputOutput(OptionGroup):
    """Rows that are read, and rows that are written."""

    input: Sequence[str] | None = option(
        None,
        "Prompts: JSON lines, a JSON array, .csv, .tsv (also .gz, .zst) or .parquet, a glob, - for stdin; repeat for several.",
        metavar="FILE",
        changes_answers=False,
    )
    prompt_field: str | None = option(
        None, "Field or column of a row that holds the prompt's text.", metavar="NAME", changes_answers=True
    )
    template: str | None = option(
        None,
        "Jinja template that makes each prompt of its row's fields, such as 'Question: {{ question }}'.",
        metavar="FILE_OR_TEXT",
        changes_answers=True,
        is_file=True,
    )
    chat: bool = option(
        False,
        'Wrap each "prompt" as a user message in the model\'s chat template.',
        flags=("--chat/--no-chat",),
        changes_answers=True,
    )
    system: str | None = option(None, "System message of chat prompts.", metavar="TEXT", changes_answers=True)
    limit: int | None = option(None, "Answer the first N rows only.", least=1, metavar="N", changes_answers=False)
    dry_run: bool = option(
        False,
        "Read and check all rows without loading the model's weights; list those that would fail.",
        changes_answers=False,
    )
    out: str | None = option(
        None,
        "Answers: one JSON line per prompt (.jsonl, also .gz, .zst), or .parquet. Default: JSON lines on stdout.",
        flags=("--out", "-o"),
        metavar="FILE",
        changes_answers=False,
    )
    order: str = option(
        "input",
        "Order of the output rows: that of the prompts (input), or that in which answers finish (completion).",
        metavar="NAME",
        changes_answers=True,
    )
    keep_fields: str | None = option(
        None,
        "Fields of the input rows to copy to the output rows, separated by commas.",
        metavar="NAMES|all",
        changes_answers=True,
    )
    token_ids: bool = option(False, "Also write token_ids.", changes_answers=True)
    echo: bool = option(False, "Also write each prompt, so that lookahead replay needs no other file.", changes_answers=True)
    logprobs: int | None = option(
        None,
        "Write the log-probability of each token, and the K most probable tokens at that position with theirs.",
        least=0,
        most=128,
        metavar="K",
        changes_answers=True,
    )
    resume: bool = option(False, "Resume the job that was writing to -o; start it if there is none.", changes_answers=False)
    retry_errors: bool = option(
        False, "With --resume: answer failed rows again, except those whose input is invalid.", changes_answers=False
    )
    overwrite: bool = option(False, "Replace an existing output file.", changes_answers=False)


@dataclass(frozen=True)
class Drafting(OptionGroup):
    """Where drafts come from and how long they are. Nothing of it changes an answer."""

    trie: Sequence[str] | None = option(
        None,
        "Trie to draft from, or a corpus file of build-trie, whose trie is built and cached; repeat for several.",
        metavar="FILE",
        changes_answers=False,
    )
    trie_weight: Sequence[str] | None = option(
        None,
        "Weight of a --trie, named as its file without the ending: multiplies its counts (default 1); repeat for several.",
        metavar="NAME=W",
        changes_answers=False,
    )
    strategy: str = option(
        "auto",
        "auto or hierarchical (a tree), parallel (branches side by side), single (one branch), off (plain decoding).",
        metavar="NAME",
        changes_answers=False,
    )
    decoding_length: int | str = option(
        "auto",
        "Tokens of one row in a forward: the last token + the draft tokens. auto: up to 64, as many as pay at measured costs; "
        "with --strategy auto a number is the limit.",
        metavar="N|auto",
        changes_answers=False,
    )
    branch_length: int = option(64, "Maximum draft tokens on one path.", least=1, most=1024, metavar="N", changes_answers=False)
    session_tokens: int | None = option(
        None,
        "Maximum tokens of earlier answers to draft from, 8 bytes each; 0: none.",
        least=0,
        metavar="N",
        default_text=str(SESSION_TOKENS),
        changes_answers=False,
    )
    learn: bool = option(True, "Draft from earlier answers of this job.", flags=("--learn/--no-learn",), changes_answers=False)
    recycle: bool = option(
        True,
        "Draft from runner-up tokens: those that the model ranked next-best at each verified position (Token Recycling).",
        flags=("--recycle/--no-recycle",),
        changes_answers=False,
    )
    price: float = option(
        0.0,
        "Draft only tokens with at least this probability of being accepted.",
        least=0,
        most=1,
        metavar="P",
        changes_answers=False,
    )
    save_trie: str | None = option(
        None,
        "Save this job's outputs as a trie, so that the next job starts warm; they are added to a trie that exists.",
        metavar="FILE",
        changes_answers=False,
    )
    source_name: str | None = option(
        None,
        "With --save-trie: source of these outputs in the trie, such as a date, to drop them by. Default: outputs.",
        metavar="NAME",
        changes_answers=False,
    )


@dataclass(frozen=True)
class ScaleOut(OptionGroup):
    """How many rows at once, on how many processes and devices. A shard answers other rows, so it is another job."""

    batch_size: int | str | None = option(
        None,
        "Rows decoded at once. auto: 8 on a CPU, 32 on a GPU; fewer if memory runs out.",
        metavar="N|auto",
        default_text="auto",
        changes_answers=False,
    )
    prefill_chunk: int = option(
        PREFILL_CHUNK,
        "Maximum prompt tokens to prefill per step.",
        least=1,
        metavar="N",
        changes_answers=False,
    )
    shard: str | None = option(
        None,
        "Answer every N-th row from the I-th on: one of N jobs that share the input.",
        metavar="I/N",
        changes_answers=True,
    )
    workers: int | None = option(
        None,
        "Run N worker processes: one per GPU, or an equal share of the CPU cores each; with --ray, on the cluster (default "
        "there: one per GPU, or one per node).",
        least=1,
        most=MOST_WORKERS,
        metavar="N",
        changes_answers=False,
    )
    ray: str | None = option(
        None,
        "Run on a Ray cluster: at this address, else the one that this machine is part of, else on this machine alone. Needs "
        "pip install 'lookahead[ray]'.",
        metavar="[HOST:PORT]",
        changes_answers=False,
    )


@dataclass(frozen=True)
class Reporting(OptionGroup):
    """What is reported of the job while it runs.

    json, log_file and verbose are of the command: from Python, `JobEvents` of your own stand in for them.
    """

    metrics: str | None = option(
        None,
        "Write counts and speed to this file every five seconds, in the Prometheus text format.",
        metavar="FILE",
        changes_answers=False,
    )
    metrics_label: Sequence[str] | None = option(
        None,
        "Label of all metrics, in addition to job (the output) and model; repeat for several.",
        metavar="NAME=VALUE",
        changes_answers=False,
    )
    explain: int | None = option(
        None,
        "Show each step of the first ROWS rows: draft tokens, their probabilities and sources, and what was accepted. On "
        "stdout; on stderr if answers or --json go to stdout.",
        least=1,
        metavar="ROWS",
        changes_answers=False,
    )
    quiet: bool = option(False, "No progress and no summary on stderr.", flags=("--quiet", "-q"), changes_answers=False)
    json: bool = option(False, "Print a summary as one JSON object on stdout (needs -o).", changes_answers=False)
    log_file: str | None = option(
        None,
        "Append progress, notices, warnings and errors to this file, each line with a time stamp.",
        metavar="FILE",
        changes_answers=False,
    )
    verbose: bool = option(
        False,
        "Print more on stderr: model, costs, batch size, times of steps.",
        flags=("--verbose", "-v"),
        changes_answers=False,
    )


PANELS: dict[str, tuple[str, type[OptionGroup]]] = {  # by attribute of a JobSpec
    "io": ("Input and output", InputOutput),
    "drafting": ("Drafting", Drafting),
    "sampling": ("Sampling", SamplingOptions),
    "constraints": ("Constraints", Constraints),
    "model": ("Model", ModelOptions),
    "scale_out": ("Scale-out", ScaleOut),
    "reporting": ("Reporting", Reporting),
}


@dataclass(frozen=True)
class OptionOfJob:
    """One option. group: the attribute of a `JobSpec` that it belongs to. panel: its title. field: of the group's dataclass."""

    group: str
    panel: str
    field: dataclasses.Field[Any]

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def about(self) -> Option:
        return declared(self.field)


def _all_options() -> Iterator[OptionOfJob]:
    for group, (panel, kind) in PANELS.items():
        for field in dataclasses.fields(kind):
            yield OptionOfJob(group, declared(field).panel or panel, field)


OPTIONS = {each.name: each for each in _all_options()}  # fails here for an option that does not declare itself


@dataclass(frozen=True)
class JobSpec:
    """A job: what is answered by which model, how, and what is kept.

    JobSpec.of(model="org/model", input="prompts.jsonl", out="answers.jsonl", max_new_tokens=64) takes options by the names
    that they have on the command line and in job.yaml.
    """

    io: InputOutput = dataclasses.field(default_factory=InputOutput)
    drafting: Drafting = dataclasses.field(default_factory=Drafting)
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    scale_out: ScaleOut = dataclasses.field(default_factory=ScaleOut)
    reporting: Reporting = dataclasses.field(default_factory=Reporting)

    @classmethod
    def of(cls, **options: Any) -> JobSpec:
        """Of options by name, such as max_new_tokens=64. Raises UsageError for an unknown name or a value that is none."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in PANELS}
        for name, value in options.items():
            if name not in OPTIONS:
                raise UsageError(f"a job has no option {name!r} (known: {', '.join(sorted(OPTIONS))}).")
            groups[OPTIONS[name].group][name] = value
        return cls(**{group: PANELS[group][1](**values) for group, values in groups.items()})  # type: ignore[arg-type]

    def options(self) -> dict[str, Any]:
        """All options by name; several values of one as a list."""
        found = {name: getattr(getattr(self, each.group), name) for name, each in OPTIONS.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
