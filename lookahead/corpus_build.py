"""A trie of corpora. In: names of files, and what of their rows is text. Out: one trie file, and what was read and left out.

A corpus file can also be given instead of a trie: `open_trie` keeps the trie that it builds in the user's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.corpus.options import BuildSpec
from lookahead.corpus.read import SUFFIXES, CorpusReport, expand, folder_sources, read_documents, size_of
from lookahead.errors import CorpusError, LookaheadError, TrieFormatError, UsageError
from lookahead.files.atomic import reason
from lookahead.files.folders import cache_folder
from lookahead.files.hub import tokenizer_of_trie
from lookahead.files.outputs import TRIE, kind_of
from lookahead.token_documents import TokenizerIdentity
from lookahead.trie import format
from lookahead.trie.build import append_trie, build_trie
from lookahead.trie.file import Trie
from lookahead.trie.format import TrieHeader
from lookahead.trie.segment import BuildResources
from lookahead.version import __version__

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BuiltTrie:
    """path, header: of the trie. added: tokens that it did not hold before. size: bytes. report: of the rows."""

    path: str
    header: TrieHeader
    added: int
    size: int
    seconds: float
    report: CorpusReport

    def as_json(self) -> dict[str, Any]:
        """The object that `build-trie --json` prints."""
        header, report = self.header, self.report
        return {
            "trie": self.path,
            "rows": report.rows,
            "bad_rows": report.bad,
            "failed_rows": report.failed,
            "request_rows": report.requests,
            "documents": header.documents,
            "tokens": header.tokens,
            "added_tokens": self.added,
            "segments": len(header.segments),
            "vocab_size": header.vocab_size,
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "content_hash": header.content_hash,
            "sources": [{"name": s.name, "documents": s.documents, "tokens": s.tokens} for s in header.sources],
        }


class CorpusBuild:
    """A build whose options and files are right. names: the files that are read; size: their bytes, None if unknown.

    threads: 0: one per core. ray: address of a cluster. report: of the rows read so far. Raises UsageError for options that do
    not go together, LookaheadError for files that cannot be read.
    """

    def __init__(self, spec: BuildSpec, threads: int = 0, ray: str | None = None):
        if (spec.out is None) == (spec.append is None):
            raise UsageError("give either -o OUT.trie (a new trie) or --append F.trie (an existing one).")
        if spec.append is not None and ray:
            raise UsageError("--ray does not go with --append: build a trie of its own, then lookahead merge-tries.")
        if spec.append is not None and spec.min_count > 1:
            raise UsageError("--min-count does not go with --append: append first, then lookahead prune-trie --min-count N.")
        self._threads, self._ray = threads, ray
        self.before = Trie(spec.append) if spec.append is not None else None
        self.spec = spec
        if self.before is not None and spec.tokenizer is None and spec.vocab_size is None:  # those of the trie
            name, size = self.before.header.tokenizer_name, self.before.header.vocab_size
            known = {"tokenizer": tokenizer_of_trie(self.before.path, name)} if name else {"vocab_size": size}
            self.spec = dataclasses.replace(spec, **known)
        if (self.spec.tokenizer is None) == (self.spec.vocab_size is None):
            raise UsageError("give either --tokenizer NAME_OR_DIR (text) or --vocab-size N (rows of ids).")
        if spec.split not in ("file", "paragraphs"):
            raise UsageError(f"--split {spec.split}: choose file or paragraphs.")
        self.path = spec.out or spec.append or ""
        self.names = expand(spec.corpus)
        self.report = CorpusReport()

    @property
    def size(self) -> int | None:
        return size_of(self.names)

    def run(self, resources: BuildResources) -> BuiltTrie:
        """Read, tokenize, sort and write. Raises CorpusError for a corpus without a row that can be used."""
        report = self.report
        if self._ray and "-" in self.names:
            raise UsageError("--ray reads files, which every node opens itself, and no stdin.")
        if self._threads:
            os.environ["RAYON_NUM_THREADS"] = str(self._threads)  # of the tokenizers library
        began = time.perf_counter()
        with _naming_rows(report):
            header = self._built(resources)
        added = header.tokens - (self.before.header.tokens if self.before is not None else 0)
        return BuiltTrie(self.path, header, added, Path(self.path).stat().st_size, time.perf_counter() - began, report)

    def _built(self, resources: BuildResources) -> TrieHeader:
        spec = self.spec
        loaded, whose = None, TokenizerIdentity(spec.vocab_size or 0)
        if spec.tokenizer is not None:
            from lookahead.tokenizer import identity, load_tokenizer

            loaded = load_tokenizer(spec.tokenizer)
            whose = identity(loaded, spec.tokenizer)
        options = {"text_field": spec.text_field or "auto", **({"split": spec.split} if spec.split != "file" else {})}
        if self._ray:
            from lookahead.cluster.build import build_with_ray

            cores = self._threads or 1
            return build_with_ray(self._ray, self.names, self.path, spec, whose, self.report, options, resources, cores)
        of_folders, read, size = folder_sources(spec.corpus), spec.reading, whose.vocab_size
        documents = read_documents(self.names, loaded, self.report, *read, size, resources.workers, spec.split, of_folders)
        if spec.append is not None:
            return append_trie(documents, spec.append, whose, resources, verify=spec.verify)
        return build_trie(documents, self.path, whose, spec.min_count, options, resources)


@contextlib.contextmanager
def _naming_rows(report: CorpusReport) -> Iterator[None]:
    """Name the first unusable row where a build fails because of such rows."""
    try:
        yield
    except CorpusError as error:
        if report.problems:
            raise CorpusError(f"{report.problems[0]} ({report.bad} bad rows; {error})") from error
        raise


def open_trie(path: str | Path, tokenizer: Callable[[], tuple[Any | None, str]]) -> Trie:
    """The trie at `path`; of a corpus file its trie, built and kept in the user's cache by the file's bytes and the tokenizer.

    tokenizer: loads (the tokenizer or None, its name); called for a corpus file only. Without one the corpus has to be ids.
    Raises LookaheadError for a trie that cannot be used, and for a corpus without a row that can be.
    """
    name, stem = str(path), Path(path).name.split(".")[0] or "corpus"
    if kind_of(name) not in SUFFIXES or not Path(path).is_file() or TRIE.matches(Path(path)):
        return Trie(path)
    loaded, whose = _whose(name, *tokenizer())
    digest = hashlib.sha256(f"{whose.fingerprint} {whose.vocab_size} {__version__} {format.VERSIONS} ".encode())
    with open(name, "rb") as file:
        while chunk := file.read(format.CHUNK):
            digest.update(chunk)
    folder = (cache_folder("tries") or Path(path).parent) / digest.hexdigest()[:16]
    kept = folder / f"{stem}.trie"
    with contextlib.suppress(TrieFormatError):
        return Trie(kept)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LookaheadError(
            f"{name}: its trie cannot be kept in {folder} ({reason(error)}). Set LOOKAHEAD_CACHE to a folder, or build it: "
            "lookahead build-trie"
        ) from error
    log.info("building the trie of %s: %s", name, kept)
    report = CorpusReport()
    with _naming_rows(report):
        build_trie(read_documents([name], loaded, report, vocab_size=whose.vocab_size), kept, whose)
    if report.bad:
        log.warning("%s: %d rows were left out of its trie; the first: %s", name, report.bad, report.problems[0])
    return Trie(kept)


def _whose(path: str, tokenizer: Any | None, name: str) -> tuple[Any | None, TokenizerIdentity]:
    """(the tokenizer, what its ids are); without one the vocabulary is that of the ids in the corpus."""
    if tokenizer is not None:
        from lookahead.tokenizer import identity

        return tokenizer, identity(tokenizer, name)
    largest = max((int(np.max(d.token_ids)) for d in read_documents([path], None, CorpusReport())), default=0)
    return None, TokenizerIdentity(largest + 1)
