"""Attention of packed draft trees on a GPU, in Triton. In: queries, slot buffers and metadata, all there. Out: outputs.

Keys are added up by position, in blocks of `Tiling.keys` that begin at multiples of it, one block after the other, and ranges
of RANGE positions apart from each other; then ranges are merged, in order. Which of these a query sees, and where, its own path
decides; other queries of a tile have no part in its sums, and a block that it sees nothing of changes none of its bits. So an
output is the same to the last bit regardless of which other queries, rows and slots share the call.

Nothing about lengths is known when the kernels are launched: programs read them and return at once where there is nothing to
do, so that one captured launch serves all steps of as many tokens.

    _text   programs of (tile of tokens, heads, range): blocks that lie wholly in the text, or in the beginning of the tree
            that all tokens of the tile share. These are one read of keys for a tile. A range's sums go to scratch memory.
    _path   programs of (token, heads): the blocks behind these, whose keys are gathered along the token's path; then the merge.

Where scratch memory for all tokens would be too much, both are launched for some tokens at a time.

Imported where a GPU asks for it, as it needs Triton.
"""

# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl

from lookahead.forward import tree_meta

RANGE = 128  # positions; a multiple of every block
MOST_HEADS = 4  # that share keys and are worked on together
SCRATCH = 256 << 20  # bytes of scratch memory, more or less
LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)  # of a GPU, at least: what the kernels were compiled for
NOTHING: tl.constexpr = tl.constexpr(-1e30)  # a maximum of no scores
FIELDS: tl.constexpr = tl.constexpr(tree_meta.FIELDS)
SLOT: tl.constexpr = tl.constexpr(tree_meta.SLOT)
PAST: tl.constexpr = tl.constexpr(tree_meta.PAST)
NODE: tl.constexpr = tl.constexpr(tree_meta.NODE)
PARENT: tl.constexpr = tl.constexpr(tree_meta.PARENT)
TRUNK: tl.constexpr = tl.constexpr(tree_meta.TRUNK)
FIRST: tl.constexpr = tl.constexpr(tree_meta.FIRST)
POSITION: tl.constexpr = tl.constexpr(tree_meta.POSITION)
SIZE: tl.constexpr = tl.constexpr(tree_meta.SIZE)
TILE_START: tl.constexpr = tl.constexpr(tree_meta.TILE_START)
TILE: tl.constexpr = tl.constexpr(tree_meta.TILE)
FAR: tl.constexpr = tl.constexpr(1 << 30)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Division of the work on one model; the same for all its calls, as sums depend on it.

    heads: that share keys, worked on together; a power of 2. keys: of a block. warps, stages: of Triton; path_warps: of _path,
    whose programs have little to do each.
    """

    heads: int
    keys: int
    warps: int = 4
    stages: int = 2
    path_warps: int = 4

    @staticmethod
    def of(dtype: torch.dtype, shared: int, width: int) -> Tiling:
        """Choose the tiling for heads of this width, `shared` of which share keys. float32 is multiplied
        without tensor cores.
        """
        if dtype == torch.float32:
            return Tiling(1, 16, warps=8)
        heads = min(_power(shared), MOST_HEADS)
        if width > 128:
            return Tiling(min(heads, 2), 32, warps=8)
        return Tiling(heads, 32, stages=3, path_warps=2 if heads == 1 else 4)


@triton.jit
def _paths(meta, wide, line):
    """See `with_paths`."""
    token = tl.program_id(0)
    into = wide + (tl.program_id(1) * tl.num_programs(0) + token) * line
    about = meta + (tl.program_id(1) * tl.num_programs(0) + token) * FIELDS
    fields = tl.arange(0, 16)
    tl.store(into + fields, tl.load(about + fields, mask=fields < FIELDS, other=0), mask=fields < FIELDS)
    if tl.load(about + SLOT) >= 0:
        node, ancestor = tl.load(about + NODE), tl.load(about + NODE)
        first = tl.load(about + PAST) + tl.load(about + TRUNK)
        for back in range(tl.load(about + POSITION) - first + 1):
            tl.store(into + FIELDS + tl.load(about + POSITION) - first - back, ancestor)
            ancestor = tl.load(about + (ancestor - node) * FIELDS + PARENT)


def with_paths(meta: torch.Tensor) -> torch.Tensor:
    """int32 [kinds, tokens, FIELDS + tokens]: meta [kinds, tokens, FIELDS], and behind each line the nodes of the token's path.

    These are its ancestors that are not in its trunk, in their order, and itself. Otherwise each layer looks for them.
    """
    kinds, tokens, fields = meta.shape
    wide = meta.new_empty(kinds, tokens, fields + tokens)
    with torch.cuda.device(meta.device) if meta.is_cuda else contextlib.nullcontext():
        _paths[(tokens, kinds)](meta, wide, fields + tokens, num_warps=1)
    return wide


@triton.jit
def _add_block(queries, keys, values, seen, scale, top, total, output):
    """Maximum, sum of weights and weighted values of each query, with one block more."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen, scores, NOTHING)
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0).to(values.dtype)
    shrunk = tl.exp2(top - higher)
    ones = tl.full([weights.shape[1], 16], 1.0, weights.dtype)  # sums of tl.sum depend on how many threads there are
    total = total * shrunk + tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
    output = tl.dot(weights, values, output * shrunk[:, None], input_precision="ieee")
    return higher, total, output


@triton.jit
def _merged(top, total, output, other_top, other_total, other_output):
    """The same of two ranges together. One of them may be of nothing: then it is the other, bit for bit."""
    higher = tl.maximum(top, other_top)
    mine, others = tl.exp2(top - higher), tl.exp2(other_top - higher)
    output = output * mine[:, None] + other_output * others[:, None]
    return higher, total * mine + other_total * others, output


@triton.jit
def _text_end(meta, line, start, count, past, BLOCK: tl.constexpr):
    """Position behind the last block that every token of a tile has at the same positions, each at its position."""
    tokens = tl.arange(0, TILE)
    trunks = tl.load(meta + (start + tokens) * line + TRUNK, mask=tokens < count, other=FAR)
    return (past + tl.min(trunks, 0)) // BLOCK * BLOCK


@triton.jit
def _add_text(
    queries, keys, values, key_position, value_position, low, first, begin, end, scale, top, total, output,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Blocks from `begin` to `end`, whose keys lie side by side from the addresses `keys` and `values` on. low: the first
    position that any query sees."""
    numbers, value_numbers = tl.arange(0, KEY_ROOM)[None, :], tl.arange(0, VALUE_ROOM)[None, :]
    for at in range(begin, end, BLOCK):
        position = at + tl.arange(0, BLOCK)
        used = (position >= low)[:, None]
        some_keys = tl.load(keys + position[:, None] * key_position + numbers, mask=used & (numbers < WIDTH), other=0.0)
        some_values = tl.load(
            values + position[:, None] * value_position + value_numbers, mask=used & (value_numbers < VALUE_WIDTH), other=0.0
        )
        seen = position[None, :] >= first[:, None]
        top, total, output = _add_block(queries, some_keys, some_values, seen, scale, top, total, output)
    return top, total, output


@triton.jit(do_not_specialize=["from_token", "to_token", "line"])
def _text(
    query, key, value, meta, line, outputs, tops, totals, from_token, to_token, scale, query_token, query_head,
    key_slot, key_head, key_position, value_slot, value_head, value_position,
    SHARED: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Sums over a range of the text of a tile, for the tokens from `from_token` to `to_token`.

    outputs: float32 [these, heads, PARTS, VALUE_ROOM]; tops, totals: [these, heads, PARTS]; a part for each range.
    SHARED: heads that share keys; HEADS: of these at a time, GROUPS times. WHOLE: positions of a range.
    """
    start = tl.load(meta + tl.program_id(0) * line + TILE_START)
    if start < 0:
        return
    if (start >= to_token) | (start + TILE <= from_token):
        return
    about = meta + start * line
    past = tl.load(about + PAST)
    count = tl.minimum(tl.load(about + SIZE) - tl.load(about + NODE), TILE)
    end = _text_end(meta, line, start, count, past, BLOCK)
    rows = tl.arange(0, TILE * HEADS)
    row, head = rows // HEADS, tl.program_id(1) % GROUPS * HEADS + rows % HEADS
    first = tl.load(about + row * line + FIRST, mask=row < count, other=FAR)
    low = tl.min(first, 0)
    begin = low // BLOCK * BLOCK
    part = tl.program_id(2)
    begin, end = tl.maximum(begin, part * WHOLE), tl.minimum(end, (part + 1) * WHOLE)
    if begin >= end:
        return
    shares = tl.program_id(1) // GROUPS
    token, head = (start + row).to(tl.int64), shares * SHARED + head
    mine = (row < count) & (head < (shares + 1) * SHARED) & (token >= from_token) & (token < to_token)
    numbers, value_numbers = tl.arange(0, KEY_ROOM)[None, :], tl.arange(0, VALUE_ROOM)[None, :]
    queries = tl.load(
        query + token[:, None] * query_token + head[:, None] * query_head + numbers,
        mask=mine[:, None] & (numbers < WIDTH),
        other=0.0,
    )
    slot = tl.load(about + SLOT).to(tl.int64)
    keys, values = key + slot * key_slot + shares * key_head, value + slot * value_slot + shares * value_head
    scratch = ((token - from_token) * (SHARED * tl.num_programs(1) // GROUPS) + head) * PARTS + part
    top, total, output = _add_text(
        queries, keys, values, key_position, value_position, low, first, begin, end, scale,
        tl.full([TILE * HEADS], NOTHING, tl.float32), tl.zeros([TILE * HEADS], tl.float32),
        tl.zeros([TILE * HEADS, VALUE_ROOM], tl.float32),
        WIDTH, VALUE_WIDTH, KEY_ROOM, VALUE_ROOM, BLOCK,
    )  # fmt: skip
    tl.store(tops + scratch, top, mask=mine)
    tl.store(totals + scratch, total, mask=mine)
    tl.store(outputs + scratch[:, None] * VALUE_ROOM + value_numbers, output, mask=mine[:, None])


@triton.jit
def _lines(rows, HEADS: tl.constexpr):
    """The first HEADS numbers of a tile's."""
    rows = tl.reshape(rows, [TILE, HEADS])
    return tl.sum(tl.where(tl.arange(0, TILE)[:, None] == 0, rows, 0.0), 0)


@triton.jit
def _lines_of(rows, HEADS: tl.constexpr):
    """The same of lines of numbers."""
    rows = tl.reshape(rows, [TILE, HEADS, rows.shape[1]])
    return tl.sum(tl.where(tl.arange(0, TILE)[:, None, None] == 0, rows, 0.0), 0)


@triton.jit
def _load_part(outputs, tops, totals, entry, mine, VALUE_ROOM: tl.constexpr):
    """Load what `_text` has stored of a range; of nothing where it is not `mine`."""
    numbers = tl.arange(0, VALUE_ROOM)[None, :]
    return (
        tl.load(tops + entry, mask=mine, other=NOTHING),
        tl.load(totals + entry, mask=mine, other=0.0),
        tl.load(outputs + entry[:, None] * VALUE_ROOM + numbers, mask=mine[:, None], other=0.0),
    )


@triton.jit(do_not_specialize=["from_token", "line"])
def _path(
    query, key, value, meta, line, outputs, tops, totals, result, from_token, scale, query_token, query_head,
    key_slot, key_head, key_position, value_slot, value_head, value_position,
    SHARED: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_ROOM: tl.constexpr, VALUE_ROOM: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
    PATHS: tl.constexpr,
):  # fmt: skip
    """Output of a token: what `_text` has found, and the blocks behind that. result: [tokens, heads, VALUE_WIDTH]. See `_text`.

    PATHS: lines of meta give each token's path (`with_paths`). A tile's rows are multiplied here as there, so that numbers are
    added up in the same order; of these the first HEADS count.
    """
    token = from_token + tl.program_id(0).to(tl.int64)
    about = meta + token * line
    slot = tl.load(about + SLOT)
    rows, lines = tl.arange(0, TILE * HEADS), tl.arange(0, HEADS)
    shares = tl.program_id(1) // GROUPS
    begins = shares * SHARED + tl.program_id(1) % GROUPS * HEADS  # its first head
    head, line_head = begins + rows, begins + lines
    mine, line_mine = (rows < HEADS) & (head < (shares + 1) * SHARED), line_head < (shares + 1) * SHARED
    every = SHARED * tl.num_programs(1) // GROUPS
    numbers, value_numbers = tl.arange(0, KEY_ROOM)[None, :], tl.arange(0, VALUE_ROOM)[None, :]
    into = result + (token * every + line_head)[:, None] * VALUE_WIDTH + value_numbers
    stored = line_mine[:, None] & (value_numbers < VALUE_WIDTH)
    if slot < 0:  # fills the pack up
        tl.store(into, tl.zeros([HEADS, VALUE_ROOM], tl.float32).to(result.dtype.element_ty), mask=stored)
        return
    past, node, trunk = tl.load(about + PAST), tl.load(about + NODE), tl.load(about + TRUNK)
    first, position = tl.load(about + FIRST), tl.load(about + POSITION)
    tile = token - node % TILE
    end = _text_end(meta, line, tile, tl.minimum(tl.load(about + SIZE) - node // TILE * TILE, TILE), past, BLOCK)
    queries = tl.load(
        query + token * query_token + head[:, None] * query_head + numbers, mask=mine[:, None] & (numbers < WIDTH), other=0.0
    )
    keys = key + slot.to(tl.int64) * key_slot + shares * key_head
    values = value + slot.to(tl.int64) * value_slot + shares * value_head
    scratch = (token - from_token) * every * PARTS
    all_top = tl.full([HEADS], NOTHING, tl.float32)
    all_total = tl.zeros([HEADS], tl.float32)
    all_output = tl.zeros([HEADS, VALUE_ROOM], tl.float32)
    for part in range(first // WHOLE, end // WHOLE):
        top, total, output = _load_part(outputs, tops, totals, scratch + line_head * PARTS + part, line_mine, VALUE_ROOM)
        all_top, all_total, all_output = _merged(all_top, all_total, all_output, top, total, output)
    range_begins = tl.maximum(first // BLOCK * BLOCK, end // WHOLE * WHOLE)  # of the range that the text ends in
    stored_last = mine & (range_begins + rows * 0 < end)
    top, total, output = _load_part(outputs, tops, totals, scratch + head * PARTS + end // WHOLE, stored_last, VALUE_ROOM)
    for at in range(tl.maximum(end, first // BLOCK * BLOCK), position + 1, BLOCK):
        if at % WHOLE == 0:
            all_top, all_total, all_output = _merged(
                all_top, all_total, all_output, _lines(top, HEADS), _lines(total, HEADS), _lines_of(output, HEADS)
            )
            top = tl.full([TILE * HEADS], NOTHING, tl.float32)
            total = tl.zeros([TILE * HEADS], tl.float32)
            output = tl.zeros([TILE * HEADS, VALUE_ROOM], tl.float32)
        positions = at + tl.arange(0, BLOCK)
        if PATHS:
            behind = (positions >= past + trunk) & (positions <= position)
            nodes = tl.load(about + FIELDS + positions - past - trunk, mask=behind, other=0)
            columns = tl.where(positions < past + trunk, positions, past + nodes)
        else:
            columns, ancestor = tl.where(positions < past + trunk, positions, 0), node
            for back in range(position - tl.maximum(past + trunk, at) + 1):  # ancestors that are not in its trunk
                columns = tl.where(positions == position - back, past + ancestor, columns)
                ancestor = tl.load(meta + (token - node + ancestor) * line + PARENT)
        seen = (positions >= first) & (positions <= position)
        some_keys = tl.load(keys + columns[:, None] * key_position + numbers, mask=seen[:, None] & (numbers < WIDTH), other=0.0)
        some_values = tl.load(
            values + columns[:, None] * value_position + value_numbers,
            mask=seen[:, None] & (value_numbers < VALUE_WIDTH),
            other=0.0,
        )
        every_row = seen[None, :] & (rows >= 0)[:, None]
        top, total, output = _add_block(queries, some_keys, some_values, every_row, scale, top, total, output)
    all_top, all_total, all_output = _merged(
        all_top, all_total, all_output, _lines(top, HEADS), _lines(total, HEADS), _lines_of(output, HEADS)
    )
    tl.store(into, (all_output / all_total[:, None]).to(result.dtype.element_ty), mask=stored)


def constants(shared: int, width: int, value_width: int, capacity: int, tiling: Tiling) -> dict[str, int]:
    """Return what both kernels are compiled for. shared: heads that share keys; capacity: positions of a slot."""
    return {
        "SHARED": shared,
        "HEADS": tiling.heads,
        "GROUPS": -(-shared // tiling.heads),
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "KEY_ROOM": max(16, _power(width)),
        "VALUE_ROOM": max(16, _power(value_width)),
        "BLOCK": tiling.keys,
        "WHOLE": RANGE,
        "PARTS": -(-capacity // RANGE),
    }


def launch_options(tiling: Tiling, path: bool = False) -> dict[str, Any]:
    """Return the launch options of both kernels. Multiplications and additions stay apart, so that both round alike; registers
    are not spilled.
    """
    return {
        "num_warps": tiling.path_warps if path else tiling.warps,
        "num_stages": tiling.stages,
        "enable_fp_fusion": False,
        "maxnreg": 255,
    }


def tree_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: torch.Tensor,
    scale: float,
    scratch: int = SCRATCH,
    result: torch.Tensor | None = None,
) -> torch.Tensor:
    """[tokens, heads, value width]; see tree_attention.py. The numbers of a vector lie side by side, and so does meta.

    scratch: bytes of scratch memory, at least one token's. It changes no bit of the outputs. result: where these go.
    """
    tokens, heads, width = query.shape
    slots, key_heads, capacity, value_width = value.shape
    shared = heads // key_heads
    tiling = Tiling.of(query.dtype, shared, max(width, value_width))
    fixed = constants(shared, width, value_width, capacity, tiling)
    parts, room = fixed["PARTS"], fixed["VALUE_ROOM"]
    at_once = min(tokens, max(1, scratch // (4 * heads * parts * (room + 2))))
    result = query.new_empty(tokens, heads, value_width) if result is None else result
    outputs = query.new_empty(at_once, heads, parts, room, dtype=torch.float32)
    tops, totals = (query.new_empty(at_once, heads, parts, dtype=torch.float32) for _ in range(2))
    strides = *query.stride()[:2], *key.stride()[:3], *value.stride()[:3]
    options, path_options = ({**fixed, **launch_options(tiling, path)} for path in (False, True))
    programs = key_heads * fixed["GROUPS"]
    tiles = min(tokens, slots + tokens // tree_meta.TILE)  # at most, for any trees
    given = query, key, value, meta, meta.stride(0), outputs, tops, totals
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        for start in range(0, tokens, at_once):
            end = min(start + at_once, tokens)
            _text[(tiles, programs, parts)](*given, start, end, scale * LOG2_E, *strides, **options)
            paths = meta.shape[1] > tree_meta.FIELDS
            _path[(end - start, programs)](*given, result, start, scale * LOG2_E, *strides, **path_options, PATHS=paths)
    return result


def _power(size: int) -> int:
    """The smallest power of 2 that is not below `size`."""
    return 1 << (size - 1).bit_length()
