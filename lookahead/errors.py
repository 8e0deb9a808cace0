"""The one family of errors that a user can cause. The command line prints them as one line and exits with `exit_code`."""

from __future__ import annotations


class LookaheadError(Exception):
    """Something about the user's data, files or model: what happened, where, what to do."""

    exit_code = 1


class UsageError(LookaheadError):
    """Options that are wrong or do not go together."""

    exit_code = 2


class RowsFailedError(LookaheadError):
    """A job is complete, and some of its rows are error rows."""

    exit_code = 3


class TrieFormatError(LookaheadError):
    """A trie file that is cut, altered, of another version, or no trie file at all."""


class TokenizerMismatchError(LookaheadError):
    """Token ids of two files, or of a file and a model, do not mean the same text."""


class CorpusError(LookaheadError):
    """A corpus file or row that cannot be used."""


class ModelError(LookaheadError):
    """A model folder or name that cannot be loaded or decoded with."""


class EngineDiedError(LookaheadError):
    """An engine has ended, or can no longer be used, with the rows that it was answering."""


class ConstraintError(LookaheadError):
    """A JSON schema, regular expression or grammar that cannot be read, or that no answer can keep to."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages that must stay one line; with the next one if it ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]
    return text.rstrip(".")[:200]
