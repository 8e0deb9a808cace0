"""JSON as a stream can take it."""

from __future__ import annotations

import codecs
import json
from typing import Any


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
