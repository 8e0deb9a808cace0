"""Are outputs those of plain decoding? In: outputs of both. Out: counts, and where and how far they diverge.

In half precision any change of a forward's shape moves scores a little, so two tokens of nearly the same score swap: a
near-tie. The stock model judges, and forwards of other shapes show how far rounding alone moves scores. An output is excused if
both tokens at the first difference, and each token behind it, come that near to the best score; nothing is where bits are exact
(models/exact.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from lookahead.forward.backends import without_cudnn
from lookahead.forward.target import TargetModel

Ids = Sequence[int]
Kind = Literal["near-tie", "different"]
SHOWN = 20  # divergences in the JSON
UNITS = 2  # of rounding at the best score: apart by no more is near in any case
NOISES = 3  # of the measured moves of single scores: apart by no more is near too
SPREADS = 0.25  # of the scores' standard deviation: apart by more is not near, regardless of the noise
PIECES = (7, 1, 3, 16, 2)  # tokens of the forwards that rounding is measured with
ALWAYS = 2  # shapes of forwards that every output is judged by; the others where these do not excuse it


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Position where an output differs from plain decoding; where it is different, the first position that nothing excuses.

    row: of the prompts, from 1. place: tokens of the answer before it. expected, got: None where one answer has ended.
    tolerance: scores no further apart are a near-tie.
    """

    row: int
    run: str
    place: int
    expected: int | None
    got: int | None
    expected_score: float | None
    got_score: float | None
    tolerance: float | None
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Outputs against those of plain decoding. divergences: one of each that is not identical. exact: none may differ."""

    checked: int
    identical: int
    divergences: list[Divergence]
    exact: bool = False

    @property
    def near_tie(self) -> int:
        return sum(each.kind == "near-tie" for each in self.divergences)

    @property
    def different(self) -> int:
        return sum(each.kind == "different" for each in self.divergences)

    @property
    def shown(self) -> list[Divergence]:
        return sorted(self.divergences, key=lambda each: each.kind != "different")[:SHOWN]

    def __str__(self) -> str:
        ties = "bit for bit" if self.exact else f"{self.near_tie} near-ties"
        return f"{self.identical}/{self.checked} outputs identical to plain decoding, {ties}, {self.different} different"

    def as_json(self) -> dict[str, int]:
        """ "lossless" in the JSON of `bench`."""
        return {name: getattr(self, name) for name in ("checked", "identical", "near_tie", "different")}


def lossless(
    target: TargetModel | None, prompts: Sequence[Ids], expected: Sequence[Ids], outputs: Mapping[str, Sequence[Ids]]
) -> Lossless:
    """Compare outputs, by name of the run, with the expected ones, row by row. target: None: any difference counts."""
    checked = identical = 0
    divergences = []
    judged: dict[tuple[int, tuple[int, ...]], Divergence] = {}  # runs often err alike
    for run, of_run in outputs.items():
        for row, (prompt, right, output) in enumerate(zip(prompts, expected, of_run, strict=True), 1):
            checked += 1
            if list(output) == list(right):
                identical += 1
                continue
            key = row, tuple(output)
            if key not in judged:
                judged[key] = _judged(target, row, run, prompt, right, output)
            divergences.append(dataclasses.replace(judged[key], run=run))
    return Lossless(checked, identical, divergences, target is not None and target.exact)


@torch.inference_mode()
def _judged(target: TargetModel | None, row: int, run: str, prompt: Ids, expected: Ids, output: Ids) -> Divergence:
    place = next((i for i, (a, b) in enumerate(zip(expected, output, strict=False)) if a != b), None)
    if place is None:  # one is a part of the other: a matter of where to stop, not of scores
        place = min(len(expected), len(output))
        ends = [ids[place] if len(ids) > place else None for ids in (expected, output)]
        return Divergence(row, run, place, ends[0], ends[1], None, None, None, "different")
    if target is None:
        return Divergence(row, run, place, expected[place], output[place], None, None, None, "different")
    judge = _Judge(target, prompt, output)
    both = torch.tensor([[*output[place:]], [expected[place], *output[place + 1 :]]], device=target.device)
    far, tolerance = judge.far(place, both)
    wanted, near = expected[place], tolerance[far[0] if far else 0]
    if far and far[0] > 0:  # excused at first, and wrong behind it
        place += far[0]
        wanted = int(judge.alone[place].argmax())
    got, (wanted_score, got_score) = output[place], judge.alone[place, [wanted, output[place]]].tolist()
    kind: Kind = "different" if far or target.exact else "near-tie"
    return Divergence(row, run, place, wanted, got, _rounded(wanted_score), _rounded(got_score), _rounded(near), kind)


class _Judge:
    """The stock model's word on a text. alone: [tokens of the output, vocab], what each was chosen by, in one forward."""

    def __init__(self, target: TargetModel, prompt: Ids, output: Ids):
        self.target, self.prompt, self.output = target, prompt, output
        self.alone = self._whole()

    def far(self, place: int, tokens: torch.Tensor) -> tuple[list[int], list[float]]:
        """(positions, counted from `place`, where one of `tokens` [any, positions] is never near the best score; tolerances).

        A token is near if it is in one shape of the forward: where rounding sends a token to another expert, scores jump.
        """
        alone = self.alone[place:]
        noise, behind_best = torch.zeros_like(alone[:, 0]), _behind_best(alone, tokens)
        units = UNITS * torch.finfo(self.target.dtype).eps * alone.max(-1).values.abs()
        for number, scores in enumerate(self._shapes(), 1):
            noise = torch.maximum(noise, (scores[place:] - alone).abs().amax(-1))
            behind_best = torch.minimum(behind_best, _behind_best(scores[place:], tokens))
            known = torch.maximum(noise, noise.mean())  # a position where no shape happened to move anything is not better
            tolerance = torch.minimum(torch.maximum(units, NOISES * known), SPREADS * alone.std(-1))
            far = (~(behind_best <= tolerance)).any(0)  # not finite is far
            if number >= ALWAYS and not far.any():
                break
        return far.nonzero()[:, 0].tolist(), tolerance.tolist()

    def _shapes(self) -> Iterator[torch.Tensor]:
        yield self._whole(behind=PIECES[0])
        for size in PIECES:
            yield self._in_pieces(size) if self.target.mode != "plain" else self._whole(behind=size + 1)

    @without_cudnn()
    def _whole(self, behind: int = 0) -> torch.Tensor:
        """Compute scores in one forward, without a cache. behind: tokens that follow the text; no score can depend on them."""
        text = [*self.prompt, *self.output[:-1], *[self.output[-1]] * behind]
        kept = len(self.output) + behind
        logits = self.target.model(input_ids=_ids(self.target, text), use_cache=False, **_keeping(self.target, kept)).logits[0]
        return logits[-kept : logits.shape[0] - behind].float()

    @without_cudnn()
    def _in_pieces(self, size: int) -> torch.Tensor:
        """Compute scores by the model's own cache: the prompt, then `size` tokens at a time."""
        model, ids, name = self.target.model, self.output[:-1], self.target.state_name
        step = model(input_ids=_ids(self.target, self.prompt), use_cache=True, **_keeping(self.target, 1))
        scores = [step.logits[0, -1:]]
        for start in range(0, len(ids), size):
            piece = _ids(self.target, ids[start : start + size])
            step = model(input_ids=piece, use_cache=True, **{name: getattr(step, name)})
            scores.append(step.logits[0])
        return torch.cat(scores).float()


def _behind_best(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[any, positions]: how far the scores of tokens [any, positions] lie below the best ones. scores: [positions, vocab]."""
    return scores.max(-1).values - scores.gather(1, tokens.T).T


def _rounded(score: float) -> float | None:
    """Round for JSON, which has no numbers that are not finite."""
    return round(score, 6) if math.isfinite(score) else None


def _ids(target: TargetModel, token_ids: Ids) -> torch.Tensor:
    return torch.tensor([list(token_ids)], device=target.device)


def _keeping(target: TargetModel, last: int) -> dict[str, Any]:
    """Spare the scores before the last ones, where the model can."""
    return {"logits_to_keep": last} if "logits_to_keep" in target.arguments else {}
