"""Bytes of a trie file. In: arrays and a header. Out: one file, and back. Knows nothing of tokens' meaning.

    offset  bytes  what
    0       8      magic  89 4C 4B 54 0D 0A 1A 0A   ("\\x89LKT\\r\\n\\x1a\\n": a text-mode copy breaks it visibly)
    8       4      format version, uint32: 2, or 3 if a table is left out (all numbers little-endian)
    12      4      length of the header, uint32
    16      8      length of the whole file, uint64
    24      4      CRC-32 of the header, uint32
    28      4      zero
    32      ...    sections, each at a multiple of 64 bytes, zero between them; one set of six for each segment
    end     ...    header, msgpack map (TrieHeader): the last bytes of the file

    section           dtype            entries        what
    tokens            uint16 | uint32  tokens         documents one after the other, each closed by the separator
                                                      (= vocab_size, no real token has this id)
    suffixes          uint32 | uint64  suffixes       positions in `tokens`, sorted by the text that starts there
    first             uint32 | uint64  vocab_size+1   suffixes[first[t]:first[t+1]] start with token t; no entries where it
                                                      would be longer than `suffixes` (`stores_first`): readers count then
    samples           uint64           suffixes/256   the first tokens of every 256th suffix, packed as in suffixes.py: part of
                                                      this format version, which earlier readers search with; ours do not
    document_ends     uint32 | uint64  documents      position of each document's separator
    document_sources  uint16           documents      index into the header's sources

The header stands last because sections are streamed: their sizes are known when they are written. It names dtype, offset,
entries and CRC-32 of every section. `tokens` is uint16 where the separator fits, positions are uint32 where their largest
entry fits. Opening checks magic, version, both lengths, the header's checksum and that each section lies inside the file;
check.py reads every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import msgpack
import numpy as np

from lookahead.errors import TrieFormatError
from lookahead.files.atomic import reason, uninterrupted
from lookahead.trie.suffixes import DEPTH, SAMPLE

Made = TypeVar("Made")
MAGIC = b"\x89LKT\r\n\x1a\n"
VERSIONS = 2, 3  # 3: a small segment does not store its `first`
MAX_COUNTED = 1 << 22  # tokens of a vocabulary whose `first` need not be stored: a reader allocates it
ALIGNMENT = 64
PREAMBLE = struct.Struct("<8sIIQII")
MAX_HEADER_BYTES = 1 << 26
MAX_SOURCES = 1 << 16
MAX_WEIGHT = 1e6
MAX_TIME = 1 << 36
MAX_NESTING = 32  # of the options
CHUNK = 1 << 22  # bytes read, checked or copied at a time

SECTION_DTYPES = {
    "tokens": ("<u2", "<u4"),
    "suffixes": ("<u4", "<u8"),
    "first": ("<u4", "<u8"),
    "samples": ("<u8",),
    "document_ends": ("<u4", "<u8"),
    "document_sources": ("<u2",),
}


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of documents: a corpus file, or a name given with --source. Totals over all segments."""

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
        return self.byte(self.entries)

    def byte(self, entry: int) -> int:
        """Return where in the file an entry begins."""
        return self.offset + entry * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class SegmentHeader:
    """One sorted part of a trie: a build, or what one append added. `tokens` counts corpus tokens without separators."""

    tokens: int
    documents: int
    sections: tuple[Section, ...]


@dataclasses.dataclass(frozen=True)
class TrieHeader:
    """Header of a trie file."""

    vocab_size: int
    tokenizer_fingerprint: str  # "" when the corpus came as token ids
    tokenizer_name: str
    depth: int  # suffixes are sorted by this many tokens; this version knows DEPTH only
    sources: tuple[Source, ...]
    options: Mapping[str, Any]  # how it was built
    tool_version: str
    segments: tuple[SegmentHeader, ...] = ()
    content_hash: str = ""  # over everything but `created`
    created: float = 0.0  # seconds since 1970; of the environment's SOURCE_DATE_EPOCH if that is set

    @property
    def separator(self) -> int:
        return self.vocab_size

    @property
    def tokens(self) -> int:
        """Corpus tokens, without separators."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def documents(self) -> int:
        return sum(segment.documents for segment in self.segments)

    @property
    def sections(self) -> list[Section]:
        """All, in the order of the file."""
        return [section for segment in self.segments for section in segment.sections]

    @property
    def version(self) -> int:
        """Version of the file's format."""
        return VERSIONS[any(section.name == "first" and not section.entries for section in self.sections)]

    @property
    def branches(self) -> int:
        """Suffixes that can be looked up."""
        return sum(section.entries for section in self.sections if section.name == "suffixes")


def stores_first(suffixes: Any, vocab_size: int) -> Any:
    """Tell whether a segment of that many suffixes is written with its `first`, which would else be most of a small file."""
    return (suffixes > vocab_size) | (vocab_size > MAX_COUNTED)


def smallest_dtype(name: str, largest: int) -> np.dtype:
    """The narrowest dtype that section `name` may have and that holds `largest`."""
    for code in SECTION_DTYPES[name]:
        if largest <= np.iinfo(code).max:
            return np.dtype(code)
    raise TrieFormatError(f"section {name}: {largest} does not fit.")


def content_hash(header: TrieHeader) -> str:
    """16 hex digits over all that a header states, checksums of sections included, but `created` and the hash itself."""
    return hashlib.sha256(packed_header(dataclasses.replace(header, content_hash="", created=0.0))).hexdigest()[:16]


def read_header(path: Path, file: IO[bytes]) -> TrieHeader:
    """Header of the trie `file`, checked against the file's real size; `path` is for messages.

    Raises TrieFormatError naming what is wrong and what to do.
    """
    try:
        size = os.fstat(file.fileno()).st_size
        preamble = file.read(PREAMBLE.size)
        if size == 0:
            raise TrieFormatError(f"{path}: empty file. Rebuild: lookahead build-trie CORPUS -o {path.name}")
        if preamble[: len(MAGIC)] != MAGIC[: len(preamble)] or len(preamble) < len(MAGIC):
            raise TrieFormatError(f"{path}: not a trie file (wrong first bytes). Build one: lookahead build-trie")
        if len(preamble) < PREAMBLE.size:
            raise TrieFormatError(f"{path}: the file has only {size} bytes. The write was cut short; rebuild.")
        _, version, header_length, file_length, crc, reserved = PREAMBLE.unpack(preamble)
        if version not in VERSIONS:
            raise TrieFormatError(f"{path}: format version {version}; this tool reads versions 2 and 3. Rebuild.")
        if file_length != size:
            raise TrieFormatError(
                f"{path}: header states {file_length} bytes, file has {size}. "
                + ("The write was cut short; rebuild." if size < file_length else "Bytes were appended; rebuild.")
            )
        if reserved or header_length > min(MAX_HEADER_BYTES, size - PREAMBLE.size):
            raise TrieFormatError(f"{path}: damaged header (impossible length {header_length}). Rebuild.")
        file.seek(size - header_length)
        packed = file.read(header_length)
    except OSError as error:
        raise TrieFormatError(f"{path}: cannot be read ({reason(error)}).") from error
    if zlib.crc32(packed) != crc:
        raise TrieFormatError(f"{path}: damaged header (checksum differs). Rebuild.")
    try:
        header = _unpack(packed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise TrieFormatError(f"{path}: unreadable header ({error}). Rebuild.") from error
    _check_bounds(path, header, size - header_length)
    if version != header.version:
        raise TrieFormatError(f"{path}: format version {version} contradicts the sections. Rebuild.")
    return header


def map_file(path: Path, file: IO[bytes], header: TrieHeader) -> mmap.mmap:
    """The file's sections mapped read-only; pages are shared between processes and read when touched."""
    end = header.sections[-1].end
    try:
        if os.fstat(file.fileno()).st_size < end:
            raise TrieFormatError(f"{path}: the file shrank while it was opened. Try again.")
        return uninterrupted(lambda: mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise TrieFormatError(f"{path}: cannot be mapped ({error}).") from error


def section_array(mapped: mmap.mmap, section: Section) -> np.ndarray:
    """Read-only array over one section of a mapped file."""
    return np.frombuffer(mapped, section.dtype, section.entries, section.offset)


def check_gaps(path: Path, mapped: mmap.mmap, header: TrieHeader) -> None:
    """Raise TrieFormatError unless the bytes between the sections are zero."""
    end = PREAMBLE.size
    for section in header.sections:
        if any(mapped[end : section.offset]):
            raise TrieFormatError(f"{path}: bytes before section {section.name} are not zero. Rebuild.")
        end = section.end


def check_crc(path: Path, section: Section, crc: int) -> None:
    """Raise TrieFormatError if `crc`, over the section's bytes as read, is not what the header states."""
    if crc != section.crc:
        raise TrieFormatError(
            f"{path}: section {section.name} is damaged (checksum of bytes {section.offset} to {section.end} differs). Rebuild."
        )


def _check_bounds(path: Path, header: TrieHeader, end_of_sections: int) -> None:
    """Every section known, in order, aligned, inside the file, and of dtype and length that the others imply."""
    end = PREAMBLE.size
    for segment in header.segments:
        names = [section.name for section in segment.sections]
        if names != [*SECTION_DTYPES]:
            raise TrieFormatError(f"{path}: sections {names}, expected {[*SECTION_DTYPES]}. Rebuild.")
        for section in segment.sections:
            if section.dtype not in SECTION_DTYPES[section.name]:
                raise TrieFormatError(f"{path}: section {section.name} has dtype {section.dtype!r}. Rebuild.")
            if not end <= section.offset < end + ALIGNMENT or section.offset % ALIGNMENT or section.end > end_of_sections:
                raise TrieFormatError(
                    f"{path}: section {section.name} would lie at {section.offset}..{section.end} "
                    f"of {end_of_sections} bytes. Rebuild."
                )
            end = section.end
        by_name = {s.name: s for s in segment.sections}
        counted = not by_name["first"].entries and not stores_first(by_name["suffixes"].entries, header.vocab_size)
        expected = {
            "tokens": segment.tokens + segment.documents,
            "first": 0 if counted else header.vocab_size + 1,
            "samples": -(-by_name["suffixes"].entries // SAMPLE),
            "document_ends": segment.documents,
            "document_sources": segment.documents,
        }
        for name, entries in expected.items():
            if by_name[name].entries != entries:
                raise TrieFormatError(f"{path}: section {name} has {by_name[name].entries} entries, not {entries}. Rebuild.")
        if by_name["suffixes"].entries > segment.tokens:
            raise TrieFormatError(f"{path}: more suffixes than tokens. Rebuild.")
        if by_name["tokens"].dtype != smallest_dtype("tokens", header.separator).str:
            raise TrieFormatError(f"{path}: section tokens has dtype {by_name['tokens'].dtype!r}. Rebuild.")
    if end != end_of_sections:
        raise TrieFormatError(f"{path}: sections and file size contradict each other. Rebuild.")
    of_sources = (sum(s.documents for s in header.sources), sum(s.tokens for s in header.sources))
    if of_sources != (header.documents, header.tokens):
        raise TrieFormatError(f"{path}: documents or tokens of the sources do not add up. Rebuild.")


def packed_header(header: TrieHeader) -> bytes:
    """Pack the header as it stands at the end of the file."""
    return bytes(msgpack.packb(dataclasses.asdict(header), unicode_errors="replace"))  # names of files need not be text


def _made(kind: type[Made], fields: Mapping[str, Any]) -> Made:
    """An object of exactly these fields. Raises ValueError if one is missing or unknown."""
    if set(fields) != {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
        raise ValueError(f"a {kind.__name__} with fields {', '.join(map(str, fields)) or 'none'}")
    return kind(**fields)


def _unpack(packed: bytes) -> TrieHeader:
    fields = msgpack.unpackb(packed)
    if "recycled" in fields:
        raise ValueError("it holds runner-up tokens, as an earlier version wrote them")
    fields["sources"] = tuple(_made(Source, s) for s in fields["sources"])
    fields["segments"] = tuple(
        _made(SegmentHeader, {**s, "sections": tuple(_made(Section, section) for section in s["sections"])})
        for s in fields["segments"]
    )
    header = _made(TrieHeader, fields)
    sections = header.sections
    integers = [header.vocab_size, header.depth]
    integers += [v for s in sections for v in (s.offset, s.entries, s.crc)]
    integers += [v for s in header.sources for v in (s.documents, s.tokens)]
    integers += [v for s in header.segments for v in (s.documents, s.tokens)]
    texts = [header.tokenizer_fingerprint, header.tokenizer_name, header.tool_version, header.content_hash]
    texts += [v for s in sections for v in (s.name, s.dtype)] + [s.name for s in header.sources]
    weights = [s.weight for s in header.sources]
    if (
        not all(type(v) is int and 0 <= v < 1 << 62 for v in integers)
        or not all(type(v) is str for v in texts)
        or not all(type(v) in (int, float) and 0 <= v <= MAX_WEIGHT for v in weights)
        or not (type(header.created) in (int, float) and 0 <= header.created < MAX_TIME)
        or not isinstance(header.options, dict)
        or _nests(header.options, MAX_NESTING)
        or len({(s.name, s.weight) for s in header.sources}) < len(header.sources)
        or header.depth != DEPTH
        or not 1 <= header.vocab_size < 1 << 32
        or not 1 <= len(header.sources) <= MAX_SOURCES
        or not header.segments
        or not all(s.documents for s in header.segments)
    ):
        raise ValueError("a field has an impossible value")
    json.dumps(header.options)  # raises for what could not be printed
    return header


def _nests(value: Any, levels: int) -> bool:
    """True if a value holds others inside each other at more than that many levels: too deep to be written again."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not levels or any(_nests(v, levels - 1) for v in inner)
