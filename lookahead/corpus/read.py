"""Corpus files to token documents. In: paths and a tokenizer. Out: TokenDocument, in input order; knows file and line.

Formats by suffix: .jsonl, .json, .csv, .tsv, .txt, .md, .html (each also .gz or .zst), .parquet; "-" is JSON lines on stdin. A
text file is one document, or one for each paragraph; a very large one is cut at line ends. A row that answers a prompt keeps
its last LEFT_CONTEXT tokens, so that the first tokens of the answer can be drafted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import glob
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from lookahead.corpus.answers import Failed, Row, documents_of, fields_read
from lookahead.corpus.tables import TABLES, TEXTS, json_file_rows, pieces_of, row_of, table_rows, unmarked, without_mark
from lookahead.errors import CorpusError, first_line
from lookahead.extras import require
from lookahead.files.outputs import LINES, kind_of
from lookahead.token_documents import LEFT_CONTEXT, TokenDocument
from lookahead.tokenizer import chat_text, without_limits

TEXT_PIECE = 1 << 20  # characters
PROMPT_TAIL = 512  # characters of a prompt that are tokenized for its last LEFT_CONTEXT tokens
BATCH = 512  # rows tokenized at a time
ANY_TIME = datetime.datetime(2000, 1, 1)  # that chat templates write: a corpus makes the same trie whenever it is built
SUFFIXES = (*LINES, ".json", *TABLES, *TEXTS, ".parquet")


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A file, or of one in JSON lines the lines from byte `begin` to `end`, before which `lines` others stand."""

    name: str
    begin: int = 0
    end: int | None = None  # None: to the end of the file
    lines: int = 0


@dataclasses.dataclass
class CorpusReport:
    """What was read. problems: the first ten. bytes: of the files, packed or not. requests: rows whose prompts were taken."""

    rows: int = 0
    bad: int = 0
    failed: int = 0
    requests: int = 0
    bytes: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, problem: str, strict: bool) -> None:
        if strict:
            raise CorpusError(problem)
        self.bad += 1
        if len(self.problems) < 10:
            self.problems.append(problem)

    def add_all(self, other: CorpusReport) -> None:
        for name in ("rows", "bad", "failed", "requests", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems[: 10 - len(self.problems)]


def expand(patterns: Sequence[str]) -> list[str]:
    """`named_files` of a corpus, folders with all their files. Raises CorpusError, also for a kind of file that none is."""
    names = named_files([name for pattern in patterns for name in files_in(pattern)])
    for name in names:
        if Path(name).is_file() and kind_of(name) not in SUFFIXES:  # a pipe is JSON lines, as stdin
            raise CorpusError(f"{name}: unknown kind of file. Use {' '.join(SUFFIXES)} (also .gz, .zst).")
    return names


def files_in(pattern: str) -> list[str]:
    """All files of known kinds in a folder and below, but hidden ones; anything else itself. Raises CorpusError for none."""
    if pattern == "-" or not Path(pattern).is_dir():
        return [pattern]
    below = (path.relative_to(pattern) for path in Path(pattern).rglob("*"))
    found = [path for path in below if kind_of(path.name) in SUFFIXES and not any(part.startswith(".") for part in path.parts)]
    names = [str(Path(pattern) / path) for path in sorted(found) if (Path(pattern) / path).is_file()]
    if not names:
        raise CorpusError(f"{pattern}: no files in this folder that can be read ({' '.join(SUFFIXES)}, also .gz, .zst).")
    return names


def folder_sources(patterns: Sequence[str]) -> dict[str, str]:
    """File name -> folder name, for the files of folders: they are one source."""
    folders = [pattern for pattern in patterns if pattern != "-" and Path(pattern).is_dir()]
    return {name: Path(folder).resolve().name for folder in folders for name in files_in(folder)}


def named_files(patterns: Sequence[str]) -> list[str]:
    """File names of paths and globs, in order, each once. Raises CorpusError for a pattern that names no file."""
    names: list[str] = []
    for pattern in patterns:
        found = [pattern] if pattern == "-" or Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise CorpusError(f"{pattern}: no such file.")
        names += found
    for name in names:
        if name != "-" and Path(name).is_dir():
            raise CorpusError(f"{name}: is a folder. Name files, or a glob such as '{name}/*.jsonl'.")
    return list(dict.fromkeys(names))


def size_of(names: Sequence[str]) -> int | None:
    return None if "-" in names else sum(Path(name).stat().st_size for name in names)


def shares_of(names: Sequence[str], size: int) -> list[list[FilePart]]:
    """The files, in order, in shares of about `size` bytes. JSON lines that are not packed are cut where need be."""
    shares: list[list[FilePart]] = [[]]
    held = 0
    for name in names:
        for part, length in _parts_of(name, size):
            if held and held + length // 2 > size:
                shares.append([])
                held = 0
            shares[-1].append(part)
            held += length
    return shares


def _parts_of(name: str, size: int) -> Iterator[tuple[FilePart, int]]:
    """Parts of a file of at most about `size` bytes, and the bytes of each."""
    length = Path(name).stat().st_size
    if length <= size or Path(name).suffix.lower() not in LINES:
        yield FilePart(name), length
        return
    pieces = -(-length // size)
    with open(name, "rb") as file:
        begin = lines = 0
        for piece in range(1, pieces + 1):
            end, passed = begin, 0
            while end < length * piece // pieces:
                block = file.read(min(TEXT_PIECE, length * piece // pieces - end))
                end, passed = end + len(block), passed + block.count(b"\n")
            rest = file.readline() if end > begin else b""
            end, passed = end + len(rest), passed + rest.endswith(b"\n")
            if end > begin:
                yield FilePart(name, begin, end, lines), end - begin
            begin, lines = end, lines + passed


def read_documents(
    names: Sequence[str | FilePart],
    tokenizer: Any | None,
    report: CorpusReport,
    text_field: str | None = None,
    source: str | None = None,
    strict: bool = False,
    vocab_size: int | None = None,
    workers: int = 1,
    split: str = "file",
    sources: Mapping[str, str] | None = None,
) -> Iterator[TokenDocument]:
    """Token documents of all files, in order. source, sources: not its name. Raises CorpusError for bad rows if `strict`."""
    without_limits(tokenizer)  # before threads share it
    parts = [FilePart(name) if isinstance(name, str) else name for name in names]
    reading = vocab_size or 1 << 31, tokenizer is not None, split, len(parts) > 1
    usual = {part.name: "stdin" if part.name == "-" else Path(part.name).name for part in parts} | dict(sources or {})
    rows = itertools.chain.from_iterable(
        _rows_of(part, source or usual[part.name], text_field, report, strict, *reading) for part in parts
    )
    batches = iter(lambda: list(itertools.islice(rows, BATCH)), [])
    pending: collections.deque[Future[list[TokenDocument]]] = collections.deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for batch in batches:
                if all(row.ids is not None for row in batch):
                    while pending:
                        yield from pending.popleft().result()
                    yield from _tokenized(batch, None)
                    continue
                if tokenizer is None:
                    raise CorpusError("the corpus holds text: name its tokenizer with --tokenizer MODEL_OR_FOLDER.")
                pending.append(pool.submit(_tokenized, batch, tokenizer))
                if len(pending) > workers:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _tokenized(batch: Sequence[Row], tokenizer: Any | None) -> list[TokenDocument]:
    """The documents of some rows. Tokenizers of the `tokenizers` library let other threads run meanwhile."""
    texts = [row for row in batch if row.ids is None]
    encoded = iter(_encode(tokenizer, [row.text for row in texts]))
    prompts = iter(_encode(tokenizer, [_prompt_text(row.prompt, tokenizer)[-PROMPT_TAIL:] for row in texts]))
    eos = getattr(tokenizer, "eos_token_id", None)
    documents = []
    for row in batch:
        ids: np.ndarray | list[int]
        if row.ids is None:
            ids, left = next(encoded), next(prompts)[-LEFT_CONTEXT:]
            if row.ends and eos is not None and (not ids or ids[-1] != eos):
                ids = [*ids, eos]
            ids = np.array([*left, *ids], np.int64)
        elif isinstance(row.prompt, np.ndarray):
            ids = np.concatenate([row.prompt[-LEFT_CONTEXT:], row.ids])
        else:
            ids = row.ids
        documents.append(TokenDocument(ids, row.source))
    return documents


def first_documents(path: str, tokenizer: Any | None, vocab_size: int | None, most: int) -> list[list[int]]:
    """Ids of the first documents of two tokens or more of a corpus file. Raises CorpusError if there is none."""
    report = CorpusReport()
    documents = read_documents(expand([path]), tokenizer, report, vocab_size=vocab_size)
    found = list(itertools.islice((ids for each in documents if len(ids := list(map(int, each.token_ids))) > 1), most))
    if not found:
        raise CorpusError(report.problems[0] if report.problems else f"{path}: no usable document.")
    return found


@contextlib.contextmanager
def open_text(name: str, report: CorpusReport | None = None) -> Iterator[IO[bytes]]:
    """Bytes of a file, uncompressed; "-" is stdin. `report` counts the file's own. Raises CorpusError if it cannot be read."""
    try:
        if name == "-":
            yield sys.stdin.buffer
            return
        with io.BufferedReader(_CountedFile(name, report or CorpusReport()), 1 << 18) as file:
            if name.lower().endswith(".gz"):
                with gzip.open(file, "rb") as unpacked:
                    yield cast(IO[bytes], unpacked)
            elif name.lower().endswith(".zst"):
                require("pyarrow", name)
                import pyarrow

                # pyarrow reads on across frames and reports when a file was cut short; zstandard's reader does neither.
                with pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd") as packed:
                    yield io.BufferedReader(packed)
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error}).") from error


class _CountedFile(io.FileIO):
    def __init__(self, name: str, report: CorpusReport):
        super().__init__(name)
        self._report = report

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._report.bytes += count
        return count


def json_rows(file: str | FilePart, report: CorpusReport | None = None) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number from 1, row or what is wrong) of JSON lines, CSV or a JSON array. Raises CorpusError if it cannot be read."""
    part = FilePart(file) if isinstance(file, str) else file
    kind = "" if part.name == "-" else kind_of(part.name)
    with open_text(part.name, report) as lines:
        found = table_rows(lines, part.name, TABLES[kind]) if kind in TABLES else None
        if kind == ".json":
            found, lines = json_file_rows(lines, part.name)
        if found is not None:
            yield from found
            return
        if part.begin:
            lines.seek(part.begin)
        left = part.end - part.begin if part.end is not None else 1 << 62
        for number, line in enumerate(lines, part.lines + 1):
            left -= len(line)
            row = without_mark(line, part.name) if number == 1 else line
            if row.strip():
                yield number, row_of(row)
            if left <= 0:
                return


def _rows_of(
    part: FilePart,
    source: str,
    text_field: str | None,
    report: CorpusReport,
    strict: bool,
    vocab_size: int,
    tokenized: bool = True,
    split: str = "file",
    one_of_many: bool = False,
) -> Iterator[Row]:
    """tokenized: text is. one_of_many: a text file that cannot be used is left out and counted; else it raises CorpusError."""
    name = part.name
    kind = kind_of(name)
    if kind in TEXTS:
        try:
            yield from _texts(name, kind, split, source, report)
        except _NotTextError as error:
            if not one_of_many:
                raise
            report.add(str(error), strict)
        return
    before = report.rows + report.bad + report.failed
    is_parquet = kind == ".parquet"
    for number, row in parquet_rows(name, report, fields_read(text_field)) if is_parquet else json_rows(part, report):
        where = f"{name}:{number}"
        if isinstance(row, str):
            report.add(f"{where}: {row}.", strict)
            continue
        try:
            found, problem = documents_of(row, source, text_field, vocab_size, tokenized)
        except Failed:
            report.failed += 1
            continue
        if problem:
            report.add(f"{where}: {problem}", strict)
            continue
        report.rows += 1
        report.requests += found[0].is_prompt
        yield from found
    if report.rows + report.bad + report.failed == before and part == FilePart(name):
        report.add(f"{name}: no rows in this file.", strict)


def parquet_rows(
    name: str, report: CorpusReport, columns: Collection[str] | None = None
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(number from 1, row or what is wrong) of a Parquet file. columns: None: all. Raises CorpusError if it cannot be read."""
    require("pyarrow", name)
    import pyarrow
    import pyarrow.parquet

    try:
        with open(name, "rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:  # names may be no UTF-8
            numbers, names = itertools.count(1), file.schema_arrow.names
            before, size, rows = report.bytes, Path(name).stat().st_size, 0
            for batch in file.iter_batches(1024, columns=[each for each in names if columns is None or each in columns]):
                rows += len(batch)
                report.bytes = before + size * rows // file.metadata.num_rows
                try:
                    found = batch.to_pylist()
                except Exception:  # pyarrow raises many kinds
                    found = [_parquet_row(batch.slice(row, 1)) for row in range(len(batch))]
                for row in found:
                    yield next(numbers), row if isinstance(row, str) else {**dict.fromkeys(names), **row}
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(f"{name}: not a readable Parquet file ({str(error).splitlines()[0]}).") from error


def _parquet_row(batch: Any) -> dict[str, Any] | str:
    """The one row of an Arrow batch, or what is wrong with it. Nanoseconds are text."""
    row = {}
    for column, values in zip(batch.schema.names, batch.columns, strict=True):
        try:
            try:
                row[column] = values.to_pylist()[0]
            except UnicodeDecodeError:
                return f'"{column}" is not UTF-8 text'
            except ValueError:
                row[column] = values.cast("string").to_pylist()[0]
        except Exception as error:
            return f'"{column}" holds a {values.type} that cannot be read ({first_line(error)})'
    return row


class _NotTextError(CorpusError):
    """A text file without text."""


def _texts(name: str, kind: str, split: str, source: str, report: CorpusReport) -> Iterator[Row]:
    """Documents of a text file. Raises CorpusError for one that is empty, or no text."""
    documents = 0
    with open_text(name, report) as raw:
        try:
            text = io.TextIOWrapper(unmarked(raw, name), encoding="utf-8")
            for piece in pieces_of(text, kind, split):
                documents += 1
                if "\0" in piece:
                    raise _NotTextError(f"{name}: binary file, not text.")
                report.rows += 1
                yield Row(source, text=piece, ends=False)
            text.detach()
        except UnicodeDecodeError as error:
            raise _NotTextError(f"{name}: not UTF-8 text (byte {error.start}).") from error
    if not documents:
        raise _NotTextError(f"{name}: empty file.")


def _prompt_text(prompt: Any, tokenizer: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    with contextlib.suppress(Exception):  # templates refuse some orders of roles; then the answer stands without left context
        if prompt and getattr(tokenizer, "chat_template", None):
            return chat_text(tokenizer, prompt, ANY_TIME)
    return ""


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    if getattr(tokenizer, "is_fast", False):
        return [e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return list(tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])
