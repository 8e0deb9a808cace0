"""Speed on hardware that one does not have. In: logged answers and a cost profile. Out: the comparison that a bench would give.

The real engine runs over a model that only costs time (models/simulated.py): drafting, acceptance and the budget are those of
the job, its answers being given. What this machine needs for drafting and bookkeeping counts as it is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lookahead.bench.compare import Comparison, compare
from lookahead.bench.replay import Pair
from lookahead.budget.profile import CostProfile
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError
from lookahead.models.simulated import simulated_model
from lookahead.trie.file import Trie


def predict(
    profile: CostProfile,
    pairs: Sequence[Pair],
    tries: Sequence[Trie],
    options: Sequence[DraftOptions],
    weights: Sequence[float] | None = None,
    batch_size: int = 1,
    repeats: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> Comparison:
    """Plain decoding and each of `options` over the pairs, with forwards that cost what `profile` gives.

    weights: of the tries, see `Drafter`. repeats: see `compare`. Raises LookaheadError for a pair that the profile's model has
    no room for.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    if longest > profile.longest_text:
        raise LookaheadError(f"a logged text has {longest} tokens, the model of the profile {profile.longest_text} positions.")
    prompts, answers = [prompt for prompt, _ in pairs], [answer for _, answer in pairs]
    found = compare(
        simulated_model(profile), prompts, tries, options, peers=False,
        progress=progress, weights=weights, batch_size=batch_size, answers=answers, repeats=repeats,
    )  # fmt: skip
    for turn in (turn for run in found.runs for turn in run.turns):
        turn.peak_memory_bytes = 0
    environment = {"cost_profile": profile.kind, **profile.about}
    return dataclasses.replace(found, device=profile.setting.device, environment=environment, predicted=True)
