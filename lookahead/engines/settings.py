"""What a user sets for our drafts inside another engine. In: an object of JSON. Out: a drafter, or an error at the start.

{"tries": ["answers.trie"], "trie_weights": [1.0], "price": 0.05, "session_tokens": 4000000, "adaptive": true}
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from lookahead.arguments import numbers_of, paths_of
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions, Strategy
from lookahead.errors import LookaheadError, UsageError
from lookahead.tokenizer import identity, load_tokenizer
from lookahead.trie.file import Trie

NAME = "lookahead"  # the key of our settings among an engine's own


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """Holds what a user sets.

    tries: paths of files to draft from; trie_weights: of each (default 1). price: path probability that a draft token must
    have. session_tokens: tokens of earlier answers that are remembered. adaptive: as many draft tokens as pay by the clock,
    where the engine leaves that to us; False: as many as the price allows.
    """

    tries: tuple[str, ...] = ()
    trie_weights: tuple[float, ...] = ()
    price: float = 0.0
    session_tokens: int = 4_000_000
    adaptive: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "tries", tuple(map(str, paths_of(self.tries, f"{NAME}.tries"))))
        object.__setattr__(self, "trie_weights", numbers_of(self.trie_weights, f"{NAME}.trie_weights"))
        if self.trie_weights and len(self.trie_weights) != len(self.tries):
            raise UsageError(f"{NAME}.trie_weights has {len(self.trie_weights)} entries for {len(self.tries)} tries.")
        for name, kinds in (("price", (int, float)), ("session_tokens", (int,)), ("adaptive", (bool,))):
            value = getattr(self, name)
            if not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool)):
                raise UsageError(f"{NAME}.{name}: got {value!r:.80}.")

    @classmethod
    def of(cls, config: Any) -> DraftSettings:
        """Read an engine's additional config, an object that may hold ours as "lookahead". Raises UsageError."""
        found = config.get(NAME, {}) if isinstance(config, Mapping) else {}
        if not isinstance(found, Mapping):
            raise UsageError(f"{NAME}: got {found!r:.80}. Give an object such as {{'tries': ['answers.trie']}}.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in found:
            if name not in known:
                raise UsageError(f"{NAME} has no setting {name!r} (known: {', '.join(known)}).")
        return cls(**found)

    def drafter(self, strategy: Strategy, draft_tokens: int) -> Drafter:
        """Make a drafter whose kernels are compiled. draft_tokens: of a request in one step, at most. Raises LookaheadError."""
        options = DraftOptions(
            strategy,
            decoding_length=draft_tokens + 1,
            branch_length=draft_tokens,
            price=self.price,
            session_tokens=self.session_tokens,
            adaptive=self.adaptive,
            recycle=False,  # no scores come to us
        )
        drafter = Drafter([Trie(path) for path in self.tries], options, self.trie_weights or None)
        drafter.warm_up()
        return drafter


def check_tries(drafter: Drafter, model: str, vocab_size: int, tokenizer: str | None, trust_remote_code: bool = False) -> None:
    """Raises TokenizerMismatchError for a trie of another tokenizer. vocab_size: of the model. tokenizer: its name."""
    if not drafter.tries:
        return
    fingerprint, most = "", vocab_size
    if tokenizer:
        with contextlib.suppress(LookaheadError):  # the engine loads it in its own way
            own = identity(load_tokenizer(tokenizer, trust_remote_code), tokenizer)
            fingerprint, most = own.fingerprint, max(most, own.vocab_size)
    for trie in drafter.tries:
        trie.check_tokenizer(fingerprint, most, model)


SETTINGS = "LOOKAHEAD_SETTINGS"


def settings_of(environment: Mapping[str, str] = os.environ) -> DraftSettings:
    """Read what a user has set in LOOKAHEAD_SETTINGS. Raises UsageError."""
    text = environment.get(SETTINGS, "{}")
    try:
        return DraftSettings.of({NAME: json.loads(text)})
    except ValueError as error:
        raise UsageError(f'{SETTINGS}: not JSON ({error}). Give an object such as {{"tries": ["answers.trie"]}}.') from None
