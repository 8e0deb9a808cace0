"""Constrains answers. In: a JSON schema, a regular expression, choices or a grammar. Out: tokens that may follow.

The grammars are llguidance's (https://github.com/guidance-ai/llguidance), compiled in a millisecond or so against the
model's vocabulary. A `Guide` follows one answer: it tells which tokens may come next, which nodes of a draft tree could ever be
accepted, and what must come, so that it need not be drafted. It also sees to it that the answer ends in time: a token after
which the tokens that are left could not complete it gives way to the first of a short completion.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from lookahead.errors import ConstraintError, LookaheadError, UsageError
from lookahead.extras import require

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "regex", "choice", "grammar"]
KINDS: tuple[str, ...] = get_args(Kind)
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
KEPT = 256  # compiled grammars
MOST_FORCED = 64  # tokens that are looked ahead
LONGEST_END = 256  # tokens
LATE, APART = 32, 8  # the end is thought of at each token once that many and twice the end are left, before at one in that many
# Characters that complete an answer, the first that may come next: where letters may (in a text), and where they may not.
LETTERS, QUOTE, IN_TEXTS, OUTSIDE = "a~", '"', "@.a0-", '}]"0, '


@dataclasses.dataclass(frozen=True)
class Constraint:
    """One thing that an answer, from its first token to its end, must be.

    kind         text
    json_schema  of a JSON schema. JSON is written as json.dumps writes it; a schema's "x-guidance" may state otherwise
    regex        a regular expression (of Rust's regex crate: no look-around, no back-references), matched as a whole
    choice       a JSON list of texts, one of which it is
    grammar      a context-free grammar, as Lark writes it (`start: ...`) or in EBNF as llama.cpp does (`root ::= ...`)
    """

    kind: Kind
    text: str

    @classmethod
    def of(cls, kind: str, value: Any) -> Constraint:
        """Make a constraint of what users write: a schema as an object or its text, choices as a list.

        Raises UsageError if it is not of the right type.
        """
        if kind not in KINDS:
            raise UsageError(f'constraint "{kind}": choose one of {", ".join(KINDS)}.')
        if kind == "choice":
            if not isinstance(value, list | tuple) or not value or not all(isinstance(text, str) and text for text in value):
                raise UsageError("choice is not a list of texts.")
            return cls("choice", json.dumps(list(value)))
        if kind == "json_schema" and isinstance(value, dict):
            return cls("json_schema", json.dumps(value))
        if not isinstance(value, str):
            raise UsageError(
                f"{kind} is of type {type(value).__name__}, not {'an object' if kind == 'json_schema' else 'text'}."
            )
        return cls(kind, value)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises ConstraintError if it cannot be read, holds what cannot be expressed, or nothing can be like that."""
        require("llguidance", self.kind)
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(self.compiled())
        if failed:
            raise ConstraintError(f"{self.kind}: {_first_line(messages[0])}.")

    def compiled(self) -> str:
        """Compile it for llguidance. Raises ConstraintError if it cannot be read."""
        require("llguidance", self.kind)
        from llguidance import LLMatcher, grammar_from

        if self.kind == "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(self.text, defaults=SEPARATORS)  # type: ignore[arg-type]
            except ValueError as error:
                raise ConstraintError(f"the JSON schema is not a JSON object ({_first_line(error)}).") from None
        if self.kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in json.loads(self.text)))
        try:
            return grammar_from("ebnf" if self.kind == "grammar" else "regex", self.text)
        except ValueError as error:
            raise ConstraintError(f"the grammar cannot be read: {_first_line(error)}.") from None


class Grammars:
    """Constraints over one vocabulary.

    tokenizer: the model's, a fast one of Hugging Face. vocab_size: scores that the model gives. eos_token_ids: end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._compiled: OrderedDict[Constraint, Guide] = OrderedDict()

    def guide(self, constraint: Constraint, room: int) -> Guide:
        """Make a guide for a new answer of at most `room` tokens.

        Raises ConstraintError if the constraint cannot be kept, regardless of the tokens.
        """
        first = self._compiled.get(constraint)
        if first is None:
            require("llguidance", constraint.kind)
            from llguidance import LLMatcher

            matcher = LLMatcher(self._vocabulary, constraint.compiled(), log_level=0)
            if matcher.is_error():
                raise ConstraintError(f"{constraint.kind}: {_first_line(matcher.get_error())}.")
            closing = self._closing._replace(patterns=self._patterns_met(constraint))
            first = Guide(matcher, constraint.kind, self.eos_token_ids, self._vocab_size, closing)
            self._compiled[constraint] = first
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(constraint)
        return first.begin(room)

    def _patterns_met(self, constraint: Constraint) -> list[list[int]]:
        """Tokens that meet each "pattern" of a JSON schema, which may be met anywhere in a text."""
        if constraint.kind != "json_schema":
            return []
        found: list[list[int]] = []
        for text in dict.fromkeys(_patterns_in(json.loads(constraint.text))):
            with contextlib.suppress(LookaheadError):
                guide = self.guide(Constraint("regex", text.removeprefix("^").removesuffix("$")), LONGEST_END)
                found += [guide._end] if guide._end else []
        return found

    @functools.cached_property
    def _closing(self) -> Closing:
        """The tokens of single characters."""

        def tokens_of(characters: str) -> list[int]:
            return [ids[0] for c in characters if len(ids := self._vocabulary.greedy_tokenize(c)) == 1]

        return Closing(tokens_of(LETTERS), tokens_of(QUOTE), tokens_of(IN_TEXTS), tokens_of(OUTSIDE))

    @functools.cached_property
    def _vocabulary(self) -> Any:
        """The tokens' bytes, which take a second to read for large vocabularies."""
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        if not getattr(self._tokenizer, "is_fast", False):
            raise ConstraintError("constraints need the model's fast tokenizer (a tokenizer.json), and it has none.")
        size = max(self._vocab_size, len(self._tokenizer))
        ends = sorted(self.eos_token_ids) or None
        return from_tokenizer(self._tokenizer, size, ends, LLTokenizer.json_slices())


class Closing(NamedTuple):
    """Tokens to complete an answer with, see LETTERS."""

    letters: list[int]
    quote: list[int]
    in_texts: list[int]
    outside: list[int]
    patterns: Sequence[list[int]] = ()


class Guide:
    """Follows one answer. Made by `Grammars.guide`."""

    def __init__(self, matcher: LLMatcher, kind: str, eos_token_ids: frozenset[int], vocab_size: int, closing: Closing):
        self._matcher, self._kind, self.eos, self._vocab_size = matcher, kind, eos_token_ids, vocab_size
        self._closing = closing
        self._left = 0  # tokens that may still be emitted
        self._end = self._completion()  # one that was found: of the answer so far, or of an earlier part of it
        self._longest_end = len(self._end or ())  # so far
        self._ends = False  # it is being emitted
        self._ended = False  # by a token that ends answers

    def begin(self, room: int) -> Guide:
        """A guide to a new answer of `room` tokens at most."""
        guide = copy.copy(self)
        guide._matcher = self._matcher.deep_copy()
        guide._left = room
        if self._longest_end > room:
            guide._end = None  # it cannot be seen to
        return guide

    @property
    def is_complete(self) -> bool:
        """True if what was emitted so far satisfies the whole constraint."""
        return self._ended or (not self._matcher.is_error() and self._matcher.is_accepting())

    def refused(self, others: str) -> int:
        """The token to emit where `others`, what else the request asks for, rules out all that are allowed: the end of an
        answer that is complete. Raises ConstraintError if it is not, or cannot be ended.
        """
        if self.is_complete and self.eos:
            return min(self.eos)
        raise ConstraintError(
            f"{self._kind} and {others or 'the scores of the model'}: no token is allowed by both, and the answer is not "
            "complete. Leave one of them out."
        )

    def settled(self, best: int) -> int | None:
        """The next token, as far as the best one tells: itself if it is allowed, the one that must come; else None."""
        if best in self.eos and self._matcher.is_accepting():
            return best
        if must := self._matcher.compute_ff_tokens():
            return must[0]
        return best if best not in self.eos and self._matcher.validate_tokens([best]) == 1 else None

    def allowed(self) -> np.ndarray:
        """bool [vocab_size]: the tokens that may come next. Raises ConstraintError if there are none."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=min(len(bits) * 8, self._vocab_size), bitorder="little").view(bool)
        if self._matcher.is_error() or not mask.any():
            raise self._error()
        return mask

    def in_time(self, token: int) -> int:
        """The token itself, or what must be emitted instead for the answer to be complete when there is no room left."""
        if self._end is None or token in self.eos:
            return token
        if self._left > LATE + 2 * self._longest_end and self._left % APART:
            return token
        self._matcher.consume_token(token)
        after = self._end_from(self._end[1:] if self._end[:1] == [token] else self._end)
        self._matcher.rollback(1)
        if after is not None and len(after) < self._left:
            self._end, self._longest_end = [token, *after], max(self._longest_end, len(after))
            return token
        end = self._end_from(self._end)
        if end is None or len(end) > self._left:
            return token
        self._end, self._ends = end, True
        return end[0] if end else next(iter(self.eos), token)

    def _end_from(self, known: list[int]) -> list[int] | None:
        """Return tokens that complete the answer: a known end if it still does, else a new one."""
        return known if self._is_complete_with(known) else self._completion()

    def accept_token(self, token: int) -> bool:
        """`token`, one of those allowed, was emitted. True: nothing can follow, and the model has no token to end with."""
        self._left -= 1
        if self._end and self._end[0] == token:
            self._end = self._end[1:]
        self._ended = token in self.eos
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise self._error()
        return not self.eos and self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as that is certain."""
        if self._ends and self._end:
            return self._end
        tokens = self._matcher.compute_ff_tokens()[:MOST_FORCED]
        if len(self.eos) == 1 and len(tokens) < MOST_FORCED:
            consumed = self._matcher.try_consume_tokens(tokens)
            if consumed == len(tokens) and self._matcher.is_stopped():
                tokens = [*tokens, *self.eos]
            self._matcher.rollback(consumed)
        return tokens

    def possible(self, token_ids: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Tell which nodes of a draft tree the answer could take; parents come before children, node 0 is what was emitted
        last.

        Of text that must come, other cuts into tokens than the one that is allowed may be among them, except at the beginning.
        """
        possible: list[bool | None] = [True, *[None] * (len(parents) - 1)]
        for leaf in range(len(parents) - 1, 0, -1):
            if possible[leaf] is not None:
                continue
            path = [leaf]
            while parents[path[-1]] > 0:
                path.append(parents[path[-1]])
            path.reverse()
            end = next((k for k, node in enumerate(path) if token_ids[node] in self.eos), len(path))
            good = self._matcher.validate_tokens([token_ids[node] for node in path[:end]]) if end else 0
            if good == end < len(path) and self._is_complete_with([token_ids[node] for node in path[:end]]):
                good += 1
            for k, node in enumerate(path):
                possible[node] = k < good
        return [bool(node) for node in possible]

    def _completion(self) -> list[int] | None:
        """Tokens, not many, that complete the answer; None if none are found."""
        return next((tokens for turning in (False, True) if (tokens := self._found_end(turning)) is not None), None)

    def _found_end(self, turning: bool) -> list[int] | None:
        """turning: within texts try one character after the other, not the same again and again."""
        matcher, tokens = self._matcher.deep_copy(), list[int]()
        while not matcher.is_accepting():
            following = matcher.compute_ff_tokens() or self._closing_token(matcher, len(tokens) if turning else 0)
            tokens += following
            if not following or len(tokens) > LONGEST_END or not matcher.consume_tokens(following):
                return None
        return tokens

    def _closing_token(self, matcher: LLMatcher, turn: int) -> list[int]:
        """The one that seems to come nearest to the end; [] if there is none."""

        def goes(token: int) -> bool:
            return matcher.validate_tokens([token]) == 1

        closing = self._closing
        if any(map(goes, closing.letters)):
            if not any(map(goes, closing.quote)):
                for tokens in closing.patterns:
                    met = matcher.deep_copy()
                    if met.consume_tokens(tokens) and any(met.validate_tokens([token]) == 1 for token in closing.quote):
                        return tokens
            turn %= max(1, len(closing.in_texts))
            tried = [*closing.quote, *closing.in_texts[turn:], *closing.in_texts[:turn]]
        else:
            tried = closing.outside
        token = next(filter(goes, tried), None)
        if token is None:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            token = next(iter(np.flatnonzero(bits[: self._vocab_size])[:1].tolist()), None)
        return [] if token is None else [token]

    def _is_complete_with(self, token_ids: list[int]) -> bool:
        """The answer is what it must be once these are emitted, too."""
        consumed = self._matcher.try_consume_tokens(token_ids)
        complete = consumed == len(token_ids) and self._matcher.is_accepting()
        self._matcher.rollback(consumed)
        return complete

    def _error(self) -> ConstraintError:
        why = _first_line(self._matcher.get_error())
        stuck = not why or why.startswith("NoExtension")
        return ConstraintError(f"{self._kind}: {'no token of the vocabulary can follow' if stuck else f'llguidance: {why}'}.")


def _patterns_in(schema: Any) -> Iterator[str]:
    for name, value in schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ():
        if name == "pattern" and isinstance(value, str):
            yield value
        else:
            yield from _patterns_in(value)


def _first_line(error: object) -> str:
    """An error of llguidance on one line and without a full stop: of a regular expression's, what is wrong there."""
    text = str(error)
    if "regex parse error" in text and "error: " in text:
        text = "regex parse error: " + text.rsplit("error: ", 1)[1].split("\n")[0]
    return " ".join(text.split("<state>")[0].split()).rstrip(". ")[:200]
