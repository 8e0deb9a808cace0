"""What is indexed, and whose token ids it holds: the types that corpora make and tries take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LEFT_CONTEXT = 4  # prompt tokens kept before an answer, so that its first tokens can be drafted
OUTPUTS = "outputs"  # source of a job's own answers, unless it is named


@dataclasses.dataclass(frozen=True)
class TokenDocument:
    """One document to index. Nothing is drafted across its end."""

    token_ids: Sequence[int] | np.ndarray
    source: str  # corpus file, or the name given with --source


@dataclasses.dataclass(frozen=True)
class TokenizerIdentity:
    """Whose token ids these are. fingerprint is "" where the corpus came as bare ids."""

    vocab_size: int
    fingerprint: str = ""
    name: str = ""
