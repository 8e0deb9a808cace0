"""lookahead generate: answer a file of prompts."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead.errors import RowsFailedError, UsageError
from lookahead_cli.model_options import Adapter, ModelTokenizer, Revision, TrustRemoteCode
from lookahead_cli.options import (
    PREFILL_CHUNK,
    SESSION_TOKENS,
    Attention,
    BatchSize,
    BranchLength,
    Choice,
    Config,
    DecodingLength,
    Device,
    DryRun,
    Dtype,
    GrammarFile,
    JsonSchema,
    KeepFields,
    Limit,
    LogFile,
    Logprobs,
    MaxNewTokens,
    Model,
    PrefillChunk,
    Price,
    PromptField,
    Ray,
    Recycle,
    Regex,
    Samples,
    Seed,
    SessionTokens,
    Template,
    Tries,
    TrieWeights,
    Verbose,
    batch_size_of,
    constraint_of,
    draft_options,
    open_tries,
    trie_weights,
)
from lookahead_cli.sampling_options import (
    BadWords,
    BadWordsIds,
    FrequencyPenalty,
    LogitBias,
    MinNewTokens,
    MinP,
    NoRepeatNgramSize,
    PresencePenalty,
    RepetitionPenalty,
    SamplingFrom,
    Stop,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
    TypicalP,
    check_sampling_options,
    sampling_of,
)

if TYPE_CHECKING:
    from lookahead.job.journal import JobFiles, Journal
    from lookahead.job.runner import JobOptions
    from lookahead.job.setup import EngineSettings
    from lookahead.job.stream import Stream
    from lookahead.outputs import Input
    from lookahead_cli.engines import Answering
    from lookahead_cli.progress import JobProgress


def command(
    model: Model = None,
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help="Prompts: JSON lines, a JSON array, .csv, .tsv (also .gz, .zst) or .parquet, a glob, - for stdin; repeat for "
            "several.",
        ),
    ] = None,
    prompt_field: PromptField = None,
    template: Template = None,
    keep_fields: KeepFields = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Answers: one JSON line per prompt, or .parquet. Default: JSON lines on stdout."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the job that was writing to -o; start it if there is none.")
    ] = False,
    retry_errors: Annotated[
        bool,
        typer.Option("--retry-errors", help="With --resume: answer failed rows again, but for those whose input is bad."),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Answer every N-th row from the I-th on: one of N jobs that share the input."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            metavar="N",
            help="Answer by N processes: one to a GPU of this machine or a share of its cores; with --ray, of the cluster's "
            "(default there: all GPUs, or one to a node).",
        ),
    ] = None,
    ray: Ray = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            "--device-map", metavar="MAP", help="Spread one model over this machine's GPUs, as transformers does: auto."
        ),
    ] = None,
    tp_plan: Annotated[
        str | None,
        typer.Option(
            "--tp-plan",
            metavar="PLAN",
            help="Tensor parallel, as transformers does: auto. Start it by torchrun --no-python --nproc-per-node N lookahead.",
        ),
    ] = None,
    revision: Revision = None,
    adapter: Adapter = None,
    tokenizer: ModelTokenizer = None,
    trust_remote_code: TrustRemoteCode = False,
    trie: Tries = None,
    trie_weight: TrieWeights = None,
    max_new_tokens: MaxNewTokens = 256,
    batch_size: BatchSize = "auto",
    prefill_chunk: PrefillChunk = PREFILL_CHUNK,
    sampling: SamplingFrom = "greedy",
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    typical_p: TypicalP = None,
    repetition_penalty: RepetitionPenalty = None,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    no_repeat_ngram_size: NoRepeatNgramSize = None,
    min_new_tokens: MinNewTokens = None,
    stop: Stop = None,
    stop_token_ids: StopTokenIds = None,
    bad_words: BadWords = None,
    bad_words_ids: BadWordsIds = None,
    logit_bias: LogitBias = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    grammar: GrammarFile = None,
    samples: Samples = 1,
    seed: Seed = 0,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="auto or hierarchical (a tree), parallel (branches side by side), single (one branch), off (plain decoding).",
        ),
    ] = "auto",
    decoding_length: DecodingLength = "auto",
    branch_length: BranchLength = 64,
    session_tokens: SessionTokens = SESSION_TOKENS,
    price: Price = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Attention = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help='Wrap each "prompt" as a user message in the model\'s chat template.')
    ] = False,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of chat prompts.")] = None,
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Write token_ids beside the text.")] = False,
    echo: Annotated[
        bool, typer.Option("--echo", help="Keep each prompt beside its answer, so that lookahead replay needs no other file.")
    ] = False,
    logprobs: Logprobs = None,
    order: Annotated[
        str,
        typer.Option(
            "--order", metavar="NAME", help="Write answers in the order of their prompts (input) or as they end (completion)."
        ),
    ] = "input",
    save_trie: Annotated[
        str | None,
        typer.Option(
            "--save-trie",
            metavar="FILE",
            help="Keep this job's outputs as a trie, so that the next job starts warm; one that exists is added to.",
        ),
    ] = None,
    learn: Annotated[bool, typer.Option("--learn/--no-learn", help="Draft from earlier answers of this job.")] = True,
    recycle: Recycle = True,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", metavar="FILE", help="Keep counts and speed in this file, in the Prometheus text format."),
    ] = None,
    metrics_label: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics-label",
            metavar="NAME=VALUE",
            help="A label of all metrics, beside job (the output) and model; repeat for several.",
        ),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            "--explain",
            min=1,
            metavar="ROWS",
            help="Show each step of the first ROWS rows: what was drafted, how likely, from where, and what was accepted. "
            "On stdout; on stderr where answers or --json go there.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary on stderr.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a summary as one JSON object on stdout (needs -o).")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options as YAML for --config, and do nothing else.")
    ] = False,
    log_file: LogFile = None,
    verbose: Verbose = False,
    config: Config = None,
) -> None:
    """Answer files of prompts: the tokens that plain decoding gives, in fewer forwards of the model.

    Greedy, or sampled with --temperature or --sampling model; a row's "params" win over the line. Reads {"prompt"},
    {"messages"}, {"prompt_ids"} or OpenAI batch lines. A row that fails becomes an error row. A job that was interrupted or
    killed goes on with --resume. Exit code 0: complete; 3: complete, and some rows failed; 1: not complete.

    Example: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl

    To watch it draft: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl --explain 1

    Next: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie
    """
    given = dict(locals())
    import contextlib
    import dataclasses
    import os
    from pathlib import Path

    from lookahead.corpus import named_files
    from lookahead.hub import check_name
    from lookahead.job.counting import RowCount
    from lookahead.job.fields import KEEP, RowFields, is_template_file, keep_of, template_of
    from lookahead.job.inputs import Shard
    from lookahead.job.lock import OutputLock
    from lookahead.job.manifest import describe, go_on, read_manifest
    from lookahead.job.metrics import labels_of
    from lookahead.job.resume import files_of, what_is_done
    from lookahead.job.rows import left_to_do, read_requests, without_duplicates
    from lookahead.outputs import Input
    from lookahead_cli.progress import JobProgress, shown

    if print_config:
        from lookahead_cli.job_schema import print_options

        print_options(given)
        return
    if model is None:
        raise UsageError("name a model: --model org/name or a folder. To try without one: lookahead demo")
    if not input:
        raise UsageError("name a file of prompts: --input prompts.jsonl (or - for stdin).")
    if json and out is None and not dry_run:
        raise UsageError("--json prints a summary on stdout, where the answers go: name a file with -o.")
    if quiet and verbose:
        raise UsageError("--quiet and --verbose: give one of them.")
    if system and not chat:
        raise UsageError("--system needs --chat.")
    if explain and strategy == "off":
        raise UsageError("--explain: --strategy off drafts nothing.")
    if explain and (ray or (workers or 1) > 1):
        raise UsageError("--explain shows the steps of one engine: leave --workers and --ray out.")
    if tp_plan and (ray or (workers or 1) > 1):
        raise UsageError("--tp-plan takes all processes for one model: leave --workers and --ray out.")
    if (tp_plan or device_map) and device != "auto":
        raise UsageError("--device-map and --tp-plan choose the devices: leave --device out.")
    if adapter and tp_plan:
        raise UsageError("--adapter is merged into whole weights: leave --tp-plan out.")
    check_sampling_options(given)
    if order not in ("input", "completion"):
        raise UsageError(f"--order {order}: choose input or completion.")
    if not learn and session_tokens != SESSION_TOKENS:
        raise UsageError("--no-learn remembers no answers: leave --session-tokens out.")
    drafts = draft_options(strategy, decoding_length, branch_length, session_tokens if learn else 0, price, recycle)
    if metrics_label and not metrics:
        raise UsageError("--metrics-label labels what --metrics FILE keeps: name that file.")
    labels = labels_of(metrics_label or [], os.path.abspath(out) if out else "stdout", model)
    part = Shard.parse(shard)
    rows_at_once = 1 if explain else batch_size_of(batch_size)  # what is explained comes row by row
    constraint = constraint_of(json_schema, regex, choice, grammar)
    fields = RowFields(prompt_field, template_of(template), keep_of(keep_fields), echo)
    opened = open_tries(trie)
    weights = tuple(trie_weights(trie_weight, [opened])[0])

    def prepared() -> tuple[EngineSettings, JobOptions]:
        """Importing what this needs takes seconds: it waits until the files are known to be right."""
        from lookahead.job.runner import JobOptions
        from lookahead.job.setup import EngineSettings

        asked = sampling_of(given, constraint)
        job = JobOptions(
            max_new_tokens, asked, samples, seed, chat, system, token_ids, echo, order == "input", logprobs=logprobs
        )
        placed = dtype, device, attn, device_map, tp_plan
        loaded = trust_remote_code, revision, adapter, tokenizer
        return EngineSettings(model, tuple(trie or ()), weights, drafts, *placed, rows_at_once, prefill_chunk, *loaded), job

    if dry_run:
        from lookahead_cli import dry_run as checking

        names = named_files(input)
        wanted = islice(read_requests(*names, fields=fields), limit)
        checking.dry_run(left_to_do(without_duplicates(wanted), part, {}), names, *prepared(), json)
        return
    with contextlib.ExitStack() as stack:
        peers = None
        if tp_plan:
            from lookahead.forward.parallel import joined
            from lookahead_cli.engines import follow

            peers = stack.enter_context(joined())
            if not peers.leads:
                follow(peers, *prepared())
                return
        files = files_of(out, resume, retry_errors, overwrite)
        names = named_files(input)
        reads = [
            Input("--input", names), Input("--trie", trie or []), Input("--model", [model], hub=True),
            Input("--adapter", [adapter], hub=True), Input("--tokenizer", [tokenizer], hub=True),
            Input("--config", [config]), Input("--json-schema", [json_schema]), Input("--grammar", [grammar]),
            Input("--template", [template if template and is_template_file(template) else None]),
        ]  # fmt: skip
        check_job_outputs(out, files, save_trie, metrics, log_file, reads, overwrite)
        known = open_tries([save_trie]) if save_trie and Path(save_trie).exists() else []
        if not resume:  # a job that is complete needs no model
            check_name(model, "a model folder", revision)
            if tokenizer:
                check_name(tokenizer, "a folder with a tokenizer")
        done = manifest = lock = None
        if files is not None:
            lock = stack.enter_context(OutputLock(files, resume, overwrite))
            manifest = describe(given, opened, names)
            if resume and files.hold_rows():
                manifest = go_on(read_manifest(files.manifest), manifest, files.out)
                done = what_is_done(files, names, part, retry_errors, fields)
        # A missing or empty input is known before the model is loaded.
        answered = done.requests if done else {}
        most = None if limit is None else max(limit, *(number + 1 for number in answered), 0)
        wanted = islice(read_requests(*names, fields=fields), most)
        requests = left_to_do(without_duplicates(wanted), part, answered)
        first = next(requests, None)
        if first and first.problem and first.param == KEEP:
            raise UsageError(f"--keep-fields {keep_fields}: {first.where} {first.problem}.")
        if done and done.whole:
            if first is not None:
                raise UsageError(
                    f"{out}: is complete, no rows can be added. Choose another -o, or start anew with --overwrite."
                )
            report(JobProgress(done.totals, lambda: None, lambda: None), {}, model, out, json, quiet, files is not None)
            return

        from lookahead.job.journal import Journal
        from lookahead.job.resume import open_journal
        from lookahead.trie.build import check_same_tokenizer
        from lookahead_cli import engines, render
        from lookahead_cli.stopping import on_signals

        counted = stack.enter_context(RowCount([] if quiet and not metrics else names))
        settings, job = prepared()
        if manifest:  # a job that goes on answers as it began
            job = dataclasses.replace(job, created=int(manifest.runs[0]["began"]))
        answering: Answering | None = None
        if first is not None or (save_trie and files and files.learned.exists()):
            if ray or (workers or 1) > 1:
                answering = stack.enter_context(engines.workers(settings, job, ray, workers))
            else:
                answering, job = engines.here(settings, job, peers, explain, on_stdout=bool(out) and not json)
            for learned_before in known:
                check_same_tokenizer(learned_before, answering.whose, model)
        output: Journal | Stream
        if lock and manifest:
            output = open_journal(lock, done, manifest, retry_errors, bool(save_trie))
        else:
            output = stream_to(out, bool(save_trie))
        progress = JobProgress(
            output.totals,
            lambda: None if counted.rows is None else part.size(min(counted.rows, most or counted.rows)),
            lambda: answering.gain if answering else None,
        )
        progress.labels = labels
        with output, on_signals() as asked:

            def stopped() -> bool:
                progress()
                return asked.wanted()

            clock = answering.clock if answering else None
            with shown(progress, not (quiet or explain), Path(metrics) if metrics else None, output.save, clock):
                if answering and first:
                    answering.run(chain([first], requests), job, output.write, stopped)
            if not asked.wanted():
                keep_learned(output, save_trie, answering, model)
                output.finish(job.in_order)
        used = answering.used() if answering else {}
    if asked.wanted():
        if isinstance(output, Journal):
            instead = " in place of --overwrite" if overwrite else ""
            render.notice(f"stopped after {progress.rows}. To go on: the same command with --resume{instead}.")
        else:
            keep_learned(output, save_trie, answering, model)
            render.notice(f"stopped after {progress.rows}; every line of {out or 'the output'} is a whole row.")
        raise typer.Exit(128 + asked.number)
    report(progress, used, model, out, json, quiet, files is not None)


def check_job_outputs(
    out: str | None,
    files: JobFiles | None,
    save_trie: str | None,
    metrics: str | None,
    log_file: str | None,
    reads: list[Input],
    overwrite: bool,
) -> None:
    """See `outputs.check_outputs`. files: of a job that writes to `out`; the files beside it are outputs, too."""
    from lookahead.outputs import JOURNAL, LEARNED, MANIFEST, METRICS, Output, check_outputs

    # A trie is only ever added to: one that is drafted from may be, and any other file is refused when it is opened.
    outputs = [Output("-o", out), Output("--log-file", log_file)]
    if files is not None:
        beside = [(files.journal, JOURNAL), (files.manifest, MANIFEST), (files.learned, LEARNED)]
        outputs += [Output("-o", path, kind) for path, kind in beside]
        if files.is_parquet:
            outputs.append(Output("-o", files.rows))
    outputs += [Output("--save-trie", save_trie, updates=("--trie",)), Output("--metrics", metrics, METRICS)]
    check_outputs(outputs, reads, overwrite)


def keep_learned(output: Journal | Stream, trie: str | None, answering: Answering | None, model: str) -> None:
    """Put the answers that were kept into a trie, new or not."""
    from lookahead.job.learned import save_learned
    from lookahead.trie.build import Effort
    from lookahead_cli import render

    if trie is not None and answering is not None:  # else nothing was kept
        save_learned(output, trie, answering.whose, answering.recycled, model, Effort(notice=render.notice))


def stream_to(out: str | None, learn: bool) -> Stream:
    """Rows go to stdout, or to a device."""
    import sys

    from lookahead.job.stream import Stream

    if out is None:
        return Stream(sys.stdout, "stdout", learn)
    return Stream(open(out, "w", encoding="utf-8"), out, learn)


def report(
    progress: JobProgress, used: dict[str, Any], model: str, out: str | None, json: bool, quiet: bool, resumable: bool
) -> None:
    """Say what a job that is complete came to. used: what it took. Raises RowsFailedError if rows have failed."""
    from lookahead_cli import render

    totals = progress.totals
    if json:
        speedup = progress.speedup
        gain = {} if speedup is None else {"speedup_over_plain": round(speedup, 4)}
        render.print_json({"model": model, "output": out, **totals.as_json(), **gain, **used})
    progress.table(on_stderr=not (json or quiet))
    if totals.errors:
        again = f" {totals.faults} of them may succeed with --resume --retry-errors." if totals.faults and resumable else ""
        raise RowsFailedError(
            f'{totals.errors} of {totals.rows} rows failed; see their "error" in {out or "the output"}.{again}'
        )
