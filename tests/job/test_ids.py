"""Ids that occur more than once: found as a dictionary finds them, in memory that does not grow with ids that are counted."""

import json
import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.job import ids
from lookahead.job.ids import SeenIds
from lookahead.job.rows import Request, without_duplicates

NAMES = st.one_of(
    st.integers(-3, 30),
    st.builds("{}{}".format, st.sampled_from(["", "q", "q0", "q-", "7", "1.", '"', "é\n"]), st.integers(0, 30)),
    st.sampled_from(["", "q", "007", "q00", "9" * 40]),
)
STRETCHES = st.lists(st.tuples(NAMES, st.integers(1, 12)), max_size=20)


@settings(deadline=None)
@given(STRETCHES, st.sampled_from([1, 2, 5]))
def test_ids_are_found_as_a_dictionary_finds_them(stretches, shortest):
    """A stretch counts up from an id, and repeats one that has no number."""
    seen, known, line = SeenIds(), dict[str, int](), 0
    ids.SHORTEST_RUN = shortest
    for first, length in stretches:
        for offset in range(length):
            line += 1
            counted = f"{first}{offset}" if isinstance(first, str) else first + offset
            name = json.dumps(counted)
            assert seen.add(name, line) == known.get(name)
            known.setdefault(name, line)


def test_table_grows_with_its_ids():
    draw = random.Random(1)
    names = [f'"{draw.getrandbits(64):x}x"' for _ in range(20_000)]
    seen = SeenIds()
    assert not any(seen.add(name, line) for line, name in enumerate(names, 1))
    assert [seen.add(name, 0) for name in names] == list(range(1, 20_001))


def test_ids_that_are_counted_take_no_memory():
    seen = SeenIds()
    tracemalloc.start()
    for line in range(1, 50_000):
        assert seen.add(f'"row-{line}"', line) is None
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 10_000
    assert seen.add('"row-777"', 60_000) == 777


def test_the_second_row_names_the_line_of_the_first_in_its_file():
    rows = [("a", 1, "x"), ("b", 7, "x"), (3, 2, "y"), (4, 3, "y"), ("b", 9, "y"), ("a", 1, "x.gz"), (4, 2, "x.gz")]
    found = without_duplicates(Request(name, line, prompt="p", file=file) for name, line, file in rows)
    problems = [request.problem for request in found]
    assert problems[:4] == [""] * 4
    lines = [("b", 7, "x"), ("a", 1, "x"), (4, 3, "y")]
    places = [(json.dumps(name), Request(None, line, file=file).where) for name, line, file in lines]
    assert problems[4:] == [f"the id {name} stands on {where}, too" for name, where in places]
