"""Checksum-valid files whose arrays lie, by the thousand: edits refuse them with one line, or write a file that verifies."""

import collections
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead.errors import LookaheadError, TrieFormatError
from lookahead.trie.file import Trie
from tests.support.tries import ARRAYS, append_ids, arrays_of, build_ids, rewrite_arrays
from tests.trie.test_hostile import EDITS

FILES = int(os.environ.get("HOSTILE_FILES", 1200))  # each goes through every edit


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """One segment, two, one of 16-bit tokens, and one that was pruned: fewer suffixes than tokens."""
    folder = tmp_path_factory.mktemp("honest")
    crowded = [[1, 2] * 150, [1] * 200, [2, 1, 3], [7], [1, 2, 3, 4, 5]]
    one = build_ids(folder / "one.trie", crowded)
    build_ids(folder / "two.trie", crowded[1:])
    two = append_ids(folder / "two.trie", [[1, 2, 3], [4, 4, 4, 4]], source="b")
    wide = build_ids(folder / "wide.trie", [[1, 2, 65534, 3, 1, 2], [65534] * 40], vocab_size=70000)
    pruned = build_ids(folder / "pruned.trie", crowded, min_count=3)
    return [one, two, wide, pruned]


def altered(trie: Trie, random: np.random.Generator) -> tuple[dict[str, np.ndarray], Any]:
    """Arrays of the first segment, some of them with lies of one kind, and a header that may lie, too."""
    arrays = arrays_of(trie.segments[0])
    for name in random.choice(ARRAYS, random.integers(1, 4), replace=False):
        array = arrays[name]
        if not len(array):
            continue
        place, other = random.integers(len(array), size=2)
        match random.integers(6):
            case 0:  # one value
                array[place] = [0, 1, 2, len(array), int(array.max()), np.iinfo(array.dtype).max][random.integers(6)]
            case 1:  # near what was there
                array[place] = int(array[place]) + 1 if array[place] < np.iinfo(array.dtype).max else 0
            case 2:
                array[[place, other]] = array[[other, place]]
            case 3:
                array[place] = array[other]
            case 4:  # a stretch reversed
                low, high = sorted((place, other))
                array[low : high + 1] = array[low : high + 1][::-1].copy()
            case 5:  # many
                picked = random.random(len(array)) < random.choice([0.02, 0.5])
                array[picked] = random.integers(0, int(array.max()) + 2, picked.sum()).astype(array.dtype)
    header = trie.header
    if random.random() < 0.2:
        sources = list(header.sources)
        sources[0] = dataclasses.replace(sources[0], name=str(random.choice(["a", "", "[b]", "x" * 300])))
        header = dataclasses.replace(header, sources=tuple(sources), options={"note": "\u202e[/b]"})
    return arrays, header


def outcome(edit: Callable[[Path], Trie], path: Path) -> str:
    """What came of an edit of the file at `path`."""
    before = path.read_bytes()
    try:
        edited = edit(path)
    except LookaheadError as error:
        said = str(error)
        assert "\n" not in said
        assert path.read_bytes() == before
        assert not path.with_name("out.trie").exists()
        return "refused" if isinstance(error, TrieFormatError) else "nothing left"
    edited.verify()
    return "verifies"


def test_edits_of_hostile_files_are_refused_or_verify(honest, tmp_path):
    random = np.random.default_rng(20240607)
    counts = collections.Counter()
    for number in range(FILES):
        arrays, header = altered(honest[number % len(honest)], random)
        vocab_size = header.vocab_size
        for edit in EDITS:
            path = tmp_path / "hostile.trie"
            rewrite_arrays(honest[number % len(honest)], path, arrays, header)
            if vocab_size != 10 and edit.__name__ in ("appended", "joined_by_an_append"):
                result = outcome(lambda path: append_ids(path, [[1, 2, 3]], vocab_size=vocab_size), path)  # noqa: B023
            else:
                result = outcome(edit, path)
            counts[edit.__name__, result] += 1
            path.with_name("out.trie").unlink(missing_ok=True)
    print(sum(counts.values()), "edits of", FILES, "files:", dict(counts))
    assert {edit for edit, result in counts if result == "refused"} == {edit.__name__ for edit in EDITS}
    assert {left.name for left in tmp_path.iterdir()} <= {"hostile.trie"}
