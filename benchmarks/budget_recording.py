"""Recorded drafts, which a draft budget is simulated with. In: prompts and their answers. Out: a small .npz file a workload.

At each position of each answer a tree of up to 63 draft tokens is grown, as in a job that goes on from there: what was emitted
before is learned, outputs of earlier rows are remembered. Recorded are its calibrated path probabilities, in the order in which
nodes are verified (the most probable first), and which nodes the model's own continuation accepts. So the tokens that a step
emits are known for any position and any number of nodes, and a budget is simulated exactly.

    python benchmarks/budget_recording.py --pairs logged.jsonl --trie corpus.trie -o NAME.npz
    python benchmarks/budget_recording.py --pairs answers.jsonl --model FOLDER -o NAME.npz

Rows of --pairs hold `prompt_ids` and `response_ids`. --model: the model that gave the answers; its runner-up tokens are drafted
from, too. The file holds neither tokens nor text.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEP = 8  # levels of probability to an octave
MOST = 63  # draft tokens of a tree


class Recording(NamedTuple):
    """Positions of all rows, one row after the other.

    rows           int64 [rows + 1]: where each row begins
    prompts        int64 [rows]: tokens of its prompt
    probabilities  float32 [positions, MOST]: of paths, not increasing; 0: no node
    accepted       uint8 [positions, MOST + 1]: draft tokens accepted of the first n nodes, at most as many as the answer holds
    """

    rows: np.ndarray
    prompts: np.ndarray
    probabilities: np.ndarray
    accepted: np.ndarray


def _next_of(ahead: Iterator[int], node: int, emitted: list[int]) -> int | None:
    return next(ahead, None)


def read_recording(path: Path) -> Recording:
    """A file of `write_recording`."""
    with np.load(path) as file:
        counts, levels, paths, rows, prompts = (file[name] for name in ("counts", "levels", "paths", "rows", "prompts"))
        lengths = file["lengths"]
    positions = len(counts)
    probabilities = np.zeros((positions, MOST), np.float32)
    filled = np.arange(MOST) < counts[:, None]
    drops = np.zeros((positions, MOST), np.int64)
    drops[filled] = levels
    probabilities[filled] = (2.0 ** (-np.cumsum(drops, axis=1) / STEP))[filled]
    marks = np.zeros((positions, MOST + 1), np.uint8)
    marks[np.repeat(np.arange(positions), lengths), paths] = 1  # node 0 is the first draft token
    accepted = np.zeros((positions, MOST + 1), np.uint8)
    accepted[:, 1:] = np.cumsum(marks[:, :MOST], axis=1)
    return Recording(rows.astype(np.int64), prompts.astype(np.int64), probabilities, accepted)


def write_recording(
    path: Path, rows: Sequence[int], prompts: Sequence[int], trees: Sequence[np.ndarray], paths: Sequence[Sequence[int]]
) -> None:
    """trees: probabilities of draft tokens at each position; paths: the indices of accepted ones among them."""
    levels = []
    for tree in trees:
        level = np.round(-STEP * np.log2(np.minimum.accumulate(np.clip(tree, 2.0**-24, 1.0)))).astype(np.int64)
        levels.append(np.diff(level, prepend=0))
    np.savez_compressed(
        path,
        counts=np.array([len(tree) for tree in trees], np.uint8),
        levels=np.concatenate(levels).astype(np.uint8),
        paths=np.concatenate([np.array(each, np.uint8) for each in paths]),
        lengths=np.array([len(each) for each in paths], np.uint8),
        rows=np.array(rows, np.int32),
        prompts=np.array(prompts, np.int32),
    )


def record(pairs: Sequence[tuple[list[int], list[int]]], tries: Sequence[Any], model: str | None, path: Path) -> dict[str, Any]:
    """Writes the file; returns how right the probabilities are: by decile of nodes, and by depth and source."""
    from lookahead.draft.calibration import count_nodes
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions

    drafter = Drafter(tries, DraftOptions(decoding_length=MOST + 1, adaptive=False))
    best_of = _best_tokens(model) if model else None
    rows, prompts, trees, paths = [0], [], [], []
    nodes_seen: list[tuple[float, int, int, int]] = []  # probability, depth, source, accepted
    for prompt, answer in pairs:
        row, best = drafter.start(prompt), best_of(prompt, answer) if best_of else None
        row.accept(answer[:1])
        counted = 1  # up to which position the trees of whole steps were counted
        for done in range(1, len(answer)):
            tree = row.draft(branch_length=len(answer) - done)
            ahead = iter(answer[done:])
            emitted, walked = tree.follow(partial(_next_of, ahead))
            trees.append(tree.probabilities[1:].copy())
            paths.append([node - 1 for node in walked[1:]])
            on_path = set(walked[1:])
            depths = tree.depths()
            if done == counted:  # a whole step begins here
                nodes_seen += [
                    (float(tree.probabilities[k]), int(depths[k]), int(tree.sources[k]), int(k in on_path))
                    for k in range(1, len(tree))
                ]
                of_row = drafter.rows
                count_nodes(
                    of_row.trees[row.number], of_row.reach[row.number, 0], len(tree), len(tree), np.array(emitted, np.int32),
                    drafter.shared.by_depth, drafter.shared.counted, drafter.shared.counted_by_depth,
                )  # fmt: skip
                counted += len(emitted)
            drafter.rows.nodes[row.number] = 0  # counted above
            root, before = np.array(answer[done - 1 : done], np.int32), row.text[-2:-4:-1].copy()[None]
            row.accept(answer[done : done + 1])
            if best is not None:  # what the model says behind this root is known after the step
                top = best[0][done - 1 : done], best[1][done - 1 : done]
                drafter.recycled.add(root, np.array([-1], np.int32), np.array([1]), before, *top)
        row.finish()
        rows.append(len(trees))
        prompts.append(len(prompt))
    write_recording(path, rows, prompts, trees, paths)
    return _calibration(np.array(nodes_seen), drafter.source_names)


def _calibration(seen: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Nodes, mean probability and share that was accepted: by decile of expected tokens, and by depth and source."""

    def line(which: np.ndarray) -> list[float]:
        return [int(which.sum()), round(float(seen[which, 0].mean()), 4), round(float(seen[which, 3].mean()), 4)]

    order = np.argsort(-seen[:, 0], kind="stable")
    decile = np.empty(len(seen), int)
    decile[order] = (10 * np.cumsum(seen[order, 0]) / seen[:, 0].sum() - 1e-9).astype(int)
    found: dict[str, Any] = {"deciles": [line(decile == k) for k in range(10) if (decile == k).any()]}
    depth = np.minimum(np.frexp(seen[:, 1])[1] - 1, 3)
    found["by_depth_and_source"] = {
        f"depth {1 << d}+ {names[s] if s >= 0 else s}": line((depth == d) & (seen[:, 2] == s))
        for d in range(4)
        for s in sorted(set(seen[:, 2].astype(int)))
        if ((depth == d) & (seen[:, 2] == s)).sum() > 50
    }
    first = seen[: len(seen) // 5]
    found["first_fifth"] = [round(float(first[:, 0].sum()), 1), int(first[:, 3].sum())]
    found["all"] = [round(float(seen[:, 0].sum()), 1), int(seen[:, 3].sum())]
    return found


def _best_tokens(model: str) -> Any:
    """The model's best tokens behind each token of an answer."""
    import torch
    from transformers import AutoModelForCausalLM

    from lookahead.draft.recycled import BEST

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def best(prompt: Sequence[int], answer: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            logits = loaded(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) :]
        scores, ids = torch.log_softmax(logits.float(), -1).topk(BEST)
        return ids.numpy().astype(np.int32), scores.numpy()

    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--trie", nargs="*", default=[])
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    from lookahead.trie.file import Trie

    lines = [json.loads(line) for line in args.pairs.read_text(encoding="utf-8").splitlines()[: args.rows]]
    pairs = [(line["prompt_ids"], line["response_ids"][: args.tokens]) for line in lines]
    found = record([pair for pair in pairs if len(pair[1]) > 1], [Trie(trie) for trie in args.trie], args.model, args.output)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
