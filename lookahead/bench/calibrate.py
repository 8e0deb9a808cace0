"""What a model's forwards cost on this machine, measured. In: a loaded model and a minute. Out: a cost profile.

Random tokens go through the model in forwards of many sizes, rows and contexts. Cells are visited until the time is up, the
most telling first, each round in another order. Shared machines change their pace and have slow moments: what a cell takes is
separated from the pace at each visit, by what was visited just before and after, and visits in a bad moment do not count. The
terms of a profile are then fitted to the cells, none below 0 and no size cheaper than a smaller one.
"""

from __future__ import annotations

import dataclasses
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lookahead.budget.attention import runs_of
from lookahead.budget.profile import CostProfile, Forward, Work
from lookahead.draft.tree import Wanted, chain, side_by_side
from lookahead.errors import LookaheadError
from lookahead.forward.batch import ALL_AT_ONCE, work_of
from lookahead.forward.slots import PackedSlots, Slots, slots_of
from lookahead.forward.target import TargetModel
from lookahead.version import __version__

FASTER = 0.3  # quantile of the forwards of a cell that counts, as other programs only ever slow them down
SHORT, LONG = 128, 1024  # tokens in the cache of each row
CHUNK = 512  # tokens of a prompt that are prefilled at once
MOST_WIDTH = 128
# Seconds of a visit, and of forwards before them that do not count; one at least of each. Many short visits tell more than few
# long ones, as the machine's pace changes all the time.
MOST_IN_A_ROW, VISIT = 10, 0.1
MOST_WARMING, WARM = 4, 0.04
ACCEPTING_SHARE, ACCEPTING_TIMES, ACCEPTING_WIDTH = 0.1, 12, 8
AROUND, POLISHED = 4, 10  # visits before and after one that tell the machine's pace; times that cells and paces are separated
NEAR, CALM = 6, 1.3  # visits that took that many times what calm ones took, so far before and after, were in a bad moment
OFTEN = 8  # tokens up to which forwards of one row are visited twice a round
CONFIRMED = 2  # calm visits of a cell, without which it is visited in each round
LONG_WEIGHT = 0.25  # of a cell of a long context in the fit
SHARE_OF_FIRST = 0.5  # of the time for the first round: what is not reached by then is left out


@dataclasses.dataclass(frozen=True)
class Cell:
    """A forward of `width` tokens in each of `rows` rows. uneven: width on average. alone: an attention call for each row."""

    rows: int
    context: int
    width: int
    wanted: Wanted = "all"
    uneven: bool = False
    alone: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    @property
    def sizes(self) -> list[int]:
        if not self.uneven:
            return [self.width] * self.rows
        return [1 + round(row * (2 * self.width - 2) / (self.rows - 1)) for row in range(self.rows)]

    def in_attention(self, call: float) -> Work:
        sizes, held = np.array(self.sizes), np.full(self.rows, self.context)
        return work_of(runs_of(sizes, held, 0.0 if self.alone else call), sizes, held)


CELLS = (
    *(Cell(1, SHORT, width) for width in (1, 16, 4, 64, 8, 32, 2, 3, 6, 12, 24, 48)),
    *(Cell(8, SHORT, width) for width in (1, 4, 2, 16, 8)),
    Cell(8, SHORT, 4, uneven=True),
    Cell(8, SHORT, 4, alone=True),
    Cell(1, SHORT, 128, "none"),
    *(Cell(1, LONG, width) for width in (1, 16, 64)),
    *(Cell(1, SHORT, width) for width in (128, 96)),
    *(Cell(8, SHORT, width) for width in (32, 3, 64)),
    *(Cell(4, SHORT, width) for width in (1, 4, 16)),
    *(Cell(8, LONG, width) for width in (1, 8)),
    *(Cell(8, context, 8, uneven=True) for context in (SHORT, LONG)),
    *(Cell(8, SHORT, width, alone=True) for width in (2, 8)),
    *(Cell(32, SHORT, width) for width in (1, 2, 4, 8)),
)  # fmt: skip


def calibrate(
    target: TargetModel, seconds: float = 45.0, progress: Callable[[float], None] = lambda share: None
) -> tuple[CostProfile, list[tuple[Cell, float]]]:
    """(the profile, the seconds of each cell that it was fitted to). Raises LookaheadError for a model that decodes plainly."""
    if target.mode == "plain":
        raise LookaheadError(f"{target.name} decodes plainly ({target.reason}): there is nothing to budget.")
    began = target.now()
    first: dict[Cell, float] = {}
    texts = _Texts(target)
    cells = [cell for cell in _cells_for(target.longest_text) if not (cell.alone and _at_once(target))]

    def spent() -> float:
        share = (target.now() - began) / seconds
        progress(min(1.0, share))
        return share

    for cell in cells:
        if first and spent() > SHARE_OF_FIRST:
            break
        first[cell] = _faster(texts.seconds_of(cell))
    visits: list[tuple[Cell, float]] = []
    least = min(first.values())
    apart = {cell: max(1, round((each / least) ** 0.5)) for cell, each in first.items()}  # rounds between visits
    order, rounds, few = np.random.default_rng(0), 1, set[Cell]()  # few: those of few calm visits
    # Speedups are determined by these above all: plain forwards, and those of small drafts in one row.
    often = [c for c in first if c.context <= SHORT and (c.width == 1 or (c.rows == 1 and c.width <= OFTEN))]
    while spent() < 1:
        for cell in order.permutation(np.array([*first, *often], object)):
            if rounds % apart[cell] == 0 or cell in few:
                visits.append((cell, _faster(texts.seconds_of(cell, MOST_WARMING, first[cell]))))
            if spent() > 1:
                break
        seen = Counter(cell for cell, _ in calm(visits))
        few = {cell for cell, _ in visits if seen[cell] < CONFIRMED}
        rounds += 1
    measured = list((first | at_one_pace(calm(visits))).items())
    return dataclasses.replace(fitted(target, measured, rounds), **texts.accepting(ACCEPTING_SHARE * seconds)), measured


def _faster(times: Sequence[float]) -> float:
    """Return what it takes where nothing else disturbs it."""
    return float(np.sort(times)[int(FASTER * (len(times) - 1))])


def calm(visits: Sequence[tuple[Cell, float]]) -> list[tuple[Cell, float]]:
    """Return those of the visits (cell, seconds) in no bad moment: not much slower than the faster ones around."""
    number: dict[Cell, int] = {}
    cells = np.array([number.setdefault(cell, len(number)) for cell, _ in visits], int)
    seconds = np.array([each for _, each in visits])
    usual = np.array([seconds[cells == cell].min() for cell in range(len(number))])
    good = np.ones(len(visits), bool)
    for _ in range(POLISHED if len(visits) else 0):
        slower = seconds / usual[cells]
        around = np.lib.stride_tricks.sliding_window_view(np.pad(slower, NEAR, "symmetric"), 2 * NEAR + 1)
        paces = np.quantile(around, FASTER, axis=1)
        good = slower <= CALM * paces
        for cell in range(len(number)):
            own = cells == cell
            usual[cell] = np.median((seconds / paces)[own & good if (own & good).any() else own])
    return [visit for visit, keeps in zip(visits, good, strict=True) if keeps]


def at_one_pace(visits: Sequence[tuple[Cell, float]]) -> dict[Cell, float]:
    """Seconds of each cell as if all had been visited at one of its faster paces (as in median polish, Tukey 1977)."""
    numbers: dict[Cell, list[int]] = {}
    for number, (cell, _) in enumerate(visits):
        numbers.setdefault(cell, []).append(number)
    seconds, paces = np.array([each for _, each in visits]), np.ones(len(visits))
    usual: dict[Cell, float] = {}
    for _ in range(POLISHED):
        usual = {cell: float(np.median(seconds[own] / paces[own])) for cell, own in numbers.items()}
        slower = seconds / np.array([usual[cell] for cell, _ in visits])
        for number in range(len(visits)):
            around = [*slower[max(0, number - AROUND) : number], *slower[number + 1 : number + 1 + AROUND]]
            paces[number] = np.median(around) if around else 1.0
    pace = _faster(paces.tolist()) if visits else 1.0
    return {cell: pace * each for cell, each in usual.items()}


def _at_once(target: TargetModel) -> bool:
    """There is no choice: all rows of a small step share a call of attention, or no two do."""
    return target.bucketed or target.mode != "packed"


def _cells_for(longest: int) -> list[Cell]:
    """CELLS with contexts that leave room in a text of `longest` tokens; without the widths that do not fit."""
    contexts = {SHORT: min(SHORT, longest // 4), LONG: min(LONG, longest - MOST_WIDTH - 1)}
    cells = [dataclasses.replace(cell, context=contexts[cell.context]) for cell in CELLS]
    least = contexts[SHORT]
    return [c for c in cells if c.context + c.width < longest and (c.context == least or c.context >= 2 * least)]


class _Texts:
    """Slots that hold texts of the contexts asked for; made when they are first needed."""

    def __init__(self, target: TargetModel):
        self.target = target
        self._random = np.random.default_rng(0)
        self._slots: dict[tuple[int, int], Slots] = {}

    @torch.inference_mode()
    def seconds_of(self, cell: Cell, most_warming: int = 1, expected: float = VISIT / 2) -> list[float]:
        """Forwards of a cell behind `most_warming` others at most. expected: seconds that one takes, about."""
        key = cell.rows, cell.context
        slots = self._slots.get(key) or self._slots.setdefault(key, self._filled(*key))
        warming, in_a_row = (max(1, int(share / expected)) for share in (WARM, VISIT))
        warming, in_a_row = min(most_warming, warming), min(MOST_IN_A_ROW, in_a_row)
        return [self._forward(cell, slots) for _ in range(warming + in_a_row)][warming:]

    def _forward(self, cell: Cell, slots: Slots) -> float:
        """Timed as the engine's steps are; nothing of it is kept."""
        trees = [chain(self._tokens(size)) for size in cell.sizes]
        if isinstance(slots, PackedSlots):
            slots.call = 0.0 if cell.alone else self.target.call
        began = self.target.now()
        scores = slots.forward(side_by_side(trees, [cell.wanted] * cell.rows))
        scores.wait()
        if cell.wanted == "all":
            scores.best(0, 0)
        elif self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        slots.keep([[]] * cell.rows)
        return self.target.now() - began

    @torch.inference_mode()
    def accepting(self, seconds: float) -> dict[str, Any]:
        """Return what comes behind a packed forward: per_said, per_move, per_moved_row. Takes `seconds` at most."""
        asking: list[float] = []
        moving: dict[int, list[float]] = {}
        now = self.target.now
        began = now()
        for rows, context in sorted(self._slots) * ACCEPTING_TIMES:
            slots = self._slots[rows, context]
            if not isinstance(slots, PackedSlots) or now() - began > seconds:
                break
            scores = slots.forward(side_by_side([chain(self._tokens(ACCEPTING_WIDTH)) for _ in range(rows)], ["all"] * rows))
            scores.wait()
            scores.best(0, 0)
            ready = now()
            scores.best(0, 1)
            asked = now()
            moved = (context + 2, context + 1), (context + 5, context + 2)
            slots.cache.move([(slot, source, target) for slot in range(rows) for source, target in moved])
            if self.target.device.type == "cuda":
                torch.cuda.synchronize(self.target.device)
            asking.append(asked - ready)
            moving.setdefault(rows, []).append(now() - asked)
            slots.keep([[]] * rows)
        if not moving:
            return {}
        least, most = min(moving), max(moving)
        per_row = max(0.0, _faster(moving[most]) - _faster(moving[least])) / max(1, most - least)
        per_move = max(0.0, _faster(moving[least]) - least * per_row)
        return {"per_said": _faster(asking), "per_move": per_move, "per_moved_row": per_row}

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, self.target.vocab_size, count).tolist()
        return tokens

    def _filled(self, rows: int, context: int) -> Slots:
        """Slots of that many rows, all of one text, which is prefilled except for its last token."""
        slots, text = slots_of(self.target), self._tokens(context + 1)
        for slot in range(rows):
            slots.add(text, MOST_WIDTH)
            done = slots.begin(slot) or 0
            others: list[None] = [None] * slot
            while done < context:
                piece = text[done : min(done + CHUNK, context)]
                slots.forward(side_by_side([*others, chain(piece)], ["none"] * (slot + 1)))
                slots.keep([*([[]] * slot), range(len(piece))])
                done += len(piece)
        return slots


def fitted(target: TargetModel, measured: Sequence[tuple[Cell, float]], rounds: int) -> CostProfile:
    separate = target.mode != "packed"
    scored = [(cell, seconds) for cell, seconds in measured if cell.wanted == "all"]
    if separate:  # a row is a forward of its own
        scored = [(cell, seconds) for cell, seconds in scored if cell.rows == 1]
    cells, seconds = [cell for cell, _ in scored], np.array([each for _, each in scored])
    tokens, sizes = np.array([cell.tokens for cell in cells]), sorted({cell.tokens for cell in cells})
    call = ALL_AT_ONCE if _at_once(target) else target.call
    per = np.array([[c.rows - 1, *c.in_attention(call)] for c in cells], float)
    steps = tokens[:, None] >= sizes  # what a size takes more than the one before it
    columns = np.hstack([steps, per]) / seconds[:, None]
    short = min(cell.context for cell in cells)
    weights = np.array([1.0 if cell.context == short else LONG_WEIGHT for cell in cells])
    # Terms in which cells of one size differ: others cannot be distinguished from the size.
    telling = [n for n in range(per.shape[1]) if any(len(set(per[tokens == size, n])) > 1 for size in sizes)]
    used = [*range(len(sizes)), *(len(sizes) + term for term in telling)]
    while True:  # nothing takes less than nothing: steps and terms that would are left out, the worst first
        found = np.linalg.lstsq(columns[:, used] * weights[:, None], weights, rcond=None)[0]
        worst = int((found * columns[:, used].max(axis=0)).argmin())
        if found[worst] >= 0:
            break
        del used[worst]
    takes = np.zeros(columns.shape[1])
    takes[used] = found
    errors = np.abs(columns @ takes - 1)
    names = ("per_row", "per_key", "per_query_key", "per_padding", "per_call")
    terms: dict[str, Any] = dict(zip(names, takes[len(sizes) :].tolist(), strict=True))
    versions = {"lookahead": __version__, "torch": torch.__version__, "python": platform.python_version()}
    profile = CostProfile(
        target.setting,
        "measured",
        tuple(sizes),
        tuple(np.maximum(takes[: len(sizes)].cumsum() - terms["per_row"], 1e-9).tolist()),
        **terms,
        bucketed=target.bucketed,
        separate=separate,
        vocab_size=target.vocab_size,
        longest_text=target.longest_text,
        about={
            **versions,
            "forwards": len(measured),
            "rounds": rounds,
            "median_error": round(float(np.median(errors)), 4),
            "largest_error": round(float(errors.max()), 4),
        },
    )
    unscored = [(cell, seconds) for cell, seconds in measured if cell.wanted == "none" and cell.rows == 1]
    saved = [(profile.forward_seconds(Forward(c.tokens, c.rows, c.rows * c.context)) - each) / c.tokens for c, each in unscored]
    return dataclasses.replace(profile, per_score=max(0.0, float(np.mean(saved)))) if saved else profile
