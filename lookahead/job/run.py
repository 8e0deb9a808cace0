"""The front door of jobs. In: a `JobSpec`. Out: rows in its output, and a `JobReport`.

report = run_job(JobSpec.of(model="org/model", input="prompts.jsonl", out="answers.jsonl", resume=True))

A job is opened (its files are checked, locked and read), answered (see engines.py) and closed. Its answers may go to a trie
that other jobs add to: the copies there are counted before, so that a run after a kill adds them only once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lookahead.corpus.read import named_files
from lookahead.errors import LookaheadError, UsageError
from lookahead.files.atomic import followed
from lookahead.files.hub import check_name
from lookahead.files.outputs import ANY_TRIE, JOURNAL, LEARNED, MANIFEST, METRICS, ROWS, Input, Output, check_outputs
from lookahead.job.events import JobEvents
from lookahead.job.fields import KEEP, is_template_file
from lookahead.job.inputs import RowCount
from lookahead.job.journal import Done, FinishedRow, Journal, read_done
from lookahead.job.lock import JobFiles, OutputLock
from lookahead.job.manifest import Manifest, began, describe, read_manifest, resumed, sampled
from lookahead.job.params import Request
from lookahead.job.plan import JobPlan, plan_of
from lookahead.job.progress import JobProgress, JobReport, JobTotals, clocked
from lookahead.job.rows import left_to_do, read_requests, without_duplicates
from lookahead.job.spec import JobSpec
from lookahead.printable import json_text
from lookahead.token_documents import OUTPUTS, TokenDocument, TokenizerIdentity
from lookahead.trie.file import Trie
from lookahead.trie.format import CHUNK
from lookahead.trie.segment import BuildResources

if TYPE_CHECKING:
    from lookahead.forward.parallel import Peers
    from lookahead.job.engines import Answering
    from lookahead.job.runner import JobOptions

POINT_SECONDS, METRICS_SECONDS, SAVE_SECONDS = 1.0, 5.0, 10.0


def run_job(spec: JobSpec, events: JobEvents | None = None, config: str | None = None) -> JobReport:
    """Answer the rows of a job that are not answered yet; begins it, or resumes it where spec asks for it.

    events: what the caller receives. config: the file that the options came from, which must not be replaced. Failed rows are
    counted in the report. Raises UsageError for options that do not go together, LookaheadError for files or a model that
    cannot be used and for a job that cannot be completed: what is written until then is resumable.
    """
    events = events or JobEvents()
    if spec.io.dry_run:
        raise UsageError("--dry-run answers nothing: see lookahead.job.check.check_job.")
    plan = plan_of(spec)
    with contextlib.ExitStack() as stack:
        peers = None
        if spec.model.tp_plan:
            from lookahead.forward.parallel import joined

            peers = stack.enter_context(joined())
            if not peers.leads:
                from lookahead.job.engines import follow

                follow(peers, plan.engine_settings(), plan.row_options())
                return JobReport("led", plan.model, spec.io.out)
        opened = _open(plan, config, stack)
        if opened.done and opened.done.whole:
            if opened.first is not None:
                raise UsageError(
                    f"{spec.io.out}: is complete, no rows can be added. Choose another -o, or start again with --overwrite."
                )
            assert opened.files is not None
            assert opened.manifest is not None
            if read_manifest(opened.files.manifest).state != "complete":  # it was cut off before it noted so
                opened.manifest.state = "complete"
                opened.manifest.end(opened.files.manifest, opened.done.totals)
            progress = JobProgress(opened.done.totals)
            return JobReport.of(progress, state="complete", model=plan.model, out=spec.io.out, resumable=True)
        return _answer(plan, opened, peers, events, stack)


@dataclasses.dataclass
class _Opened:
    """A job whose files are right; None: does not apply. first: of the requests left, before `others`. most: rows looked at."""

    began: float
    names: list[str]
    files: JobFiles | None
    lock: OutputLock | None
    manifest: Manifest | None
    done: Done | None
    first: Request | None
    others: Iterator[Request]
    most: int | None
    learned: list[Trie]


def _open(plan: JobPlan, config: str | None, stack: contextlib.ExitStack) -> _Opened:
    """Check, lock and read the files. Raises LookaheadError for what cannot be used, before the model is loaded."""
    began, io, model, save_trie = time.monotonic(), plan.spec.io, plan.spec.model, plan.spec.drafting.save_trie
    files = files_of(io.out, io.resume, io.retry_errors, io.overwrite)
    names = named_files(io.input or ())
    _check_outputs(plan.spec, files, names, config)
    learned = [Trie(save_trie)] if save_trie and Path(save_trie).exists() else []
    if not io.resume:  # a job that is complete needs no model
        check_name(plan.model, "a model folder", model.revision)
        if model.tokenizer:
            check_name(model.tokenizer, "a folder with a tokenizer")
    done = manifest = lock = None
    if files is not None:
        lock = stack.enter_context(OutputLock(files, io.resume, io.overwrite))
        manifest = describe(plan.spec, plan.tries, names)
        if io.resume and files.hold_rows():
            manifest = resumed(read_manifest(files.manifest), manifest, files.out)
            done = what_is_done(plan, files, names)
            if done.whole and manifest.output not in ("", sampled(files.out)):
                raise LookaheadError(f"{files.out}: was changed since the job wrote it. Start again with --overwrite.")
    # A missing or empty input is known before the model is loaded.
    others, most = requests_left(plan, names, done)
    first = next(others, None)
    if first and first.problem and first.param == KEEP:
        raise UsageError(f"--keep-fields {io.keep_fields}: {first.where} {first.problem}.")
    return _Opened(began, names, files, lock, manifest, done, first, others, most, learned)


def _check_outputs(spec: JobSpec, files: JobFiles | None, names: list[str], config: str | None) -> None:
    """See `outputs.check_outputs`. files: of a job that writes to a file; those next to it are outputs, too."""
    io, drafting, model, limits = spec.io, spec.drafting, spec.model, spec.constraints
    template = io.template if io.template and is_template_file(io.template) else None
    hub = {"--model": [model.name], "--adapter": model.adapters.values(), "--tokenizer": [model.tokenizer]}
    files_read = {"--config": config, "--json-schema": limits.json_schema, "--grammar": limits.grammar, "--template": template}
    reads = [Input("--input", names), Input("--trie", drafting.trie or [])]
    reads += [*(Input(option, [*found], hub=True) for option, found in hub.items())]
    reads += [*(Input(option, [name]) for option, name in files_read.items())]
    # A trie is only ever added to: one that is drafted from may be, and any other file is refused when it is opened.
    outputs = [Output("-o", io.out, ROWS), Output("--log-file", spec.reporting.log_file)]
    if files is not None:
        own_files = [(files.journal, JOURNAL), (files.manifest, MANIFEST), (files.learned, LEARNED)]
        outputs += [Output("-o", path, kind) for path, kind in own_files]
        if files.is_made_at_the_end:
            outputs.append(Output("-o", files.rows, ROWS))
    saved = "--history" if drafting.history else "--save-trie"
    outputs.append(Output(saved, drafting.save_trie, ANY_TRIE, updates=("--trie",)))
    outputs.append(Output("--metrics", spec.reporting.metrics, METRICS))
    check_outputs(outputs, reads, io.overwrite)


def _answer(plan: JobPlan, opened: _Opened, peers: Peers | None, events: JobEvents, stack: contextlib.ExitStack) -> JobReport:
    spec = plan.spec
    wanted = spec.reporting.metrics or not spec.reporting.quiet
    counted = stack.enter_context(RowCount(opened.names if wanted else []))
    answering, options = _answering(plan, opened, peers, events, stack)
    out, drafting = spec.io.out, spec.drafting
    from lookahead.job.estimate import rows_before

    before = rows_before(opened.files) if opened.files and opened.done else None
    output: Journal | Stream
    if opened.lock and opened.manifest:
        if opened.done and opened.done.cut:
            unknown = f"{opened.done.cut:,} bytes at the end of {opened.lock.files.rows}"
            events.notice(f"{unknown} are not in its journal, as after a kill: they are removed, and rows answered again.")
        if opened.done is None:
            opened.lock.remove_files()
        done = opened.done or Done()
        again = done.faults if spec.io.retry_errors else frozenset[int]()
        output = Journal(opened.lock, done, opened.manifest, bool(drafting.save_trie), again)
    else:
        file = open(out, "w", encoding="utf-8") if out else sys.stdout  # noqa: SIM115 - the stream closes it
        output = Stream(file, out or "stdout", bool(drafting.save_trie))

    def rows() -> int | None:
        return None if counted.rows is None else plan.shard.size(min(counted.rows, opened.most or counted.rows))

    def stop() -> bool:
        progress()
        events.progress(progress)
        return events.stopped()

    if answering:
        answering.expect(rows() or 0)
    of_engine = (lambda: answering.speedup, answering.clock) if answering else (lambda: None, None)
    progress = JobProgress(output.totals, rows, *of_engine, time.monotonic() - opened.began, plan.labels)
    metrics = spec.reporting.metrics
    write_metrics = functools.partial(progress.write_metrics, Path(metrics), events.notice) if metrics else lambda: None

    def note_run() -> None:
        """What the clock gives for this run, for the manifest."""
        progress.note_speedup()
        if opened.manifest and answering:
            points = {"speedup_over_time": progress.speedup_over_time} if progress.speedup_over_time else {}
            opened.manifest.runs[-1].update({**clocked(progress), **points, "used": answering.used()})

    def save() -> None:
        note_run()
        output.save()

    with output, events.running(progress):
        progress.every(POINT_SECONDS, progress.note_speedup)
        progress.every(SAVE_SECONDS, save)
        progress.every(METRICS_SECONDS, write_metrics)
        write_metrics()
        if answering and opened.first:
            in_order = options.in_order and not (spec.model.adapter_names and opened.files)  # else the journal sorts them
            asked = dataclasses.replace(options, in_order=in_order)
            answering.run(chain([opened.first], opened.others), asked, output.write, stop)
        write_metrics()
        stopped = events.stopped()
        note_run()
        if drafting.save_trie is not None and answering and (not stopped or isinstance(output, Stream)):
            source, resources = drafting.source_name or OUTPUTS, BuildResources(notice=events.notice)
            save_learned(output, drafting.save_trie, answering.identity, plan.model, resources, source)
            if drafting.history and Path(drafting.history).exists():
                from lookahead.trie.prune import drop_oldest

                drop_oldest(drafting.history, drafting.history_tokens, resources)
        if not stopped:
            output.finish(options.in_order)
    state: Any = "stopped" if stopped else "complete"
    used = answering.used() if answering else {}
    about: dict[str, Any] = {"resumable": opened.files is not None}
    if opened.files and before:
        disk_bytes = opened.files.size() + opened.files.manifest.stat().st_size
        about |= {"estimate": before.estimate(progress.run.rows).as_json(), "disk_bytes": disk_bytes}
    return JobReport.of(progress, state=state, model=plan.model, out=out, used=used, **about)


def _answering(
    plan: JobPlan, opened: _Opened, peers: Peers | None, events: JobEvents, stack: contextlib.ExitStack
) -> tuple[Answering | None, JobOptions]:
    """Who answers, and what rows ask for that set nothing of their own; None where nothing is left that needs a model."""
    from lookahead.job import engines
    from lookahead.trie.segment import check_same_tokenizer

    settings, options = plan.engine_settings(), plan.row_options()
    if opened.manifest:  # a job that is resumed answers as it began
        options = dataclasses.replace(options, began=began(opened.manifest.runs[0]))
    kept = plan.spec.drafting.save_trie and opened.files and opened.files.learned.exists()
    if opened.first is None and not kept:
        return None, options
    answering: Answering
    scale_out, explained = plan.spec.scale_out, plan.spec.reporting.explain
    if plan.spec.model.engine != "hf":
        answering = engines.in_engine(plan.spec.model.engine, plan.foreign_settings(), plan.tries, events)
        stack.callback(answering.close)
    elif scale_out.ray or (scale_out.workers or 1) > 1:
        answering = stack.enter_context(engines.workers(settings, options, scale_out.ray, scale_out.workers, events))
    else:
        first = opened.first.adapter if opened.first else None
        answering, options = engines.here(settings, options, peers, explained, events, first)
    for trie in opened.learned:
        check_same_tokenizer(trie, answering.identity, plan.model)
    return answering, options


def files_of(out: str | None, resume: bool, retry_errors: bool, overwrite: bool) -> JobFiles | None:
    """The files of a job that writes to `out`; None for stdout or a device. Raises UsageError for contradicting options."""
    if retry_errors and not resume:
        raise UsageError("--retry-errors goes with --resume.")
    if resume and overwrite:
        raise UsageError("--resume continues with what is there and --overwrite starts again: give one of them.")
    if resume and (out is None or (Path(out).exists() and not Path(out).is_file())):
        raise UsageError("--resume needs a file to continue with: name it with -o.")
    if out is None:
        return None
    files = JobFiles(followed(out))
    return files if files.out.is_file() or not files.out.exists() else None


def what_is_done(plan: JobPlan, files: JobFiles, names: Sequence[str]) -> Done:
    """Return what an earlier run has done. Raises LookaheadError if files do not belong together or rows have changed."""
    done = read_done(files)
    if done.requests and all(Path(name).is_file() for name in names):  # a pipe can be read once: as the rows are answered
        last = max(done.requests)
        answered = takewhile(lambda request: request.number <= last, read_requests(*names, fields=plan.fields))
        deque(left_to_do(answered, plan.shard, done.requests), 0)
    faults = done.faults if plan.spec.io.retry_errors else set[int]()
    left = {number: content for number, content in done.requests.items() if number not in faults}
    return dataclasses.replace(done, requests=left)


def requests_left(plan: JobPlan, names: Sequence[str], done: Done | None) -> tuple[Iterator[Request], int | None]:
    """(requests that are not answered, how many rows are looked at: None: all). A limit includes rows that are answered."""
    answered, limit = done.requests if done else {}, plan.spec.io.limit
    most = None if limit is None else max(limit, *(number + 1 for number in answered), 0)
    wanted = islice(read_requests(*names, fields=plan.fields), most)
    return left_to_do(without_duplicates(wanted), plan.shard, answered), most


class Stream:
    """Writes rows at once and without a way to resume, such as to stdout or a device. learn: keep the answers."""

    def __init__(self, file: IO[str], name: str, learn: bool = False):
        """file: open for text; one other than stdout is closed at the end."""
        self._file, self._name, self._learn = file, name, learn
        self.totals = JobTotals()
        self._learned: list[TokenDocument] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not sys.stdout:
            with contextlib.suppress(OSError):  # what could not be written was reported then
                self._file.close()

    def save(self) -> None: ...

    def finish(self, in_order: bool) -> None: ...

    def learned(self) -> list[TokenDocument]:
        return self._learned

    def forget_learned(self) -> None:
        self._learned = []

    def write(self, ended: FinishedRow) -> None:
        """Raises LookaheadError if it cannot be written, BrokenPipeError if the reader has gone."""
        try:
            self._file.write(json_text(ended.row, getattr(self._file, "encoding", None)) + "\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LookaheadError(f"{self._name}: write failed ({error.strerror}) after {self.totals.rows} rows.") from error
        self.totals.merge(ended.counts)
        if self._learn:
            self._learned += [TokenDocument(np.array([*before, *ids], np.int32), OUTPUTS) for before, ids in ended.emitted]


def save_learned(
    output: Journal | Stream,
    path: str,
    identity: TokenizerIdentity,
    model: str,
    resources: BuildResources | None = None,
    source: str = OUTPUTS,
) -> None:
    """Add the answers that `output` has kept to the trie at `path`, or make it. If that fails, the next run adds them."""
    from lookahead.trie.build import append_trie, build_trie

    def documents() -> Iterable[TokenDocument]:
        return (dataclasses.replace(document, source=source) for document in output.learned())

    if isinstance(output, Journal):
        output.forget_saved(functools.partial(copies_in, path))
    while next(iter(output.learned()), None) is not None:
        if isinstance(output, Journal):
            output.note_saving(copies_in(path, output.learned()))
        with contextlib.suppress(FileExistsError):  # made by another job meanwhile: then it is added to
            if Path(path).exists():
                append_trie(documents(), path, identity, resources)
            else:
                options = {"learned_from": model}
                build_trie(documents(), path, identity, 1, options, resources, new=True)
            break
    output.forget_learned()


def copies_in(path: str, documents: Iterable[TokenDocument]) -> int:
    """Return how many segments of a trie end in these documents; 0 if there is no trie."""
    if not Path(path).exists():
        return 0
    trie = Trie(path)
    length, digest = _digest(np.append(each.token_ids, trie.header.separator) for each in documents if len(each.token_ids))
    ends = [segment.tokens[-length:] for segment in trie.segments if 0 < length <= len(segment.tokens)]
    return sum(_digest(np.array_split(end, 1 + length // CHUNK)) == (length, digest) for end in ends)


def _digest(texts: Iterable[np.ndarray]) -> tuple[int, bytes]:
    """(length, digest) of token ids, text after text: not all are in memory at once."""
    length, digest = 0, hashlib.blake2b()
    for text in texts:
        length += len(text)
        digest.update(text.astype(np.uint32).tobytes())
    return length, digest.digest()
