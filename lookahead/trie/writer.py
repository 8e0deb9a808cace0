"""Writing a trie file. In: arrays, section by section, and a header. Out: the bytes of format.py, streamed."""

from __future__ import annotations

import dataclasses
import mmap
import os
import time
import zlib
from collections.abc import Sequence
from typing import IO

import numpy as np

from lookahead.errors import TrieFormatError, UsageError
from lookahead.files.atomic import uninterrupted, write_pieces
from lookahead.trie.format import (
    ALIGNMENT,
    CHUNK,
    MAGIC,
    MAX_HEADER_BYTES,
    MAX_TIME,
    PREAMBLE,
    Section,
    SegmentHeader,
    TrieHeader,
    content_hash,
    packed_header,
    smallest_dtype,
)


class TrieWriter:
    """Streams the sections of one trie file after the other into `file`, which is seekable, readable and empty.

    begin("tokens") -> append(array) ... -> begin("suffixes") -> ... -> end_segment(tokens, documents) -> finish(header)
    Until `finish` has written the first bytes, the file is not a trie to any reader.
    """

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.segments: list[SegmentHeader] = []
        self._sections: list[Section] = []
        self._open: Section | None = None
        self._offset = file.write(bytes(PREAMBLE.size))
        self._created = _creation_time()

    def keep(self, mapped: mmap.mmap, segments: Sequence[SegmentHeader]) -> None:
        """Copy the first segments of another trie file, bytes and checksums as they are. Only at the start."""
        end = max(s.end for segment in segments for s in segment.sections)
        with memoryview(mapped) as whole:
            while self._offset < end:
                self._offset += write_pieces(self.file, whole[self._offset : min(end, self._offset + CHUNK)])
        self.segments += segments

    def begin(self, name: str, dtype: np.dtype) -> None:
        """Start a section, in the order of SECTION_DTYPES."""
        self._end_section()
        padding = -self._offset % ALIGNMENT
        self._offset += self.file.write(bytes(padding))
        self._open = Section(name, dtype.str, self._offset, 0, 0)

    def append(self, array: np.ndarray) -> None:
        """Add to the section that was begun. Values must fit its dtype."""
        assert self._open is not None
        data = np.ascontiguousarray(array, self._open.dtype)
        self._open = dataclasses.replace(
            self._open, entries=self._open.entries + len(data), crc=zlib.crc32(_bytes(data), self._open.crc)
        )
        self._offset += write_pieces(self.file, _bytes(data))

    def write(self, name: str, array: np.ndarray, largest: int) -> None:
        """A whole section of unsigned numbers up to `largest`."""
        self.begin(name, smallest_dtype(name, largest))
        self.append(array)

    def written_tokens(self) -> tuple[mmap.mmap, np.ndarray]:
        """The tokens section that was begun, mapped read-only as far as it is written."""
        assert self._open is not None
        self.file.flush()
        mapped = uninterrupted(lambda: mmap.mmap(self.file.fileno(), self._offset, access=mmap.ACCESS_READ))
        return mapped, np.frombuffer(mapped, self._open.dtype, self._open.entries, self._open.offset)

    def end_segment(self, tokens: int, documents: int) -> None:
        """Close a segment, all of whose sections are written."""
        self._end_section()
        self.segments.append(SegmentHeader(tokens, documents, tuple(self._sections)))
        self._sections = []

    def finish(self, header: TrieHeader) -> TrieHeader:
        """Write the header, then the first bytes. Returns the header as written, with sections, hash and time."""
        header = dataclasses.replace(header, segments=tuple(self.segments), created=self._created)
        header = dataclasses.replace(header, content_hash=content_hash(header))
        packed = packed_header(header)
        if len(packed) > MAX_HEADER_BYTES:
            raise TrieFormatError(f"the header takes {len(packed)} bytes: too many sources. Give them one name with --source.")
        self.file.write(packed)
        self.file.seek(0)
        size = self._offset + len(packed)
        self.file.write(PREAMBLE.pack(MAGIC, header.version, len(packed), size, zlib.crc32(packed), 0))
        self.file.flush()
        return header

    def _end_section(self) -> None:
        if self._open is not None:
            self._sections.append(self._open)
            self._open = None


def _creation_time() -> float:
    """Now, or what SOURCE_DATE_EPOCH gives (see reproducible-builds.org), so that equal builds are equal bytes."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if not given:
        return time.time()
    if not given.isdecimal() or int(given) >= MAX_TIME:
        raise UsageError(f"SOURCE_DATE_EPOCH={given}: give seconds since 1970, or unset it.")
    return float(given)


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
