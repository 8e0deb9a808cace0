"""Finding texts among sorted suffixes, against a scan; on arrays that lie, nothing outside of them is reached."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.trie.search import child_ranges, matching_range
from lookahead.trie.suffixes import DEPTH
from tests.support.depth import some_deep
from tests.support.tries import VOCAB_SIZES, segment_of


def orders(index, context, longest=DEPTH):
    """[(low, high) of the last m tokens for m = 1, 2, ...] as far as there is a match."""
    found = []
    for length in range(1, min(longest, len(context)) + 1):
        low, high = one_range(index, context[-length:])
        if low == high:
            break
        found.append((low, high))
    return found


def one_range(index, pattern):
    low, high = matching_range(index.tokens, index.suffixes, index.first, np.array(pattern, np.int32), 0, len(pattern))
    return int(low), int(high)


def children(index, length, low, high):
    return child_ranges(index.tokens, index.suffixes, length, low, high)


def test_more_than_sixteen_children_are_all_found():
    index = segment_of([[0, token] for token in range(1, 41)], 50)
    below, _, _ = children(index, 1, *one_range(index, [0]))
    assert below.tolist() == list(range(1, 41))


@pytest.mark.parametrize("vocab_size", some_deep([2, *VOCAB_SIZES], [VOCAB_SIZES[-1]]))
def test_matching_range_among_thousands_of_suffixes_holds_all_places_of_a_pattern(vocab_size):
    random = np.random.default_rng(vocab_size)
    last = vocab_size - 1
    documents = [(random.integers(0, 2, 700) * last).tolist(), [last] * 600, [0, last] * 300, [0] * 300]
    documents += [[0] * n + [last] * m for n in range(12) for m in range(1, 12)]
    index = segment_of(documents, vocab_size)
    letters = {0: "a", last: "b", vocab_size: "|"}
    text = "".join(letters[token] for token in index.tokens.tolist())
    contexts = [d[at : at + 40] for d in documents[:4] for at in range(0, 300, 7)] + [d[-40:] for d in documents]
    contexts += [[token, *d[:8], *rest] for d in documents[:40] for token in (0, last) for rest in ([], [0])]
    for context in contexts:
        for length in range(1, min(DEPTH, len(context)) + 1):
            pattern = context[-length:]
            places = re.finditer(f"(?={''.join(letters[token] for token in pattern)})", text)
            low, high = one_range(index, pattern)
            assert sorted(index.suffixes[low:high].tolist()) == [place.start() for place in places]


# ---- arrays that lie
# Inside, at and just over the end of 60 tokens, and what turns negative in a signed 64-bit integer.
positions = st.one_of(
    st.integers(0, 70), st.sampled_from([59, 60, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
)


@given(st.lists(positions, max_size=40), st.lists(positions, min_size=5, max_size=5), st.integers(0, 1 << 16), st.booleans())
def test_ranges_stay_inside_whatever_suffixes_and_table_say(suffixes, first, seed, sort):
    """The tokens are the middle of a larger array of sevens: one read outside of it would show as a child."""
    around = np.full(260, 7, np.uint16)
    tokens = around[100:160]
    random = np.random.default_rng(seed)
    tokens[:] = random.integers(0, 5, 60)  # 4 is the separator; the last token need not be one
    index = SimpleNamespace(
        tokens=tokens, suffixes=np.array(sorted(suffixes) if sort else suffixes, np.uint64),
        first=np.array(first, np.uint64),
    )  # fmt: skip
    for context in (random.integers(0, 4, 40).tolist(), tokens[:30].tolist(), [-1, 5, 1 << 30, 1]):
        assert_inside(index, context)


def assert_inside(index, context):
    size = len(index.suffixes)
    found = orders(index, context, 36)
    assert all(0 <= low < high <= size for low, high in found)
    for m in range(1, min(36, len(context)) + 1):
        low, high = one_range(index, context[-m:])
        assert 0 <= low <= high <= size
        below, lows, highs = children(index, m, low, high)
        assert set(below.tolist()) <= set(index.tokens.tolist())
        assert all(low <= a < b <= high for a, b in zip(lows, highs, strict=True))
