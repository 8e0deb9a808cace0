"""Train what drafting believes before a job has taught it better: lookahead/draft/priors.msgpack.

Usage: python samples/train_priors.py PAIRS.jsonl[:CORPUS.trie] ... -o lookahead/draft/priors.msgpack

Each PAIRS file holds logged {"prompt_ids", "response_ids"} rows of one kind of text, and each is replayed cold and, where a
trie of other text of that kind is given, warm. What the replays learn is added up. Give kinds as different as the jobs to come:
chat, prose, code, edits. Only how far matches of each kind can be trusted is kept, nothing of the text and nothing that depends
on a tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgpack
import numpy as np

from lookahead.bench.replay import Pair, replay_with
from lookahead.draft.calibration import Calibration
from lookahead.draft.cells import CELLS
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.priors import UNTRAINED, Priors
from lookahead.files.atomic import replacing
from lookahead.job.pairs import pairs_of, read_log
from lookahead.trie.file import Trie

ROWS = 80  # of each kind, so that none outweighs the others
DECODING_LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", metavar="PAIRS.jsonl[:CORPUS.trie]")
    parser.add_argument("-o", "--output", required=True, type=Path)
    arguments = parser.parse_args()
    workloads = []
    for workload in arguments.workloads:
        pairs, _, trie = workload.partition(":")
        workloads.append((pairs_of(read_log(pairs, ROWS), lambda: None), [Trie(trie)] if trie else []))
    learned = train(workloads)
    # What a computed probability is worth depends on what has been learned, so it is measured in a second pass.
    learned["calibration"] = calibrate(workloads, Priors(**learned, calibration=None))
    with replacing(arguments.output) as file:
        file.write(msgpack.packb({name: array.astype("<f4").tobytes() for name, array in learned.items()}))
    print(f"{arguments.output}: learned from {len(workloads)} kinds of text")


def train(workloads: list[tuple[list[Pair], list[Trie]]]) -> dict[str, np.ndarray]:
    """lambdas, over all workloads, cold and warm."""
    unsure = Priors(np.full(CELLS, UNTRAINED, np.float32), None, strength=1e-3)
    earned = np.tile(np.array([UNTRAINED, 1], np.float32), (CELLS, 1))
    for pairs, tries in workloads:
        for opened in [[], tries] if tries else [[]]:
            drafter = Drafter(opened, DraftOptions(decoding_length=2), priors=unsure)
            replay_with(drafter, pairs)
            earned += drafter.shared.earned
    return {"lambdas": earned[:, 0] / earned[:, 1]}


def calibrate(workloads: list[tuple[list[Pair], list[Trie]]], priors: Priors) -> np.ndarray:
    """Accepted / predicted by computed probability, over all workloads."""
    calibration = Calibration()
    for pairs, tries in workloads:
        for opened in [[], tries] if tries else [[]]:
            drafter = Drafter(opened, DraftOptions(decoding_length=DECODING_LENGTH), priors=priors)
            replay_with(drafter, pairs)
            calibration.counted += drafter.shared.counted
    return calibration.ratio()


if __name__ == "__main__":
    main()
