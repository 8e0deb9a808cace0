"""Bytes of a trie file. In: arrays and a header. Out: one file, and back. Knows nothing of tokens' meaning.

    offset  bytes  what
    0       8      magic  89 4C 4B 54 0D 0A 1A 0A   ("\\x89LKT\\r\\n\\x1a\\n": a text-mode copy breaks it visibly)
    8       4      format version, uint32           (all numbers little-endian)
    12      4      length of the header, uint32
    16      8      length of the whole file, uint64
    24      4      CRC-32 of the header, uint32
    28      4      zero
    32      ...    header, msgpack map (TrieHeader)
    ...            sections, each at a multiple of 64 bytes, zero between them

    section           dtype            entries        what
    tokens            uint16 | uint32  tokens         documents one after the other, each closed by the separator
                                                      (= vocab_size, no real token has this id)
    suffixes          uint32 | uint64  suffixes       positions in `tokens`, sorted by the text that starts there
    first             uint32 | uint64  vocab_size+1   suffixes[first[t]:first[t+1]] start with token t
    document_ends     uint32 | uint64  documents      position of each document's separator
    document_sources  uint16           documents      index into the header's sources

The header names dtype, offset, entries and CRC-32 of every section. Opening checks magic, version, both lengths, the
header's checksum and that each section lies inside the file; `check_sections` reads every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import struct
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from lookahead.atomic import replacing
from lookahead.errors import TrieFormatError

MAGIC = b"\x89LKT\r\n\x1a\n"
VERSION = 1
ALIGNMENT = 64
PREAMBLE = struct.Struct("<8sIIQII")
MAX_HEADER_BYTES = 1 << 24

SECTION_DTYPES = {
    "tokens": ("<u2", "<u4"),
    "suffixes": ("<u4", "<u8"),
    "first": ("<u4", "<u8"),
    "document_ends": ("<u4", "<u8"),
    "document_sources": ("<u2",),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where documents came from: a corpus file, or a name given with --source."""

    name: str
    documents: int
    tokens: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Section:
    """One array in the file. offset in bytes from the start of the file, crc over the array's bytes."""

    name: str
    dtype: str
    offset: int
    entries: int
    crc: int

    @property
    def end(self) -> int:
        return self.offset + self.entries * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class TrieHeader:
    """What a trie file says of itself. `tokens` counts corpus tokens without separators."""

    vocab_size: int
    tokenizer_fingerprint: str  # "" when the corpus came as token ids
    tokenizer_name: str
    tokens: int
    documents: int
    depth: int  # suffixes are sorted by this many tokens
    sources: tuple[Source, ...]
    options: Mapping[str, Any]  # how it was built
    tool_version: str
    sections: tuple[Section, ...] = ()
    content_hash: str = ""  # over everything but `created`
    created: float = 0.0  # seconds since 1970

    @property
    def separator(self) -> int:
        return self.vocab_size


def smallest_dtype(name: str, largest: int) -> np.dtype:
    """The narrowest dtype that section `name` may have and that holds `largest`."""
    for code in SECTION_DTYPES[name]:
        if largest <= np.iinfo(code).max:
            return np.dtype(code)
    raise TrieFormatError(f"section {name}: {largest} does not fit.")


def write(path: str | Path, header: TrieHeader, arrays: Mapping[str, np.ndarray]) -> TrieHeader:
    """Write a trie file, atomically. Returns the header as written, with sections, hash and time."""
    sections, offset = [], 0
    for name in SECTION_DTYPES:  # offsets are counted from the first section until the header's length is known
        array = arrays[name]
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        sections.append(Section(name, array.dtype.str, offset, len(array), zlib.crc32(_bytes(array))))
        offset = sections[-1].end
    header = dataclasses.replace(header, sections=tuple(sections), content_hash="", created=0.0)
    header = dataclasses.replace(header, content_hash=hashlib.sha256(_pack(header, 0)).hexdigest()[:16], created=time.time())
    # msgpack packs larger offsets into more bytes, so the header's length and where the sections start depend on each other.
    start = 0
    while True:
        packed = _pack(header, start)
        needed = -(-(PREAMBLE.size + len(packed)) // ALIGNMENT) * ALIGNMENT
        if needed == start:
            break
        start = needed
    header = dataclasses.replace(header, sections=_shifted(header.sections, start))
    size = header.sections[-1].end
    with replacing(path) as file:
        file.write(PREAMBLE.pack(MAGIC, VERSION, len(packed), size, zlib.crc32(packed), 0))
        file.write(packed)
        for section in header.sections:
            file.write(bytes(section.offset - file.tell()))
            file.write(_bytes(arrays[section.name]))
    return header


def read_header(path: str | Path) -> TrieHeader:
    """Header of the trie file at `path`, checked against the file's real size.

    Raises TrieFormatError naming what is wrong and what to do.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            preamble = file.read(PREAMBLE.size)
            if size == 0:
                raise TrieFormatError(f"{path}: empty file. Rebuild: lookahead build-trie CORPUS -o {path.name}")
            if preamble[: len(MAGIC)] != MAGIC[: len(preamble)] or len(preamble) < len(MAGIC):
                raise TrieFormatError(f"{path}: not a trie file (wrong first bytes). Build one: lookahead build-trie")
            if len(preamble) < PREAMBLE.size:
                raise TrieFormatError(f"{path}: the file has only {size} bytes. The write was cut short; rebuild.")
            _, version, header_length, file_length, crc, reserved = PREAMBLE.unpack(preamble)
            if version != VERSION:
                raise TrieFormatError(f"{path}: format version {version}; this tool reads version {VERSION}. Rebuild.")
            if file_length != size:
                raise TrieFormatError(
                    f"{path}: header says {file_length} bytes, file has {size}. "
                    + ("The write was cut short; rebuild." if size < file_length else "Bytes were appended; rebuild.")
                )
            if reserved or header_length > min(MAX_HEADER_BYTES, size - PREAMBLE.size):
                raise TrieFormatError(f"{path}: damaged header (impossible length {header_length}). Rebuild.")
            packed = file.read(header_length)
    except OSError as error:
        raise TrieFormatError(f"{path}: cannot be read ({error.strerror}).") from error
    if zlib.crc32(packed) != crc:
        raise TrieFormatError(f"{path}: damaged header (checksum differs). Rebuild.")
    try:
        header = _unpack(packed)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.exceptions.UnpackException) as error:
        raise TrieFormatError(f"{path}: unreadable header ({error}). Rebuild.") from error
    _check_bounds(path, header, PREAMBLE.size + header_length, size)
    return header


def map_sections(path: str | Path, header: TrieHeader) -> dict[str, np.ndarray]:
    """Read-only arrays over the mapped file; pages are shared between processes and read when touched."""
    try:
        mapped = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise TrieFormatError(f"{path}: cannot be mapped ({error}).") from error
    if len(mapped) < header.sections[-1].end:
        raise TrieFormatError(f"{path}: the file shrank while it was opened. Try again.")
    return {s.name: mapped[s.offset : s.end].view(np.dtype(s.dtype)) for s in header.sections}


def check_sections(path: str | Path, header: TrieHeader, arrays: Mapping[str, np.ndarray]) -> None:
    """Read every section and compare its checksum. Raises TrieFormatError naming the first damaged one."""
    for section in header.sections:
        if zlib.crc32(_bytes(arrays[section.name])) != section.crc:
            raise TrieFormatError(f"{path}: section {section.name} is damaged (checksum differs). Rebuild.")


def _check_bounds(path: Path, header: TrieHeader, start: int, size: int) -> None:
    """Every section known, in order, aligned, inside the file, and of the length that the others imply."""
    names = [s.name for s in header.sections]
    if names != list(SECTION_DTYPES):
        raise TrieFormatError(f"{path}: sections {names}, expected {list(SECTION_DTYPES)}. Rebuild.")
    by_name = {s.name: s for s in header.sections}
    end = start
    for section in header.sections:
        if section.dtype not in SECTION_DTYPES[section.name]:
            raise TrieFormatError(f"{path}: section {section.name} has dtype {section.dtype!r}. Rebuild.")
        if section.offset < end or section.offset % ALIGNMENT or section.entries < 0 or section.end > size:
            raise TrieFormatError(
                f"{path}: section {section.name} would lie at {section.offset}..{section.end} of {size} bytes. Rebuild."
            )
        end = section.end
    expected = {
        "tokens": header.tokens + header.documents,
        "first": header.vocab_size + 1,
        "document_ends": header.documents,
        "document_sources": header.documents,
    }
    for name, entries in expected.items():
        if by_name[name].entries != entries:
            raise TrieFormatError(f"{path}: section {name} has {by_name[name].entries} entries, not {entries}. Rebuild.")
    if by_name["suffixes"].entries > header.tokens or end != size:
        raise TrieFormatError(f"{path}: sections and file size contradict each other. Rebuild.")


def _shifted(sections: tuple[Section, ...], by: int) -> tuple[Section, ...]:
    return tuple(dataclasses.replace(s, offset=s.offset + by) for s in sections)


def _pack(header: TrieHeader, start: int) -> bytes:
    fields = dataclasses.asdict(dataclasses.replace(header, sections=_shifted(header.sections, start)))
    return msgpack.packb(fields)


def _unpack(packed: bytes) -> TrieHeader:
    fields = msgpack.unpackb(packed)
    fields["sources"] = tuple(Source(**s) for s in fields["sources"])
    fields["sections"] = tuple(Section(**s) for s in fields["sections"])
    header = TrieHeader(**fields)
    integers = [header.vocab_size, header.tokens, header.documents, header.depth]
    integers += [v for s in header.sections for v in (s.offset, s.entries, s.crc)]
    integers += [v for s in header.sources for v in (s.documents, s.tokens)]
    texts = [header.tokenizer_fingerprint, header.tokenizer_name, *(s.name for s in header.sources)]
    if not all(type(v) is int and 0 <= v < 1 << 62 for v in integers) or not all(type(v) is str for v in texts):
        raise ValueError("a field has an impossible value")
    if not all(type(s.weight) in (int, float) and 0 <= s.weight < math.inf for s in header.sources):
        raise ValueError("a source has an impossible weight")
    if not 1 <= header.depth <= 1024 or header.vocab_size < 1 or header.documents < 1 or not isinstance(header.options, dict):
        raise ValueError("a field has an impossible value")
    return header


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).view(np.uint8).data
