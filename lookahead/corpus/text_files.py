"""Text files to documents. In: the text of a .txt, .md or .html file. Out: its text, whole or by paragraphs, in pieces."""

from __future__ import annotations

import html.parser
import io
import re
from collections.abc import Iterable, Iterator
from typing import IO

TEXTS = (".txt", ".md", ".markdown", ".html", ".htm")
PIECE = 1 << 20  # characters of a document; a longer one is cut at the end of a line
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
    """What a reader of the page sees, but for scripts and styles: blocks apart by an empty line, white space as one space."""
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
