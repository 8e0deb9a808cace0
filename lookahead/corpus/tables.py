"""Rows of CSV files and JSON arrays, documents of text files. In: bytes or text of an open file. Out: rows as objects, texts.

Only the row at hand is held. A row that cannot be read is text that tells why; a file that cannot raises CorpusError.
"""

from __future__ import annotations

import codecs
import csv
import html.parser
import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any

from lookahead.errors import CorpusError

TABLES = {".csv": ",", ".tsv": "\t"}  # suffix -> what stands between columns
LONGEST = 64 << 20  # bytes or characters of a row
PIECE = 1 << 20  # bytes read at a time; characters of a document, a longer one is cut at the end of a line
LONGEST_NUMBER = 64  # characters
DEEPEST = 128  # lists and objects that a value of a row may stand in
TOO_DEEP = f"nested more than {DEEPEST} levels deep"
NESTING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)  # brackets, and strings, which may hold some
HEAD = 1 << 16  # bytes that tell what a file holds
SPACE = " \t\r\n"
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"{\0", b"\0{", b"[\0", b"\0[")

Found = tuple[int, dict[str, Any] | str]  # number of the row (see each reader), the row or what is wrong with it


def without_mark(begin: bytes, name: str) -> bytes:
    """The beginning of a file without a UTF-8 byte-order mark. Raises CorpusError for UTF-16 and UTF-32."""
    if begin.startswith((*UTF16, codecs.BOM_UTF32_BE)):
        raise CorpusError(f"{name}: UTF-16 or UTF-32 text. Convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW")
    return begin.removeprefix(codecs.BOM_UTF8)


def unmarked(file: IO[bytes], name: str) -> IO[bytes]:
    """A file that was just opened, without such a mark. Raises CorpusError as `without_mark` does."""
    return io.BufferedReader(_Rest(without_mark(file.read(4), name), file), PIECE)


def table_rows(file: IO[bytes], name: str, separator: str) -> Iterator[Found]:
    """(line where it begins, row) of a CSV file; all text. Raises CorpusError for no header, or a name given twice."""
    csv.field_size_limit(LONGEST)
    reader = csv.reader(_lines(file, name), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield line, f"not CSV ({error})"
            continue
        if not cells:
            continue
        if header is None:
            header = _checked_header(cells, f"{name}:{line}")
        elif len(cells) != len(header):
            yield line, f"has {len(cells)} columns, the header has {len(header)}"
        elif not "".join(cells).isascii() and not _is_text(cells):
            yield line, "not UTF-8 text"
        else:
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            yield line, {**row, "id": None} if row.get("id") == "" else row
    if header is None:
        raise CorpusError(f"{name}: empty file. The first row of a CSV file names its columns.")


def json_file_rows(file: IO[bytes], name: str) -> tuple[Iterator[Found] | None, IO[bytes]]:
    """(rows of a .json array or object; None where its lines are JSON, the file again). Raises CorpusError for no JSON."""
    begin = without_mark(file.read(HEAD), name)
    while not begin.strip() and (piece := file.read(HEAD)):
        begin = piece
    first = begin.lstrip()[:1]
    if first == b"{" and b"\n" not in begin.lstrip():
        begin += file.readline(LONGEST)
    again: IO[bytes] = io.BufferedReader(_Rest(begin, file))
    if first == b"[":
        return _array_rows(again, name), again
    line = row_of(begin.lstrip().split(b"\n", 1)[0]) if first == b"{" else ""
    if isinstance(line, str) and line.startswith("not JSON"):
        row = row_of(again.read(LONGEST))
        if isinstance(row, str) and row.startswith("not JSON"):
            raise CorpusError(f"{name}: neither a JSON array, nor JSON lines, nor one JSON object ({row}).")
        return iter([(1, row)]), again
    return None, again


def _array_rows(file: IO[bytes], name: str) -> Iterator[Found]:
    """Elements of an array, one after the other: a long element is read piece by piece until it is whole."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, number, ended = "", 0, False
    wanted = PIECE

    def more() -> None:
        nonlocal text, ended
        piece = file.read(wanted)
        ended = not piece
        text += decode.decode(piece, final=ended)

    while not text.strip(SPACE):
        more()
    text = text.lstrip(SPACE)[1:]
    while True:
        text = text.lstrip(SPACE)
        while not text and not ended:
            more()
            text = text.lstrip(SPACE)
        if text[:1] == "]":
            return
        end = 0
        try:
            value, end = decoder.raw_decode(text)  # which `row_of` reads
        except (ValueError, RecursionError) as error:
            if not isinstance(error, json.JSONDecodeError):  # JSON that Python does not take
                value, end = None, next((end for depth, end in _depths(text) if not depth), 0)
            if not end and (ended or len(text) > LONGEST):
                raise CorpusError(f"{name}: not JSON behind row {number} of its array.") from error
            wanted = max(PIECE, len(text))
        if not end:
            more()
            continue
        rest = text[end:].lstrip(SPACE)
        cut = not rest or (isinstance(value, int | float) and len(rest) < LONGEST_NUMBER)
        if cut and rest[:1] not in (",", "]") and not ended:  # what follows tells whether a number is whole
            more()
            continue
        if rest[:1] not in (",", "]"):
            raise CorpusError(f"{name}: not JSON behind row {number + 1} of its array.")
        number, wanted = number + 1, PIECE
        yield number, row_of(text[:end].encode("utf-8", "surrogateescape"))
        text = rest.removeprefix(",")


def row_of(line: bytes) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong with it."""
    try:
        text = line.strip().decode("utf-8")
        row = json.loads(text)
        if text.count("[") + text.count("{") > DEEPEST and max(depth for depth, _ in _depths(text)) > DEEPEST:
            return TOO_DEEP
        if r"\ud" in text.lower():  # escapes can spell half a character, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except UnicodeEncodeError:
        return "not text (half of a surrogate pair)"
    except json.JSONDecodeError as error:
        return f"not JSON ({error})"
    except ValueError:
        return "a number of too many digits"
    except RecursionError:
        return TOO_DEEP
    return row if isinstance(row, dict) else f"a JSON {type(row).__name__}, not an object"


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """(how many lists and objects are open, behind which character) at each bracket of a JSON text."""
    depth = 0
    for found in NESTING.finditer(text):
        if found[0][0] != '"':
            depth += 1 if found[0] in "[{" else -1
            yield depth, found.end()


def _checked_header(cells: list[str], where: str) -> list[str]:
    twice = next((cell for column, cell in enumerate(cells) if cell in cells[:column]), None)
    if twice is not None or not all(cells) or not _is_text(cells):
        problem = f'names the column "{twice}" twice' if twice else "has a column without a name"
        raise CorpusError(f"{where}: the header {problem}.")
    return cells


def _lines(file: IO[bytes], name: str) -> Iterator[str]:
    """Lines of text; what is not UTF-8 becomes surrogates."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
        yield (without_mark(line, name) if number == 1 else line).decode("utf-8", "surrogateescape")


def _is_text(cells: list[str]) -> bool:
    return not any("\ud800" <= character <= "\udfff" for cell in cells for character in cell)


class _Rest(io.RawIOBase):
    def __init__(self, begin: bytes, file: IO[bytes]):
        self._begin, self._file = begin, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._begin:
            piece, self._begin = self._begin[: len(buffer)], self._begin[len(buffer) :]
        else:
            piece = self._file.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


TEXTS = (".txt", ".md", ".markdown", ".html", ".htm")
FENCES = ("```", "~~~")  # around code in Markdown, in which empty lines end no paragraph
APART = frozenset(("p", "div", "section", "article", "header", "footer", "main", "aside", "nav", "blockquote", "pre", "table"))
APART |= {"ul", "ol", "dl", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "figure", "form", "title", "body"}
LINES = ("br", "li", "tr", "dt", "dd", "option", "figcaption", "caption")
CELLS = ("td", "th")


def pieces_of(file: IO[str], kind: str, split: str) -> Iterator[str]:
    """Documents of an open file of this kind (its suffix)."""
    if kind in (".html", ".htm"):
        file = io.StringIO(html_text(file.read()))
    if split == "paragraphs":
        yield from _paragraphs(file, kind)
        return
    while piece := file.read(PIECE):
        yield piece + file.readline()


def html_text(page: str) -> str:
    """What a reader of the page sees, without scripts and styles: an empty line between blocks, white space as one space."""
    parser = _Page()
    parser.feed(page)
    parser.close()
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+(?=\n)", "", "".join(parser.parts))).strip()


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._hidden = ""  # the element whose text nobody sees: script or style
        self._kept = 0  # elements around in which white space stays as it is

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag if tag in ("script", "style") else self._hidden
        self._kept += tag == "pre"
        self._separate(tag)

    def handle_endtag(self, tag: str) -> None:
        self._hidden = "" if tag == self._hidden else self._hidden
        self._kept -= tag == "pre" and self._kept > 0
        self._separate(tag)

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._kept:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1].endswith(("\n", " ")):
                data = data.lstrip()
        if data:
            self.parts.append(data)

    def _separate(self, tag: str) -> None:
        if between := "\n\n" if tag in APART else "\n" if tag in LINES else " " if tag in CELLS else "":
            self.parts.append(between)


def _paragraphs(lines: Iterable[str], kind: str) -> Iterator[str]:
    """Text between empty lines. Code between fences in Markdown is not taken apart."""
    held: list[str] = []
    size, fence = 0, ""
    for line in lines:
        bare = line.strip()
        if kind in (".md", ".markdown") and bare.startswith(fence or FENCES):
            fence = "" if fence else bare[:3]
        if (bare or fence) and size < PIECE:
            held.append(line)
            size += len(line)
            continue
        if paragraph := "".join(held).strip():
            yield paragraph
        held, size = ([line], len(line)) if bare else ([], 0)
    if paragraph := "".join(held).strip():
        yield paragraph
