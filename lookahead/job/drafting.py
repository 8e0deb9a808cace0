"""Options of drafting, as they are typed. In: names, lengths and weights as text. Out: options of the core, opened tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lookahead.errors import UsageError
from lookahead.job.spec import SESSION_TOKENS

if TYPE_CHECKING:
    from lookahead.draft.options import DraftOptions
    from lookahead.models.options import ModelOptions
    from lookahead.trie.file import Trie


def draft_options(
    strategy: str,
    decoding_length: str | int,
    branch_length: int,
    session_tokens: int = SESSION_TOKENS,
    price: float = 0.0,
    recycle: bool = True,
) -> DraftOptions:
    """Options of the core from those of a job. Strategy auto is hierarchical, sized by what pays up to the length given. Raises
    UsageError for an unknown strategy or a length that is not a number.
    """
    from lookahead.draft.options import DraftOptions

    fixed = decoding_length != "auto"
    if fixed and not str(decoding_length).isdecimal():
        raise UsageError(f"--decoding-length {decoding_length}: give a number of tokens from 1 to 1024, or auto.")
    kind: Any = "hierarchical" if strategy == "auto" else strategy
    adaptive = strategy != "off" and (strategy == "auto" or not fixed)
    length = int(decoding_length) if fixed else 64
    return DraftOptions(kind, length, branch_length, price, session_tokens, adaptive, recycle=recycle)


def batch_size_of(text: str | int | None) -> int | None:
    """Rows at once; None for auto. Raises UsageError for what is neither a number above 0 nor auto."""
    if text in (None, "auto"):
        return None
    if not str(text).isdecimal() or int(str(text)) < 1:
        raise UsageError(f"--batch-size {text}: give a number of rows, or auto.")
    return int(str(text))


def open_tries(paths: Sequence[str] | None, model: ModelOptions | None = None) -> list[Trie]:
    """Open tries; their tokenizer is checked once the model is known. model: by whose tokenizer corpus files are made tries."""
    from lookahead.corpus_build import open_trie

    def load() -> tuple[Any | None, str]:
        return (model.load_tokenizer(), model.tokenizer or model.name) if model else (None, "")

    return [open_trie(path, load) for path in paths or []]


def weights_by_name(items: Sequence[str] | None, option: str) -> dict[str, float]:
    """["faq=2.0"] -> {"faq": 2.0}. Raises UsageError for a weight that is not above 0, and for a name that is given twice."""
    weights: dict[str, float] = {}
    for item in items or []:
        name, _, value = item.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not name or not 0 < weight < math.inf:
            raise UsageError(f"{option} {item}: give NAME=W with a number W above 0, such as faq=2.0.")
        if name in weights:
            raise UsageError(f"{option} {item}: {name} is given twice.")
        weights[name] = weight
    return weights


def trie_weights(items: Sequence[str] | None, groups: Sequence[Sequence[Trie]]) -> list[list[float]]:
    """The weight of each trie in groups of tries that draft together. Raises UsageError for a NAME that no trie has."""
    from lookahead.trie.file import names_of

    weights = weights_by_name(items, "--trie-weight")
    names = [names_of([trie.path for trie in tries]) for tries in groups]
    known = dict.fromkeys(name for some in names for name in some)
    for name in weights:
        if name not in known:
            raise UsageError(f'--trie-weight: no --trie is named "{name}" (known: {", ".join(known) or "none"}).')
    return [[weights.get(name, 1.0) for name in some] for some in names]
