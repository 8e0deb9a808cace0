"""lookahead::tree_attention: what sdpa says with a mask, from what each token sees alone, the same bits in any company."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from lookahead.backends.cpu.attention_cpu import NUMBERS
from lookahead.errors import ModelError
from lookahead.forward.tree_attention import tree_attention
from lookahead.forward.tree_meta import FIELDS, SLOT, arrange
from tests.support.plain_attention import reference

NO_LIMIT = 1 << 60
CAPACITY = 320
DTYPES = sorted(NUMBERS, key=str)
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # scores of up to 30 in the exponent

op = torch.ops.lookahead.tree_attention


@dataclasses.dataclass
class Step:
    """Trees behind texts. parents of each slot's tree, none: the slot brings nothing. pasts: tokens that slots hold."""

    parents: list[list[int]]
    pasts: list[int]
    window: int = NO_LIMIT
    chunk: int = NO_LIMIT
    filling: int = 0  # tokens at the end that only fill the pack up

    @property
    def tokens(self) -> int:
        return sum(map(len, self.parents))

    def meta(self) -> torch.Tensor:
        parents = np.concatenate([np.array(each, np.int32) for each in self.parents])
        limits = np.array([self.window]), np.array([self.chunk])
        sizes = np.array([len(each) for each in self.parents])
        meta = np.zeros((1, self.tokens + self.filling, FIELDS), np.int32)
        arrange(parents, parents, sizes, np.array(self.pasts), *limits, 0, np.zeros((4, meta.shape[1]), np.int64), meta)
        return torch.from_numpy(meta)[0]

    def seen(self, slot: int, node: int) -> list[int]:
        """Places that a node sees, in the order of their positions."""
        path: list[int] = []
        while node >= 0:
            path, node = [node, *path], self.parents[slot][node]
        past = self.pasts[slot]
        places = [*range(past), *(past + each for each in path)]
        position = len(places) - 1
        return places[max(0, position - self.window + 1, position // self.chunk * self.chunk) :]


def buffers(step: Step, heads: int, widths: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Keys and values; what is behind each slot's tree is not a number."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(len(step.pasts), heads, CAPACITY, width, generator=generator).to(dtype) for width in widths]
    for slot, (parents, past) in enumerate(zip(step.parents, step.pasts, strict=True)):
        for buffer in made:
            buffer[slot, :, past + len(parents) :] = float("nan")
    return made


def queries(step: Step, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(step.tokens + step.filling, heads, width, generator=generator).to(dtype)


@st.composite
def steps(draw: Any, slots: int = 4, sizes: Sequence[int] = (9, 17, 40, 70), pasts: Sequence[int] = (0, 63, 64, 200)) -> Step:
    """sizes of trees: as far as the first, and the others. pasts: texts longer than 20."""
    made, parents = [], []
    for _ in range(draw(st.integers(1, slots))):
        size = draw(st.one_of(st.integers(0, sizes[0]), st.sampled_from(sizes[1:])))
        back = draw(st.sampled_from([1, 2, 70]))  # 1: a chain
        random = np.random.default_rng(draw(st.integers(0, 9)))
        parents.append([-1, *(int(random.integers(max(0, node - back), node)) for node in range(1, size))] if size else [])
        made.append(draw(st.one_of(st.integers(0, 20), st.sampled_from(pasts))))
    if not any(parents):
        parents[0] = [-1]
    limit = st.sampled_from([NO_LIMIT, NO_LIMIT, 1, 5, 16, 100])
    return Step(parents, made, draw(limit), draw(limit), draw(st.sampled_from([0, 3])))


def assert_same_alone(attend: Any, step: Step, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seed: int):
    """The last node of each tree and one by the seed get the same bits at the end of a chain, and with no tree.

    attend: (query, keys, values, meta) -> outputs
    """
    outputs, first = attend(query, keys, values, step.meta()), 0
    for slot, parents in enumerate(step.parents):
        for node in {len(parents) - 1, seed % (len(parents) or 1)} if parents else ():
            path, at = [node], parents[node]
            while at >= 0:
                path, at = [at, *path], parents[at]
            past = step.pasts[slot]
            own = [torch.full_like(buffer[:1], float("nan")) for buffer in (keys, values)]
            for mine, buffer in zip(own, (keys, values), strict=True):
                mine[0, :, :past] = buffer[slot, :, :past]
                mine[0, :, past : past + len(path)] = buffer[slot, :, [past + each for each in path]]
            as_chain = dataclasses.replace(step, parents=[[*range(-1, len(path) - 1)]], pasts=[past], filling=0)
            tokens = [first + each for each in path]
            assert attend(query[tokens], *own, as_chain.meta()).equal(outputs[tokens])
            alone = dataclasses.replace(as_chain, parents=[[-1]], pasts=[past + len(path) - 1])
            assert attend(query[tokens[-1:]], *own, alone.meta())[0].equal(outputs[tokens[-1]])
        first += len(parents)


@given(
    steps(),
    st.sampled_from([(1, 1), (4, 2), (6, 6), (8, 1)]),
    st.sampled_from([(64, 64), (16, 16), (24, 40), (80, 80), (128, 64)]),
    st.sampled_from(DTYPES),
)
def test_op_says_what_sdpa_says_of_what_each_token_sees(step, heads, widths, dtype):
    keys, values = buffers(step, heads[1], widths, dtype)
    query = queries(step, heads[0], widths[0], dtype)
    outputs = op(query, keys, values, step.meta(), 0.2)
    plainly = reference(query, keys, values, step.meta(), 0.2)
    token = 0
    for slot, parents in enumerate(step.parents):
        for node in range(len(parents)):
            seen = step.seen(slot, node)
            own = [buffer[slot : slot + 1, :, seen].double() for buffer in (keys, values)]
            asked = query[None, token : token + 1].double().transpose(1, 2)
            expected = scaled_dot_product_attention(asked, *own, scale=0.2, enable_gqa=True)[0, :, 0]
            for found in (outputs, plainly):
                torch.testing.assert_close(found[token].double(), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
            token += 1
    assert not outputs[token:].any()
    assert not plainly[token:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(steps(), st.sampled_from([(1, 1), (4, 2), (6, 6), (8, 1)]), st.sampled_from([64, 24, 128]), st.integers(0, 99))
def test_token_gets_the_same_bits_in_a_tree_a_chain_a_batch_and_alone(dtype, step, heads, width, seed):
    keys, values = buffers(step, heads[1], (width, width), dtype)
    assert_same_alone(lambda *given: op(*given, 0.2), step, queries(step, heads[0], width, dtype), keys, values, seed)


def test_threads_change_no_bit():
    step = Step([[*range(-1, 250)], [-1]], [20, 300])
    keys, values = buffers(step, 4, (64, 64), torch.float32)
    query = queries(step, 8, 64, torch.float32)
    alone = op(query, keys, values, step.meta(), 0.2)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert op(query, keys, values, step.meta(), 0.2).equal(alone)
    finally:
        torch.set_num_threads(before)


def test_lines_of_a_branch_say_what_the_documentation_says():
    step = Step([[-1, 0, 1, 1]], [100], filling=1)
    assert step.meta()[3].tolist() == [0, 100, 3, 1, 2, 0, 102, 4, -1]
    assert step.meta()[4, SLOT] == -1


def test_op_can_be_traced():
    step = Step([[-1, 0, 0]], [9])
    keys, values = buffers(step, 2, (16, 24), torch.float32)
    meta = step.meta()

    def twice(query):
        return op(query, keys, values, meta, 0.2) * 2

    query = torch.randn(3, 4, 16)
    compiled = torch.compile(twice, fullgraph=True, backend="eager")
    assert compiled(query).equal(twice(query))
    with torch.device("meta"):
        assert op(*(torch.empty(x.shape) for x in (query, keys, values)), torch.empty(3, FIELDS), 0.2).shape == (3, 4, 24)


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [
        (None, {}),
        (torch.zeros(1, 1, 3, FIELDS), {}),
        (torch.zeros(1, 1, 3, FIELDS, dtype=torch.int32), {"softcap": 30.0}),
        (torch.zeros(1, 1, 3, FIELDS, dtype=torch.int32), {"s_aux": torch.zeros(4)}),
    ],
)
def test_layers_whose_attention_is_another_are_refused(mask, arguments):
    query = torch.zeros(1, 4, 3, 16)
    with pytest.raises(ModelError):
        tree_attention(torch.nn.Module(), query, query, query, mask, **arguments)
