"""A trie file, open and mapped. In: a path. Out: its header and the arrays of its segments. Nothing is looked up in them."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from lookahead.errors import TrieFormatError
from lookahead.files.atomic import reason
from lookahead.trie import format
from lookahead.trie.suffixes import first_table


class Segment:
    """One sorted part of a trie file: its arrays, named as the sections in format.py. Counts `first` if it is not stored."""

    def __init__(self, header: format.SegmentHeader, mapped: mmap.mmap, vocab_size: int):
        self.header = header
        arrays = {section.name: format.section_array(mapped, section) for section in header.sections}
        self.tokens = arrays["tokens"]
        self.suffixes = arrays["suffixes"]
        self.first = arrays["first"]
        if not len(self.first):  # positions may lie
            starts = self.tokens.take(self.suffixes.astype(np.int64), mode="clip").astype(np.int64)
            self.first = first_table(starts[starts < vocab_size], vocab_size)
        self.samples = arrays["samples"]
        self.document_ends = arrays["document_ends"]
        self.document_sources = arrays["document_sources"]

    def section(self, name: str) -> format.Section:
        """Return where the array of this name stands in the file."""
        return next(section for section in self.header.sections if section.name == name)


class MappedTrie:
    """Read-only, memory-mapped; any number of processes and threads may share one file.

    A file that is replaced meanwhile stays readable here as it was when it was opened.
    """

    def __init__(self, path: str | Path):
        """Open and check the header. Raises TrieFormatError for a file that is cut, altered or of another version."""
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.header = format.read_header(self.path, file)
                self.mapped = format.map_file(self.path, file, self.header)
                if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a look-up touches single pages, far apart
                    self.mapped.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            raise TrieFormatError(f"{self.path}: cannot be read ({reason(error)}).") from error
        self.segments = tuple(Segment(segment, self.mapped, self.header.vocab_size) for segment in self.header.segments)
        self.source_weights = np.array([s.weight for s in self.header.sources], np.float32)
        self.weighted = bool((self.source_weights != 1).any())

    @property
    def name(self) -> str:
        """Short name that reports use."""
        return self.path.stem

    def damaged(self, what: str, section: format.Section | None = None, entry: int = 0) -> TrieFormatError:
        """The error for a file whose parts contradict each other; where: at an entry of a section."""
        where = f"section {section.name} at byte {section.byte(entry)}: " if section else ""
        return TrieFormatError(f"{self.path}: {where}{what}. Rebuild.")
