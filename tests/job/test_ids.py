"""Ids that occur more than once: found as a dictionary finds them, in memory that does not grow."""

import json
import random
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.errors import LookaheadError
from lookahead.job import rows as job_rows
from lookahead.job.rows import Request, without_duplicates

NAMES = st.one_of(
    st.integers(-3, 30),
    st.builds("{}{}".format, st.sampled_from(["", "q", "q0", "q-", "7", "1.", '"', "é\n"]), st.integers(0, 30)),
    st.sampled_from(["", "q", "007", "q00", "9" * 40]),
)


@settings(deadline=None)
@given(st.lists(NAMES, max_size=120))
def test_ids_are_found_as_a_dictionary_finds_them(names):
    known: dict[str, int] = {}
    found = without_duplicates(Request(name, line, prompt="p") for line, name in enumerate(names, 1))
    for line, (name, request) in enumerate(zip(names, found, strict=True), 1):
        before = known.setdefault(json.dumps(name), line)
        assert request.problem == ("" if before == line else f"the id {json.dumps(name)} stands on line {before}, too")


def test_more_ids_than_memory_is_given_are_found(monkeypatch):
    monkeypatch.setattr(job_rows, "IDS_KIB", 64)
    draw = random.Random(1)
    names = [f"{draw.getrandbits(64):x}" for _ in range(20_000)]
    found = [*without_duplicates(Request(name, line, prompt="p") for line, name in enumerate(names * 2, 1))]
    assert not any(request.problem for request in found[: len(names)])
    assert [request.problem.split()[-2] for request in found[len(names) :]] == [f"{n}," for n in range(1, len(names) + 1)]


def test_disk_without_room_for_ids_is_one_error(monkeypatch):
    connect = sqlite3.connect

    def connect_to_little(*arguments, **options):
        database = connect(*arguments, **options)
        database.execute("PRAGMA max_page_count = 8")
        return database

    monkeypatch.setattr(sqlite3, "connect", connect_to_little)
    with pytest.raises(LookaheadError, match=r"the ids of rows cannot be kept \(database or disk is full\): make room"):
        list(without_duplicates(Request(line, line, prompt="p") for line in range(1, 20_000)))


def test_the_second_row_names_the_line_of_the_first_in_its_file():
    rows = [("a", 1, "x"), ("b", 7, "x"), (3, 2, "y"), (4, 3, "y"), ("b", 9, "y"), ("a", 1, "x.gz"), (4, 2, "x.gz")]
    found = without_duplicates(Request(name, line, prompt="p", file=file) for name, line, file in rows)
    problems = [request.problem for request in found]
    assert problems[:4] == [""] * 4
    lines = [("b", 7, "x"), ("a", 1, "x"), (4, 3, "y")]
    places = [(json.dumps(name), Request(None, line, file=file).where) for name, line, file in lines]
    assert problems[4:] == [f"the id {name} stands on {where}, too" for name, where in places]
