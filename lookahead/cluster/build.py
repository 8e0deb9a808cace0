"""Corpora to a trie file by the machines of a Ray cluster. In: file names. Out: one file, as `trie.build.build_trie` writes it.

The corpus is cut into shares of about equal size, in order; a task makes a trie of each, and these are merged here. Every node
must be able to open the corpus files under their names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.cluster.connect import connected
from lookahead.corpus.options import BuildSpec
from lookahead.corpus.read import CorpusReport, FilePart, folder_sources, read_documents, shares_of
from lookahead.errors import CorpusError, LookaheadError, first_line
from lookahead.files.atomic import scratch_sibling, write_pieces
from lookahead.token_documents import TokenizerIdentity
from lookahead.tokenizer import load_tokenizer
from lookahead.trie import format
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from lookahead.trie.merge import merge_into, merge_tries
from lookahead.trie.prune import prune_trie
from lookahead.trie.segment import BuildResources

SMALLEST_SHARE = 4 << 20  # bytes of a corpus that are worth a task


def build_with_ray(
    address: str,
    names: Sequence[str],
    out: str | Path,
    spec: BuildSpec,
    whose: TokenizerIdentity,
    report: CorpusReport,
    options: dict[str, Any] | None = None,
    resources: BuildResources | None = None,
    cores: int = 1,
) -> format.TrieHeader:
    """Write the trie of these files to `out`, atomically. Returns the header written.

    address: see `connect.connected`. spec: how rows are read. resources: of the merge, and its memory of each task. cores: of a
    task. Rows that cannot be used go to `report`. Raises what `build_trie` raises, and LookaheadError if there is no cluster.
    """
    resources = resources or BuildResources()
    names = [os.path.abspath(name) for name in names]  # tasks run in folders of their own
    sources = {os.path.abspath(name): source for name, source in folder_sources(spec.corpus).items()}
    if spec.tokenizer and os.path.exists(spec.tokenizer):
        spec = dataclasses.replace(spec, tokenizer=os.path.abspath(spec.tokenizer))
    described = {"min_count": spec.min_count, **(options or {})}
    with connected(address) as ray, contextlib.ExitStack() as stack:
        tasks = max(1, int(ray.cluster_resources().get("CPU", 1)) // cores)
        shares = shares_of(names, max(SMALLEST_SHARE, sum(Path(name).stat().st_size for name in names) // tasks))
        limits = BuildResources(resources.max_memory, cores)
        build_share = ray.remote(_build_share).options(num_cpus=cores)
        calls = [build_share.remote(share, spec, whose, sources, limits) for share in shares]
        tries = []
        for number, call in enumerate(calls):
            try:
                data, found, problem = ray.get(call)
            except ray.exceptions.RayError as error:  # Ray has tried again already
                raise LookaheadError(f"--ray: a task was lost ({first_line(error)}). Run it again.") from error
            calls[number] = None  # the object store need not keep it
            report.add_all(found)
            if problem:
                raise problem
            if data is not None:
                file = stack.enter_context(scratch_sibling(out))
                write_pieces(file, memoryview(data))
                file.flush()
                tries.append(file.name)
            resources.progress("building shares", number + 1, len(shares))
        if not tries:
            raise CorpusError("no document with text in the corpus: nothing to build.")
        if spec.min_count == 1:
            return merge_tries(tries, out, resources=resources, options=described)
        whole = stack.enter_context(scratch_sibling(out))
        merge_into(whole, [Trie(name) for name in tries], Path(out).parent, resources, described)
        return prune_trie(whole.name, out, spec.min_count, options=described, resources=resources)


def _build_share(
    share: Sequence[FilePart], spec: BuildSpec, whose: TokenizerIdentity, sources: Mapping[str, str], resources: BuildResources
) -> tuple[np.ndarray | None, CorpusReport, LookaheadError | None]:
    """(bytes of the share's trie, None without documents; what was read; what is wrong). Runs on any node."""
    report = CorpusReport()
    try:
        tokenizer = load_tokenizer(spec.tokenizer) if spec.tokenizer else None
        documents = read_documents(
            share, tokenizer, report, *spec.reading, whose.vocab_size, resources.workers, spec.split, sources
        )
        first = next(documents, None)
        if first is None:
            return None, report, None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "share.trie"
            build_trie(itertools.chain([first], documents), path, whose, resources=resources)
            return np.fromfile(path, np.uint8), report, None
    except LookaheadError as error:
        return None, report, error
