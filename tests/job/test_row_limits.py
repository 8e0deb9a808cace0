"""No row takes a job down: what one may ask is bounded, many samples give way to other rows, long prompts cost little."""

import dataclasses
from typing import Any

import pytest

from lookahead.decode import engine as engine_module
from lookahead.decode.engine import DecodingEngine, Generation
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError
from lookahead.job import rows as job_rows
from lookahead.job.journal import FinishedRow
from lookahead.job.params import Request
from lookahead.job.rows import parse_row, prompts_of
from lookahead.job.runner import MANY_AT_ONCE, SAMPLES_IN_TURN, JobOptions, run_rows
from lookahead.models.probe import probed
from tests.support.depth import deep


class Job:
    """Rows of ids, answered by a tiny model of random weights. made: generations that had been made as each row was written."""

    def __init__(self, model: Any):
        self.target = probed(model, "llama")
        self.made: list[int] = []

    def __call__(self, rows: list[dict[str, Any]], batch_size: int = 4, **options: Any) -> list[dict[str, Any]]:
        engine, written, made = DecodingEngine(self.target, Drafter([], DraftOptions("off")), batch_size), [], [0]
        request = engine.request

        def counted(*arguments: Any, **named: Any) -> Generation:
            made[0] += 1
            return request(*arguments, **named)

        engine.request = counted
        self.made = []

        def write(ended: FinishedRow) -> None:
            written.append(ended.row)
            self.made.append(made[0])

        requests = [dataclasses.replace(parse_row(row, n + 1), number=n) for n, row in enumerate(rows)]
        asked = JobOptions(**{"max_new_tokens": 3, "in_order": False, **options})
        run_rows(engine, None, requests, asked, write, lambda: False)
        return written


@pytest.fixture(scope="module")
def job(tiny_model):
    return Job(tiny_model("llama"))


def row(row_id: Any, **asked: Any) -> dict[str, Any]:
    return {"id": row_id, "prompt_ids": [5, 6, 7], "params": asked}


@pytest.mark.parametrize("batch_size", [4, *deep([1])])
def test_row_with_many_samples_lets_the_next_rows_pass_and_makes_few_at_a_time(job, batch_size):
    many, few = row("many", n=200, temperature=1.0), [row(number) for number in range(30)]
    written = [each["id"] for each in job([many, *few], batch_size)]
    assert written[-1] == "many"
    assert {*written[:-1]} == {*range(30)}
    assert job.made[0] <= SAMPLES_IN_TURN + 2 * batch_size + 2  # at the first row's end
    assert job.made[-1] == 201 + 60  # each row is checked by one that is not answered


def test_rows_with_many_samples_share_their_turns_and_open_few_at_once(job):
    rows = [row(f"many{number}", n=20 + number) for number in range(MANY_AT_ONCE + 3)]
    written = job([*rows, row("last")])
    assert {each["id"] for each in written} == {*(each["id"] for each in rows), "last"}
    assert [len(each.get("samples", [1])) for each in sorted(written, key=lambda each: each["id"])] == [1, *range(20, 27)]


def test_samples_are_the_same_whatever_else_is_answered(job):
    many = row("many", n=30, temperature=1.5)
    (alone,) = job([many], 1)
    for batch_size in (3, 7):
        beside = job([row(1), many, *(row(number) for number in range(2, 12))], batch_size)
        (found,) = (each for each in beside if each["id"] == "many")
        assert [sample["token_ids"] for sample in found["samples"]] == [sample["token_ids"] for sample in alone["samples"]]


def test_row_that_fails_begins_no_more_of_its_samples(job, monkeypatch):
    class Failing(engine_module.Sampler):
        def next_token(self, *arguments):
            if self.processors:
                raise ValueError("not me")
            return super().next_token(*arguments)

    monkeypatch.setattr(engine_module, "Sampler", Failing)
    rows = [row("bad", n=500, repetition_penalty=2.0), *(row(number) for number in range(5))]
    written = job(rows)
    assert {each["id"]: each["finish_reason"] == "error" for each in written} == {"bad": True, **dict.fromkeys(range(5), False)}
    assert job.made[-1] < 60


def test_samples_of_the_job_are_bounded_as_those_of_a_row(job):
    (failed,) = job([{"prompt_ids": [5]}], n=5000)
    assert "at most 1024" in failed["error"]["message"]


# ---- long prompts
def test_prompt_far_too_long_is_refused_by_counting_its_beginning(tokenizer):
    seen = []

    class Watched:
        def __call__(self, text, **options):
            seen.append(len(text))
            return tokenizer(text, **options)

    for text in ("the cat sat on the mat. " * 400_000, "a" * 10_000_000):
        seen.clear()
        with pytest.raises(LookaheadError, match="no room for an answer"):
            prompts_of(Request(1, 1, prompt=text), Watched(), longest=1024)
        assert sum(seen) <= job_rows.PIECE
    messages = [{"role": "user", "content": "dog " * 2_500_000}]
    with pytest.raises(LookaheadError, match="no room for an answer"):
        prompts_of(Request(1, 1, messages=messages), tokenizer, longest=2048)


@pytest.mark.parametrize("longest", [30, 64, 200, 100_000])
def test_prompt_that_fits_is_tokenized_as_a_whole(tokenizer, monkeypatch, longest):
    monkeypatch.setattr(job_rows, "PIECE", 7)
    for size in (1, 5, 20, 60):
        text = "the cat  sat onthe mat\n" * size
        ids = tokenizer(text)["input_ids"]
        if len(ids) <= longest:
            assert prompts_of(Request(1, 1, prompt=text), tokenizer, longest=longest) == [ids]
