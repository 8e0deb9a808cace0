"""A str or Path given where several may stand is one value; what one request may ask is bounded and made of numbers."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from lookahead import (
    Drafter,
    GenerationParams,
    LookaheadEngine,
    TokenDocument,
    Trie,
    append_trie,
    build_trie,
    merge_tries,
    prune_trie,
)
from lookahead.decode import limits
from lookahead.decode.chooser import CountPenalty
from lookahead.decode.constraint import Constraint
from lookahead.decode.sampling import Sampling
from lookahead.draft.options import DraftOptions
from lookahead.errors import UsageError
from lookahead.job.setup import EngineSettings
from lookahead.models.options import ModelOptions
from lookahead.token_documents import TokenizerIdentity
from tests.support.jobs import MODEL

WHOSE = TokenizerIdentity(10)


@pytest.fixture(scope="module")
def engine():
    return LookaheadEngine(str(MODEL), device="cpu", drafts=DraftOptions("off"))


def test_fields_of_sampling_take_one_or_several():
    params = GenerationParams(stop="END", stop_token_ids=7)
    assert (params.stop, params.stop_token_ids) == (("END",), (7,))
    assert Sampling(stop=["a", "b"], stop_token_ids=np.array([3, 4])) == Sampling(stop=("a", "b"), stop_token_ids=(3, 4))
    assert Sampling(stop_token_ids=torch.tensor([5])[0]) == Sampling(stop_token_ids=(5,))
    assert Sampling(bad_words_ids=[[1, 2], np.array([3])]).bad_words_ids == ((1, 2), (3,))
    assert Sampling(stop=None).stop == ()
    penalty = CountPenalty(1, 0.5, 0.0)
    assert Sampling(processors=penalty).processors == (penalty,)
    assert dataclasses.replace(params, seed=1).stop == ("END",)


@pytest.mark.parametrize(
    ("wish", "saying"),
    [
        ({"bad_words_ids": [5, 6]}, "flat list: give a list of lists"),
        ({"bad_words_ids": "abc"}, "bad_words_ids: got 'abc'"),
        ({"bad_words_ids": [[]]}, "empty entries"),
        ({"stop": 5}, "stop: got 5. Give text or a list of texts"),
        ({"stop": b"END"}, "stop: got b'END'"),
        ({"stop": ["a", 3]}, "stop: got 3"),
        ({"stop": ""}, "empty entries"),
        ({"stop_token_ids": "12"}, "stop_token_ids: got '12'"),
        ({"stop_token_ids": [True]}, "stop_token_ids: got True"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids: got 1.0"),
    ],
)
def test_what_is_neither_one_nor_several_is_refused(wish, saying):
    with pytest.raises(UsageError, match=saying.replace("[", r"\[")):
        GenerationParams(**wish)


def test_trie_given_as_one_path_is_one_trie_everywhere(tmp_path):
    path = tmp_path / "a.trie"
    build_trie(TokenDocument([1, 2, 3], "s"), path, WHOSE)
    append_trie(TokenDocument([4, 5], "t"), path, WHOSE)
    for one in (str(path), path, Trie(path)):
        assert [trie.path for trie in Drafter(one).tries] == [path]
    assert Drafter(path, weights=2.0).source_names[-1] == "trie:a"
    for paths in (str(path), path, [path]):
        assert merge_tries(paths, tmp_path / "b.trie").tokens == Trie(path).header.tokens
    assert prune_trie(path, tmp_path / "c.trie", drop_sources="t").documents == 1
    assert EngineSettings(ModelOptions("m"), str(path), 2.0) == EngineSettings(ModelOptions("m"), (str(path),), (2.0,))


def test_documents_that_are_none_are_refused(tmp_path):
    for wrong in ("some text", ["some text"], [TokenDocument("abc", "s")]):
        with pytest.raises(UsageError, match="give TokenDocuments of token ids"):
            build_trie(wrong, tmp_path / "a.trie", WHOSE)
    assert not (tmp_path / "a.trie").exists()
    with pytest.raises(UsageError, match="no trie to merge"):
        merge_tries([], tmp_path / "a.trie")


# ---- what one request may ask
TOO_MUCH = [
    {"stop": ["x"] * (limits.STOPS + 1)},
    {"stop": "x" * (limits.STOP_LENGTH + 1)},
    {"stop_token_ids": [1] * (limits.STOP_IDS + 1)},
    {"bad_words_ids": [[1]] * (limits.BAD_WORDS + 1)},
    {"bad_words_ids": [[1] * (limits.BAD_WORD_LENGTH + 1)]},
    {"logit_bias": dict.fromkeys(range(limits.BIASES + 1), 1.0)},
    {"constraint": Constraint.of("regex", "a" * (limits.CONSTRAINT_LENGTH + 1))},
    {"logprobs": limits.LOGPROBS + 1},
]


@pytest.mark.parametrize("wish", TOO_MUCH, ids=lambda wish: str(wish)[:20])
def test_more_than_one_request_may_ask_is_refused(wish):
    with pytest.raises(UsageError, match=r"at most|(128|64) are allowed"):
        GenerationParams(**wish)


def test_as_much_as_one_request_may_ask_is_taken():
    GenerationParams(
        stop=["x" * limits.STOP_LENGTH] * limits.STOPS,
        stop_token_ids=[1] * limits.STOP_IDS,
        bad_words_ids=[[1] * limits.BAD_WORD_LENGTH] * limits.BAD_WORDS,
        logit_bias=dict.fromkeys(range(limits.BIASES), 1.0),
        logprobs=limits.LOGPROBS,
    )


NO_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, 10**400]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=[f"{value!r:.9}" for value in NO_NUMBERS])
def test_values_that_are_no_numbers_are_refused(value):
    for name in (*limits.NUMBERS, *limits.COUNTS, "seed", "max_new_tokens", "logprobs"):
        may_be_none = name not in ("seed", "max_new_tokens", "frequency_penalty", "presence_penalty")
        if (name == "max_new_tokens" and value == 10**400) or (value is None and may_be_none):
            continue  # a limit that is cut to the model's positions; what the model says
        with pytest.raises(UsageError, match=f"{name} is"):
            GenerationParams(**{name: value})
    if value != -math.inf:
        with pytest.raises(UsageError, match="logit_bias of token 5"):
            Sampling(logit_bias={5: value})
    with pytest.raises(UsageError, match="logit_bias"):
        Sampling(logit_bias={value: 1.0})


def test_ids_that_the_model_does_not_have_and_biases_that_leave_no_token_are_refused(engine):
    size = engine._engine.target.vocab_size
    for wish in ({"stop_token_ids": size}, {"bad_words_ids": [[1, size]]}, {"logit_bias": {size: 1.0}}, {"stop_token_ids": -1}):
        (result,) = engine.generate("a", GenerationParams(**wish))
        assert "outside the model's vocabulary" in str(result.error)
    for bias in (-math.inf, -1e29):
        (result,) = engine.generate("a", GenerationParams(logit_bias=dict.fromkeys(range(size), bias)))
        assert "rules out every token" in str(result.error)
    all_but_one = dict.fromkeys(range(1, size), -math.inf)
    (result,) = engine.generate("a", GenerationParams(logit_bias={**all_but_one, 77: 0.0}, max_new_tokens=3, temperature=1.0))
    assert {*result.token_ids} <= {0, 77}
