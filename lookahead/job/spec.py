"""A job as a value. In: options, from Python, a command line or job.yaml. Out: a `JobSpec`, for `run.run_job`.

Each group of options is a panel of `lookahead generate --help`. Each option declares whether it changes answers (see
options.py): a job that is resumed must agree in those, and may differ in the others. No file is read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lookahead.decode.sampling_options import SamplingFields
from lookahead.errors import UsageError
from lookahead.models.options import ModelOptions
from lookahead.options import KEY, Option, OptionGroup, declared, option

SESSION_TOKENS = 4_000_000
HISTORY_TOKENS = 20_000_000
PREFILL_CHUNK = 512
MOST_WORKERS = 1024


@dataclass(frozen=True)
class InputOutput(OptionGroup):
    """Rows that are read, and rows that are written."""

    CHANGES_ANSWERS = True

    input: Sequence[str] | None = option(
        None,
        "Prompts: JSON lines, a JSON array, .csv, .tsv (also .gz, .zst) or .parquet, a glob, - for stdin; repeat for several.",
        "FILE",
        changes_answers=False,
    )
    prompt_field: str | None = option(None, "Field or column of a row that holds the prompt's text.", "NAME")
    template: str | None = option(
        None,
        "Jinja template that makes each prompt of its row's fields, such as 'Question: {{ question }}'.",
        "FILE_OR_TEXT",
        is_file=True,
    )
    chat: bool = option(
        False, 'Wrap each "prompt" as a user message in the model\'s chat template.', flags=("--chat/--no-chat",)
    )
    system: str | None = option(None, "System message of chat prompts.", "TEXT")
    limit: int | None = option(None, "Answer the first N rows only.", "N", least=1, changes_answers=False)
    dry_run: bool = option(
        False,
        "Read and check all rows without loading the model's weights; list those that would fail. Estimate time, memory, disk.",
        changes_answers=False,
    )
    out: str | None = option(
        None,
        "Answers: one JSON line per prompt (.jsonl, also .gz, .zst), or .parquet. Default: JSON lines on stdout.",
        "FILE",
        flags=("--out", "-o"),
        changes_answers=False,
    )
    order: str = option(
        "input", "Order of the output rows: that of the prompts (input), or that in which answers finish (completion).", "NAME"
    )
    keep_fields: str | None = option(
        None, "Fields of the input rows to copy to the output rows, separated by commas.", "NAMES|all"
    )
    token_ids: bool = option(False, "Also write token_ids.")
    echo: bool = option(False, "Also write each prompt, so that lookahead replay needs no other file.")
    logprobs: int | None = option(
        None,
        "Write the log-probability of each token, and the K most probable tokens at that position with theirs.",
        "K",
        least=0,
        most=128,
    )
    resume: bool = option(False, "Resume the job that was writing to -o; start it if there is none.", changes_answers=False)
    retry_errors: bool = option(
        False, "With --resume: answer failed rows again, except those whose input is invalid.", changes_answers=False
    )
    overwrite: bool = option(False, "Replace an existing output file.", changes_answers=False)


@dataclass(frozen=True)
class Drafting(OptionGroup):
    """State where drafts come from and how long they are. Nothing of it changes an answer."""

    CHANGES_ANSWERS = False

    trie: Sequence[str] | None = option(
        None, "Trie to draft from, or a corpus file of build-trie, whose trie is built and cached; repeat for several.", "FILE"
    )
    trie_weight: Sequence[str] | None = option(
        None,
        "Weight of a --trie, named as its file without the ending: multiplies its counts (default 1); repeat for several.",
        "NAME=W",
    )
    strategy: str = option(
        "auto",
        "auto or hierarchical (a tree), parallel (branches side by side), single (one branch), off (plain decoding).",
        "NAME",
    )
    decoding_length: int | str = option(
        "auto",
        "Tokens of one row in a forward: the last token + the draft tokens. auto: up to 64, as many as pay at measured costs; "
        "with --strategy auto a number is the limit.",
        "N|auto",
    )
    branch_length: int = option(64, "Maximum draft tokens on one path.", "N", least=1, most=1024)
    session_tokens: int | None = option(
        None,
        "Maximum tokens of earlier answers to draft from, 8 bytes each; 0: none.",
        "N",
        least=0,
        default_text=str(SESSION_TOKENS),
    )
    learn: bool = option(True, "Draft from earlier answers of this job.", flags=("--learn/--no-learn",))
    recycle: bool = option(
        True,
        "Draft from runner-up tokens: those that the model ranked next-best at each verified position (Token Recycling).",
        flags=("--recycle/--no-recycle",),
    )
    price: float = option(0.0, "Draft only tokens with at least this probability of being accepted.", "P", least=0, most=1)
    history: str | None = option(
        None,
        "Trie of this job's earlier runs: draft from it, and add the answers of this run at the end. The first run makes it.",
        "FILE",
    )
    history_tokens: int = option(
        HISTORY_TOKENS, "With --history: maximum tokens to keep, 9 bytes each; the oldest runs leave first.", "N", least=1
    )
    save_trie: str | None = option(
        None,
        "Save this job's outputs as a trie, so that the next job starts warm; they are added to a trie that exists.",
        "FILE",
    )
    source_name: str | None = option(
        None,
        "With --save-trie: source of these outputs in the trie, such as a date, to drop them by. Default: outputs.",
        "NAME",
    )


@dataclass(frozen=True)
class AnswerLength(OptionGroup):
    """The first of the options of sampling."""

    CHANGES_ANSWERS = True

    max_new_tokens: int = option(256, "Maximum tokens per answer.", "N", least=1)
    min_new_tokens: int | None = option(
        None, "Minimum tokens before an end-of-sequence or stop token may end an answer.", "N", least=0
    )
    sampling: str = option(
        "greedy",
        "If no temperature is given: greedy (the most probable token), or model: do_sample, temperature, top_k, top_p and "
        "similar settings of the model's generation config.",
        "NAME",
    )


@dataclass(frozen=True)
class SamplingOptions(SamplingFields, AnswerLength):
    """State how tokens are chosen, where a row's "params" set nothing else."""

    stop: Sequence[str] | None = option(None, "End an answer after this text; repeat for several.", "TEXT")
    include_stop: bool = option(
        True,
        "Whether a stop text is part of the answer. OpenAI lines always end before it.",
        flags=("--include-stop/--no-include-stop",),
    )
    stop_token_ids: Sequence[int] | None = option(None, "Also end an answer after this token; repeat for several.", "ID")
    bad_words: Sequence[str] | None = option(
        None, "Text whose sequence of tokens is never generated; repeat for several.", "TEXT"
    )
    bad_words_ids: Sequence[str] | None = option(
        None, "The same as a sequence of token ids, such as 17,4; repeat for several.", "ID[,ID]"
    )
    logit_bias: Sequence[str] | None = option(None, "Add B to the score of a token, such as 17=-5; repeat for several.", "ID=B")
    samples: int = option(1, "Answers to each prompt.", "N", flags=("--samples", "-n"), least=1, most=1024)
    seed: int = option(0, "Random seed; combined with each row's id, so that results do not depend on the order of rows.", "N")


@dataclass(frozen=True)
class Constraints(OptionGroup):
    """State what answers must look like: one of these, or nothing."""

    CHANGES_ANSWERS = True

    json_schema: str | None = option(None, "Answers are JSON that validates against the schema in FILE.", "FILE", is_file=True)
    regex: str | None = option(None, "Answers match this regular expression, as a whole.", "REGEX")
    choice: Sequence[str] | None = option(None, "Answers are one of these texts; repeat for each.", "TEXT")
    grammar: str | None = option(
        None, "Answers keep to the grammar in FILE: Lark (start: ...) or EBNF (root ::= ...).", "FILE", is_file=True
    )


@dataclass(frozen=True)
class ScaleOut(OptionGroup):
    """How many rows are answered at once, on how many processes and devices. A shard is another job: it has other rows."""

    CHANGES_ANSWERS = False

    batch_size: int | str | None = option(
        None, "Rows decoded at once. auto: 8 on a CPU, 32 on a GPU; fewer if memory runs out.", "N|auto", default_text="auto"
    )
    prefill_chunk: int = option(PREFILL_CHUNK, "Maximum prompt tokens to prefill per step.", "N", least=1)
    shard: str | None = option(
        None, "Answer every N-th row from the I-th on: one of N jobs that share the input.", "I/N", changes_answers=True
    )
    workers: int | None = option(
        None,
        "Run N worker processes: one per GPU, or an equal share of the CPU cores each; with --ray, on the cluster (default "
        "there: one per GPU, or one per node).",
        "N",
        least=1,
        most=MOST_WORKERS,
    )
    ray: str | None = option(
        None,
        "Run on a Ray cluster: at this address, else the one that this machine is part of, else on this machine alone. Needs "
        "pip install 'lookahead[ray]'.",
        "[HOST:PORT]",
    )


@dataclass(frozen=True)
class Reporting(OptionGroup):
    """State what is reported of the job while it runs.

    json, log_file and verbose are of the command: from Python, `JobEvents` of your own stand in for them.
    """

    CHANGES_ANSWERS = False

    metrics: str | None = option(
        None, "Write counts and speed to this file every five seconds, in the Prometheus text format.", "FILE"
    )
    metrics_label: Sequence[str] | None = option(
        None, "Label of all metrics, in addition to job (the output) and model; repeat for several.", "NAME=VALUE"
    )
    explain: int | None = option(
        None,
        "Show each step of the first ROWS rows: draft tokens, their probabilities and sources, and what was accepted. On "
        "stdout; on stderr if answers or --json go to stdout.",
        "ROWS",
        least=1,
    )
    quiet: bool = option(False, "No progress and no summary on stderr.", flags=("--quiet", "-q"))
    json: bool = option(False, "Print a summary as one JSON object on stdout (needs -o).")
    log_file: str | None = option(
        None, "Append progress, notices, warnings and errors to this file, each line with a time stamp.", "FILE"
    )
    verbose: bool = option(False, "Print more on stderr: model, costs, batch size, times of steps.", flags=("--verbose", "-v"))


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
    """One option. group: the attribute of a `JobSpec` that it belongs to. field: of the group's dataclass, with its `about`."""

    group: str
    field: dataclasses.Field[Any]
    about: Option


def _all_options() -> Iterator[OptionOfJob]:
    for group, (panel, kind) in PANELS.items():
        for field in dataclasses.fields(kind):
            about = declared(field)
            changes = kind.CHANGES_ANSWERS if about.changes_answers is None else about.changes_answers
            yield OptionOfJob(group, field, dataclasses.replace(about, changes_answers=changes, panel=about.panel or panel))


OPTIONS = {each.field.name: each for each in _all_options()}  # fails here for a group that does not declare CHANGES_ANSWERS


def as_of_job(name: str, **others: Any) -> Any:
    """A field of a group: an option of a job. others: its default or what it declares, where they differ."""
    default = others.pop("default", OPTIONS[name].field.default)
    about = dataclasses.replace(OPTIONS[name].about, **others)
    return dataclasses.field(default=default, metadata={KEY: about})


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
        """Make one of options by name, such as max_new_tokens=64. Raises UsageError for an unknown name or a wrong value."""
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
