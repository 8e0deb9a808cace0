"""Text from outside (names, prompts, error texts) as a terminal may see it. In: any text. Out: text without effects.

A control character in a file name can move the cursor, colour the screen or retype a line. Here each is shown as Python writes
it: an escape character as \\x1b. What the output's encoding does not know is shown likewise.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping
from typing import Any

# Control characters but for the end of a line, marks that change the direction of the text after them, lone surrogates (bytes
# of file names that are not UTF-8) and separators that some terminals take for the end of a line.
EFFECTS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def printable(text: str, encoding: str | None = "utf-8") -> str:
    """The text with such characters escaped; lines end where they did."""
    text = EFFECTS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    try:
        return text.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")
    except LookupError:  # an encoding that Python does not know
        return text


def in_one_line(text: str, encoding: str | None = "utf-8") -> str:
    """The same, with ends of lines escaped, too."""
    return printable(text, encoding).replace("\n", "\\n")


def json_text(value: Any, encoding: str | None = "utf-8") -> str:
    """A value in one line, which is valid JSON in a stream of this encoding.

    Other characters than ASCII stand as they are where the stream is UTF-8, as JSON must be; elsewhere they are escaped. So are
    lone surrogates, which no encoding has.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        if codecs.lookup(encoding or "ascii").name == "utf-8":
            text.encode("utf-8")
            return text
    except (LookupError, UnicodeEncodeError):
        pass
    return json.dumps(value)


def duration(seconds: float) -> str:
    """3725 -> "1 h 2 min", 65 -> "1 min 5 s", 2.5 -> "2.5 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def size(count: float) -> str:
    """Bytes for people: 1536 -> "1.5 KiB"."""
    power = sum(count >= 1024**power for power in (1, 2, 3))
    return f"{count / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}" if power else f"{count:.0f} B"


def shares(counts: Mapping[str, int]) -> str:
    """Format the shares of accepted tokens by source, the largest first; "" if none was accepted."""
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1]) if total else ()
    return ", ".join(f"{source} {count / total:.0%}" for source, count in ordered)
