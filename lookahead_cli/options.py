"""Options that several commands share, and reading them from a job file."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import ConstraintError, UsageError
from lookahead_cli import logs

if TYPE_CHECKING:
    from lookahead.decode.constraint import Constraint
    from lookahead.draft.options import DraftOptions
    from lookahead.trie.file import Trie
    from lookahead.trie.segment import Effort, Progress


def _load_config(context: typer.Context, path: str | None) -> str | None:
    """Make the values of a YAML file the command's defaults. Keys are option names, with - or _."""
    if path is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML ({' '.join(str(error).split())}).") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: needs one option per line, such as `model: org/name`.")
    by_name: dict[str, Any] = {}
    for parameter in context.command.params:
        for flag in [parameter.name or "", *parameter.opts]:
            by_name[flag.lstrip("-").replace("-", "_")] = parameter
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        option = by_name.get(str(key).replace("-", "_"))
        if option is None or option.name in (None, "config"):
            known = ", ".join(sorted(p.name.replace("_", "-") for p in context.command.params if p.name))
            raise UsageError(f"{path}: unknown option {key!r} (known: {known}).")
        if value is None:  # as --print-config writes what is not given
            continue
        many = getattr(option, "multiple", False) or option.nargs == -1
        defaults[option.name] = [str(v) for v in value] if isinstance(value, list) else [str(value)] if many else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        callback=_load_config,
        is_eager=True,
        metavar="FILE",
        help="YAML file with any options of this command; a flag on the line wins.",
    ),
]
LogFile = Annotated[
    str | None,
    typer.Option(
        "--log-file",
        callback=logs.open_file,
        metavar="FILE",
        help="Append progress, notices, warnings and errors to this file, each line with a time stamp.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", callback=logs.be_verbose, help="Say more on stderr: model, costs, batch size, times of steps."
    ),
]
Context = typer.Context  # its obj is the command line, as typed
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace files that exist, also those of another kind than what is written."),
]
Tries = Annotated[
    list[str] | None, typer.Option("--trie", metavar="FILE", help="Prebuilt trie to draft from; repeat for several.")
]
Model = Annotated[str | None, typer.Option("--model", metavar="NAME_OR_DIR", help="Causal LM: a folder or a hub name.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto (float32 on a CPU, the checkpoint's own on a GPU), float32, bfloat16 or float16.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Attention = Annotated[
    str | None, typer.Option("--attn", metavar="NAME", help="Attention implementation: sdpa or eager (default: the model's).")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, metavar="N", help="Tokens per answer at most.")]
DecodingLength = Annotated[
    str,
    typer.Option(
        "--decoding-length",
        metavar="N|auto",
        help="Tokens in one forward: the last token + the draft tokens. auto: up to 64, as many as pay at measured costs; "
        "with --strategy auto a number is the limit.",
    ),
]
Workers = Annotated[
    int, typer.Option("--workers", min=0, metavar="N", help="Threads that tokenize, sort and merge; 0: one per core.")
]
MaxMemory = Annotated[
    str,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Memory to stay within, such as 512MiB or 2GiB (the tool itself takes about 0.2GiB).",
    ),
]
TrieWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--trie-weight",
        metavar="NAME=W",
        help="Weight of a --trie, named as its file without the ending: how much a place in it counts (default 1); repeat for "
        "several.",
    ),
]
SESSION_TOKENS = 4_000_000
SessionTokens = Annotated[
    int,
    typer.Option(
        "--session-tokens",
        min=0,
        metavar="N",
        help="Tokens of earlier answers that are remembered to draft from, 8 bytes each; 0: none.",
    ),
]
BranchLength = Annotated[
    int, typer.Option("--branch-length", min=1, max=1024, metavar="N", help="Draft tokens on one path at most.")
]

BatchSize = Annotated[
    str,
    typer.Option(
        "--batch-size",
        metavar="N|auto",
        help="Rows that are answered at once. auto: 8 on a CPU, 32 on a GPU; fewer where memory runs out.",
    ),
]
PREFILL_CHUNK = 512
PrefillChunk = Annotated[
    int,
    typer.Option(
        "--prefill-chunk", min=1, metavar="N", help="New prompts' tokens that a step takes in at most, beside drafts."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="With a row's id it makes the row's random stream: the same in any order.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        min=0,
        max=128,
        metavar="K",
        help="Write the log-probability that the model gives each token, and the K most probable in its place with theirs.",
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="FILE", help="Answers are JSON that validates against the schema in FILE."),
]
Regex = Annotated[
    str | None, typer.Option("--regex", metavar="REGEX", help="Answers match this regular expression, as a whole.")
]
Choice = Annotated[
    list[str] | None, typer.Option("--choice", metavar="TEXT", help="Answers are one of these texts; repeat for each.")
]
GrammarFile = Annotated[
    str | None,
    typer.Option(
        "--grammar", metavar="FILE", help="Answers keep to the grammar in FILE: Lark (start: ...) or EBNF (root ::= ...)."
    ),
]


def constraint_of(
    json_schema: str | None, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> Constraint | None:
    """What answers must look like; None: anything.

    Raises UsageError for several options at once and for what was typed wrongly, ConstraintError for files that cannot be used.
    """
    from lookahead.decode.constraint import Constraint

    given = {"json_schema": json_schema, "regex": regex, "choice": list(choice or ()) or None, "grammar": grammar}
    kinds = [kind for kind, value in given.items() if value is not None]
    if len(kinds) > 1:
        raise UsageError(f"{' and '.join('--' + kind.replace('_', '-') for kind in kinds)}: give one of them.")
    if not kinds:
        return None
    kind, value, where = kinds[0], given[kinds[0]], f"--{kinds[0].replace('_', '-')}"
    typed = kind in ("regex", "choice")
    if not typed:
        where = str(value)
        try:
            value = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise ConstraintError(f"{where}: cannot be read ({why}).") from None
    constraint = Constraint.of(kind, value)
    try:
        constraint.check()
    except ConstraintError as error:
        raise (UsageError if typed else ConstraintError)(f"{where}: {error}") from None
    return constraint


PromptField = Annotated[
    str | None, typer.Option("--prompt-field", metavar="NAME", help="Field or column of a row that holds the prompt's text.")
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="FILE_OR_TEXT",
        help="Jinja template that makes each prompt of its row's fields, such as 'Question: {{ question }}'.",
    ),
]
KeepFields = Annotated[
    str | None,
    typer.Option(
        "--keep-fields", metavar="NAMES|all", help="Fields of the input that output rows keep, with commas between them."
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="Answer the first N rows only.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Read and check all rows without loading the model's weights; list those that would fail."),
]
Samples = Annotated[int, typer.Option("--samples", "-n", min=1, max=1024, metavar="N", help="Answers to each prompt.")]

Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[HOST:PORT]",
        help="Run on a Ray cluster: the one at this address, or that this machine is part of, or Ray on this machine alone. "
        "Needs pip install 'lookahead[ray]'.",
    ),
]
ADDRESS = re.compile(r"auto|local|ray://\S+|[^\s/:]+:\d+")


def with_address(typed: Sequence[str]) -> list[str]:
    """A command line in which --ray is followed by an address: auto, where none is given."""
    line: list[str] = []
    for word, following in itertools.zip_longest(typed, typed[1:], fillvalue=""):
        line += [word, "auto"] if word == "--ray" and not ADDRESS.fullmatch(following) else [word]
    return line


Recycle = Annotated[
    bool,
    typer.Option("--recycle/--no-recycle", help="Draft from what the model almost said: its best few tokens at each node."),
]
Price = Annotated[
    float,
    typer.Option(
        "--price",
        min=0,
        max=1,
        metavar="P",
        help="Draft only tokens that will be accepted with this probability or more, at most --decoding-length.",
    ),
]


def draft_options(
    strategy: str,
    decoding_length: str,
    branch_length: int,
    session_tokens: int = SESSION_TOKENS,
    price: float = 0.0,
    recycle: bool = True,
) -> DraftOptions:
    """Options of the core from those of the line. Strategy auto is hierarchical, sized by what pays up to the length given.

    Raises UsageError for an unknown strategy or a length that is no number.
    """
    from lookahead.draft.options import DraftOptions

    fixed = decoding_length != "auto"
    if fixed and not decoding_length.isdecimal():
        raise UsageError(f"--decoding-length {decoding_length}: give a number of tokens from 1 to 1024, or auto.")
    kind: Any = "hierarchical" if strategy == "auto" else strategy
    adaptive = strategy != "off" and (strategy == "auto" or not fixed)
    length = int(decoding_length) if fixed else 64
    return DraftOptions(kind, length, branch_length, price, session_tokens, adaptive, recycle=recycle)


def batch_size_of(text: str) -> int | None:
    """Rows at once; None for auto. Raises UsageError for what is neither a number above 0 nor auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--batch-size {text}: give a number of rows, or auto.")
    return int(text)


def open_tries(paths: list[str] | None) -> list[Trie]:
    """Open tries; their headers are checked here, their tokenizer once the model's is known."""
    from lookahead.trie.file import Trie

    return [Trie(path) for path in paths or []]


def weights_by_name(items: list[str] | None, option: str) -> dict[str, float]:
    """["faq=2.0"] -> {"faq": 2.0}. Raises UsageError for a weight that is no number above 0, and for a name given twice."""
    weights: dict[str, float] = {}
    for item in items or []:
        name, _, value = item.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise UsageError(f"{option} {item}: give NAME=W with a number W above 0, such as faq=2.0.")
        if name in weights:
            raise UsageError(f"{option} {item}: {name} is given twice.")
        weights[name] = weight
    return weights


def trie_weights(items: list[str] | None, groups: Sequence[Sequence[Trie]]) -> list[list[float]]:
    """The weight of each trie in groups of tries that draft together. Raises UsageError for a NAME that no trie has."""
    from lookahead.trie.file import names_of

    weights = weights_by_name(items, "--trie-weight")
    names = [names_of([trie.path for trie in tries]) for tries in groups]
    known = dict.fromkeys(name for some in names for name in some)
    for name in weights:
        if name not in known:
            raise UsageError(f'--trie-weight: no --trie is named "{name}" (known: {", ".join(known) or "none"}).')
    return [[weights.get(name, 1.0) for name in some] for some in names]


def effort_of(max_memory: str, workers: int, progress: Progress | None = None) -> Effort:
    """What a build, merge or prune may use; 0 workers: one per core that this process may run on."""
    import os

    from lookahead.trie.segment import Effort, no_progress
    from lookahead_cli.render import notice

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Effort(size_in_bytes(max_memory), workers or cores, progress or no_progress, notice)


def size_in_bytes(text: str) -> int:
    """ "512", "64KiB", "1.5MB", "2GiB" -> bytes. Raises UsageError for anything else."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmg", 1):
        units.update({letter: 1024**power, f"{letter}ib": 1024**power, f"{letter}b": 1000**power})
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError) as error:
        raise UsageError(f"size {text!r}: give bytes, or a number with KiB, MiB or GiB.") from error
    if size <= 0:
        raise UsageError(f"size {text!r}: must be more than 0 bytes.")
    return size
