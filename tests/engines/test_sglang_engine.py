"""SGLang as the engine of a job: what it is asked in its words, against recorded answers; its interface, if it is installed."""

import asyncio
import importlib.util
import inspect
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead.decode.constraint import Constraint
from lookahead.decode.request import Generation
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.engines import sglang, sglang_engine
from lookahead.engines.requests import LINK, Link, NewTokens, Requests, serve
from lookahead.engines.sglang_engine import SglangEngine, SglangSettings, params_of
from lookahead.errors import LookaheadError, UsageError
from lookahead.models.options import ModelOptions
from tests.support.jobs import MODEL

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
LOGPROBS = {"output_token_logprobs": [(-0.5, 7, None)], "output_top_logprobs": [[(-0.5, 7, None), (-1.0, 9, None)]]}


def answer_of(ids: list[int], reason: dict[str, Any], **about: Any) -> dict[str, Any]:
    """As SGLang 0.5.23 answered."""
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, "e2e_latency": 0.5, **about}}


class FakeEngine:
    """Answers by the first token of a prompt."""

    ANSWERS: dict[int, Any] = {  # noqa: RUF012
        1: answer_of([5, 6, 7, 8, 9], {"type": "length", "length": 5}, spec_verify_ct=2, spec_num_proposed_drafts=14),
        2: answer_of([5, 6, 7, 8], {"type": "stop", "matched": "b"}, spec_verify_ct=1, spec_num_proposed_drafts=7),
        3: ValueError("too long\nby far"),
        4: answer_of([7], {"type": "stop", "matched": 7}, **LOGPROBS),
        5: answer_of([], {"type": "abort", "message": "Aborted"}),
    }

    def __init__(self) -> None:
        self.loop, self.asked = asyncio.new_event_loop(), list[dict[str, Any]]()
        model = SimpleNamespace(vocab_size=50, dtype="torch.float32")
        self.tokenizer_manager = SimpleNamespace(
            model_config=model, context_len=64, num_reserved_tokens=8, abort_request=lambda abort_all: self.asked.clear()
        )
        self.server_args = SimpleNamespace(device="cuda", quantization=None, max_running_requests=None)
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": 1000}])

    async def async_generate(self, **asked: Any) -> Any:
        self.asked.append(asked)
        found = self.ANSWERS[asked["input_ids"][0]]
        if isinstance(found, Exception):
            raise found
        await asyncio.sleep(0 if found["output_ids"] else 60)
        return found


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(sglang_engine, "_started", lambda arguments: FakeEngine())
    monkeypatch.setattr(sglang_engine, "FAILED", [])
    texts = SimpleNamespace(decode=lambda ids, **options: "".join("?????abcd"[each] for each in ids))
    return SglangEngine(SglangSettings(ModelOptions("m"), own={"speculative_algorithm": "NGRAM"}, batch_size=2), texts)


def test_rows_end_as_sglang_says(engine):
    asked = [engine.request([1, 1], 5), engine.request([2], 9, Sampling(stop=["b"])), engine.request([3]), engine.request([4])]
    asked[3].logprobs = 2
    assert {id(each) for each in engine.run(iter(asked))} == set(map(id, asked))
    whole, stopped, refused, scored = asked
    assert (whole.token_ids, whole.finish_reason) == ([5, 6, 7, 8, 9], "length")
    assert (whole.steps, whole.accepted_tokens, whole.draft_tokens, whole.seconds) == (2, 2, 14, 0.5)
    assert (stopped.token_ids, stopped.finish_reason) == ([5, 6], "stop"), "tokens behind the stop text are cut"
    assert str(refused.error) == "SGLang refuses it: too long."
    ((token,),) = ([(each.token_id, each.logprob, each.top)] for each in scored.token_logprobs)
    assert token == (7, -0.5, ((7, -0.5), (9, -1.0)))
    assert (scored.token_ids, scored.text_ids) == ([7], []), "the token that ended it is no text"
    assert (stopped.text_ids, whole.text_ids) == (stopped.token_ids, whole.token_ids)
    assert engine.target.longest_text == 56, "SGLang reserves positions for a tree"


def test_a_job_that_stops_or_fails_leaves_nothing_running(engine):
    fake = engine._engine
    assert list(engine.run(iter([engine.request([5])]), lambda: True)) == []
    assert (fake.asked, engine._tasks) == ([], {})
    sglang_engine.FAILED.append(3)
    assert list(engine.run(iter([engine.request([1])]), lambda: True)) == [], "Ctrl-C has ended it, too"
    with pytest.raises(LookaheadError, match=r"SGLang has died .*one of its processes has ended"):
        list(engine.run(iter([engine.request([1])])))


def test_what_a_device_verifies_greedily_is_not_sampled(engine):
    engine.request([1], sampling=Sampling(temperature=1.0))
    engine.device = "cpu"
    with pytest.raises(UsageError, match="verifies drafts greedily on cpu"):
        engine.request([1], sampling=Sampling(temperature=1.0))
    engine.target = sglang_engine.ForeignTarget("m", 50, 64, {"repetition_penalty": 1.1}, True)
    with pytest.raises(UsageError, match="generation config has a repetition_penalty"):
        engine.request([1])
    engine.request([1], sampling=Sampling(repetition_penalty=1.0))


def test_requests_are_asked_in_its_words():
    def asked(sampling):
        return params_of(Generation([1], 9, frozenset(), sampling, 3), 1.0)

    assert asked(Sampling())["temperature"] == 0
    assert asked(Sampling())["sampling_seed"] is None
    found = asked(Sampling(temperature=0.5, top_k=4, logit_bias={5: 1.0}, stop=["a"], min_new_tokens=40))
    assert (found["temperature"], found["top_k"], found["sampling_seed"], found["logit_bias"]) == (0.5, 4, 3, {"5": 1.0})
    assert (found["stop"], found["min_new_tokens"], found["max_new_tokens"]) == (["a"], 9, 9)
    for kind, text, field, said in (
        ("regex", "a+", "regex", "a+"),
        ("choice", '["a.b", "c"]', "regex", r"(a\.b|c)"),
        ("json_schema", "{}", "json_schema", "{}"),
        ("grammar", 'root ::= "a"', "ebnf", 'root ::= "a"'),
    ):
        assert asked(Sampling(constraint=Constraint(kind, text)))[field] == said
    with pytest.raises(UsageError, match="not Lark's form"):
        asked(Sampling(constraint=Constraint("grammar", 'start: "a"')))


def test_arguments_of_sglang_are_those_of_the_job():
    on_cpu = {"device": "cpu"}
    settings = SglangSettings(ModelOptions("org/m"), ("a.trie",), (), DraftOptions(), 6, batch_size=16, engine_args=on_cpu)
    found = settings.arguments()
    assert (found["model_path"], found["max_running_requests"], found["dtype"]) == ("org/m", 16, "float32")
    assert (found["speculative_algorithm"], found["speculative_num_draft_tokens"]) == ("LOOKAHEAD", 7)
    assert settings.drafting()["tries"] == [os.path.abspath("a.trie")]
    assert "speculative_algorithm" not in SglangSettings(ModelOptions("m"), drafts=DraftOptions("off")).arguments()
    with pytest.raises(UsageError, match="is set by --batch-size"):
        SglangSettings(ModelOptions("m"), engine_args={"max_running_requests": 4}).arguments()


def test_an_unknown_version_answers_without_drafts_with_one_warning(monkeypatch, caplog):
    started = list[dict[str, Any]]()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.1")

    def start(arguments):
        started.append(arguments)
        return FakeEngine()

    monkeypatch.setattr(sglang_engine, "_started", start)
    engine = SglangEngine(SglangSettings(ModelOptions("m"), batch_size=2), None)
    assert "speculative_algorithm" not in started[0]
    assert not engine.target.drafts
    (record,) = caplog.records
    assert "SGLang 0.99.1 is not one" in record.getMessage()


def test_a_job_asks_the_drafter_of_another_process(make_trie, monkeypatch):
    requests = Requests(Drafter([make_trie([[1, 2, 3, 4, 5]], 50)], DraftOptions("hierarchical", recycle=False)))
    link = Link()
    try:
        serve(requests, threading.Lock())
        assert link.call("count_accepted") == [True]
        requests.begin("a", [1])
        (tree,) = requests.step([NewTokens("a", [2], 8)])
        assert tree.token_ids[:4].tolist() == [2, 3, 4, 5]
        text = np.array([1, 2, 3, 4, 9], np.int32).tobytes()  # the last step has not come to the drafter
        assert link.call("accepted", [(text, 1), (text, 1)]) == [[{"trie:corpus": 2}, {}]]
        assert link.call("forget") == [None]
        assert not len(requests)
    finally:
        link.close()
    assert LINK not in os.environ
    assert link.call("forget") == []


# ---- where SGLang is installed
@pytest.mark.sglang
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
def test_what_a_job_uses_of_sglang_is_as_it_was():
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

    asked = params_of(Generation([1], 9, frozenset(), Sampling(constraint=Constraint("regex", "a")), 3), 1.0)
    assert asked.keys() | {"ebnf", "json_schema"} <= set(SamplingParams.__struct_fields__)
    model = ModelOptions("m", revision="r", tokenizer="t")
    found = SglangSettings(model, drafts=DraftOptions(), batch_size=2, share=2).arguments()
    assert found.keys() | sglang_engine.OURS.keys() | {"device"} <= set(ServerArgs.__struct_fields__)
    assert sglang.unknown_version() == ""


@pytest.mark.sglang
@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
def test_its_engine_takes_what_a_job_asks(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(MODEL), "../tests/support/sglang_on_cpu"))
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    taken = inspect.signature(Engine.async_generate).parameters
    assert {"input_ids", "rid", "sampling_params", "return_logprob", "top_logprobs_num"} <= taken.keys()
    assert {"flush_cache", "shutdown"} <= set(dir(Engine))
    assert "abort_all" in inspect.signature(TokenizerManager.abort_request).parameters
    assert not inspect.signature(TokenizerManager.auto_create_handle_loop).parameters.keys() - {"self"}
