"""The memory of the running job: its runs against a plain sort, its bound, its left context."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.trie import session
from lookahead.trie.session import CLOSED, SessionMemory
from lookahead.trie.suffixes import DEPTH

token = st.sampled_from([0, 1, 2, 70_000])
piece = st.tuples(st.lists(token, min_size=1, max_size=4), st.sampled_from([1, 1, 2, 15]))
texts = st.lists(piece, max_size=4).map(lambda pieces: [token for some, times in pieces for token in some * times])
documents_with_left_context = st.lists(st.tuples(st.lists(token, max_size=3), texts), min_size=1, max_size=8)


def text_of(memory):
    return memory.tokens[: len(memory)].tolist()


def outputs_of(memory):
    """The remembered texts, each with its left context."""
    outputs = [[]]
    for token in text_of(memory):
        if token == CLOSED:
            outputs.append([])
        else:
            outputs[-1].append(token)
    assert outputs.pop() == []  # the last one is closed, too
    return outputs


def sorted_plainly(tokens, positions):
    """By the text up to its end, 32 tokens of it at most; then by position."""

    def key(position):
        end = tokens.index(CLOSED, position)
        return tokens[position : end + 1][:DEPTH], position

    return sorted(positions, key=key)


def assert_sorted_and_whole(memory):
    """Each run is sorted, its table fits; together they hold every position once, the older run the older ones."""
    tokens = text_of(memory)
    held = [run.suffixes.tolist() for run in memory.runs]
    for positions, run in zip(held, memory.runs, strict=True):
        assert positions == sorted_plainly(tokens, positions)
        starts = [tokens[position] for position in positions]
        assert all(token < len(run.first) - 1 for token in starts)
        for token in {0, 1, 2, 3, 69_999, 70_000, *starts}:
            if token < len(run.first) - 1:
                low, high = run.first[token : token + 2].tolist()
                assert starts[low:high] == [token] * starts.count(token)
        assert run.first[-1] == len(positions)
    assert sorted(held[0] + held[1]) == [position for position, token in enumerate(tokens) if token != CLOSED]
    assert max(held[0], default=-1) < min(held[1], default=len(tokens))


@given(documents_with_left_context, st.sampled_from([(1, 1), (1, 4), (1, 1000), (10, 2), (30, 8), (1 << 14, 8)]))
def test_runs_are_sorted_and_hold_each_output_from_its_last_left_token_on(documents, merging):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RECENT", merging[0])
        patch.setattr(session, "SHARE", merging[1])
        memory, remembered, older, recent = SessionMemory(1_000_000), [], 0, 0
        for left, ids in documents:
            memory.append_documents([(left, ids)])
            if ids:
                remembered.append([*left[-1:], *ids])
                recent += len(remembered[-1])
            assert outputs_of(memory) == remembered
            assert_sorted_and_whole(memory)
            if recent >= max(merging[0], older // merging[1]):
                older, recent = older + recent, 0
            assert [len(run.suffixes) for run in memory.runs] == [older, recent]


@given(documents_with_left_context, st.integers(2, 90), st.sampled_from([(1, 1000), (10, 2), (1 << 14, 8)]))
def test_full_memory_lets_the_oldest_outputs_go_whole_and_keeps_the_newest(documents, capacity, merging):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RECENT", merging[0])
        patch.setattr(session, "SHARE", merging[1])
        memory, remembered = SessionMemory(capacity), []
        for left, ids in documents:
            before = outputs_of(memory)
            memory.append_documents([(left, ids)])
            if not ids:
                continue
            remembered.append([*left[-1:], *ids][-(capacity - 1) :])
            kept = outputs_of(memory)
            assert kept == remembered[-len(kept) :]
            assert len(memory) == sum(map(len, kept)) + len(kept) <= len(memory.tokens) <= capacity
            assert_sorted_and_whole(memory)
            if len(kept) <= len(before):  # some had to go: as few as leave half of the room, or the room that is needed
                goal = min(capacity // 2, capacity - len(remembered[-1]) - 1)
                spared = [len(output) + 1 for output in kept[:-1]]
                assert sum(spared) <= goal
                assert sum(spared) + len(before[-len(spared) - 1]) + 1 > goal


def test_memory_of_outputs_grows_with_them_and_not_before():
    memory = SessionMemory(4_000_000)
    assert len(memory.tokens) <= 1 << 12
    tokens = np.random.default_rng(0).integers(0, 5, 20_000)
    for start in range(0, 20_000, 400):
        memory.append_documents([([], tokens[start : start + 400])])
    assert [token for output in outputs_of(memory) for token in output] == tokens.tolist()
    assert len(memory.tokens) <= 2 * len(memory)
    assert all(len(run.suffixes) for run in memory.runs)  # 20,000 are more than one run takes as it ships
    assert_sorted_and_whole(memory)


@pytest.mark.parametrize("capacity", [0, 1])
def test_memory_without_room_for_a_token_and_its_end_remembers_nothing(capacity):
    memory = SessionMemory(capacity)
    version = memory.version
    memory.append_documents([([5], [1, 2, 3])])
    assert (len(memory), memory.version) == (0, version)
    assert [len(run.suffixes) for run in memory.runs] == [0, 0]


def test_cleared_memory_is_as_new():
    memory = SessionMemory(100)
    memory.append_documents([([9], [1, 2, 1])])
    version = memory.version
    memory.clear()
    assert len(memory) == 0
    assert memory.version != version
    assert [(len(run.suffixes), run.first.tolist()) for run in memory.runs] == [(0, [0])] * 2
    memory.append_documents([([8], [3])])
    assert outputs_of(memory) == [[8, 3]]
    assert_sorted_and_whole(memory)


@given(
    documents_with_left_context, documents_with_left_context, st.sampled_from([(1, 1), (10, 2), (1 << 14, 8)]), st.booleans()
)
def test_what_runs_is_found_like_outputs_until_it_runs_no_more(documents, running, merging, fits):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "RECENT", merging[0])
        patch.setattr(session, "SHARE", merging[1])
        memory, alone = (SessionMemory(1_000_000 if fits else 40) for _ in range(2))
        for number, document in enumerate(documents):
            of_running = running[: number + 1]
            memory.set_running(of_running)
            memory.append_documents([document])
            alone.append_documents([document])
            texts = [[*left[-1:], *ids, int(CLOSED)] for left, ids in of_running if ids]
            text = [*text_of(alone), *(token for each in texts for token in each)]
            held = sorted(position for run in memory.runs for position in run.suffixes.tolist())
            if len(text) > memory.capacity:
                text = text_of(alone)
            assert memory.tokens[: len(text)].tolist() == text
            assert held == [position for position, token in enumerate(text) if token != CLOSED]
            for run in memory.runs:
                assert run.suffixes.tolist() == sorted_plainly(text, run.suffixes.tolist())
                assert run.first[-1] == len(run.suffixes)
        memory.set_running([])
        memory.append_documents([])
        assert outputs_of(memory) == outputs_of(alone)
        assert_sorted_and_whole(memory)
