"""Quantized models beside bfloat16: single forwards, logged answers, memory. In: a model's shape, a log of ids. Out: tables.

    python benchmarks/quantized.py --model FOLDER --replay logged.jsonl --trie answers.trie
    python benchmarks/quantized.py --model FOLDER --caches --past 1800 --batch-size 8     # KV caches in place of linear layers

Weights are random. All models stand side by side and take turns, a forward or a pass over the answers each, so that what else
the machine does meets all of them. logged.jsonl: rows {"prompt_ids", "response_ids"}, the tokens taken as the model's choices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch

from lookahead.bench.compare import compare
from lookahead.bench.contenders import ModelBench
from lookahead.bench.on_model import weight_bytes
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.forward.slots import Slots, slots_of
from lookahead.forward.target import TargetModel
from lookahead.models.load import random_model
from lookahead.models.options import ModelOptions
from lookahead.trie.file import Trie

MODELS = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
TOKENS = (1, 4, 8, 16, 64)
CHUNK = 256  # tokens of a text that go through a model at once, before its forwards are timed
TURNS = 25


def begun(target: TargetModel, past: int, rows: int) -> Slots:
    slots = slots_of(target)
    text = 5 + np.arange(past, dtype=np.int32) % 1000
    for _ in range(rows):
        slots.begin(slots.add(text.tolist(), max(TOKENS)))
    for start in range(0, past, CHUNK):
        chunk = text[start : start + CHUNK]
        slots.forward(side_by_side([chain(chunk)] * rows, ["last"] * rows))
        slots.keep([range(len(chunk))] * rows)
    return slots


@torch.inference_mode()
def forwards(targets: dict[str, TargetModel], past: int, rows: int) -> Iterator[dict[str, Any]]:
    """Median milliseconds of a forward of so many tokens of each row, behind `past` others, their scores included."""
    started = {name: begun(target, past, rows) for name, target in targets.items()}
    for tokens in TOKENS if rows == 1 else TOKENS[:3]:
        tree, taken = chain(np.arange(5, 5 + tokens, dtype=np.int32)), {name: list[float]() for name in targets}
        for _ in range(TURNS):
            for name, slots in started.items():
                start = time.perf_counter()
                slots.forward(side_by_side([tree] * rows, ["all"] * rows))
                taken[name].append(1e3 * (time.perf_counter() - start))
                slots.keep([[]] * rows)
        yield {"rows": rows, "tokens": tokens, "ms": {name: round(median(times), 2) for name, times in taken.items()}}


def answers(
    targets: dict[str, TargetModel], rows: list[dict[str, Any]], trie: str, batch_size: int, turns: int
) -> dict[str, Any]:
    """Median tokens/s of plain decoding and of auto."""
    prompts, said = [row["prompt_ids"] for row in rows], [row["response_ids"] for row in rows]
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    for turn in range(turns):
        for name, target in targets.items():
            bench = ModelBench(ModelOptions(), [DraftOptions()], peers=False)
            some = {"tries": [Trie(trie)], "answers": said, "warm_up": 0 if turn else 2}
            for run in compare(target, prompts, bench, batch_size, **some).runs:  # type: ignore[arg-type]
                speeds[name].setdefault(run.name, []).append(run.tokens / run.seconds)
    found = {name: {run: round(median(each), 1) for run, each in runs.items()} for name, runs in speeds.items()}
    return {"batch_size": batch_size, "tokens_per_second": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name; its config.json is enough")
    parser.add_argument("--replay", help="logged answers, of ids")
    parser.add_argument("--trie", help="to draft from")
    parser.add_argument("--caches", action="store_true", help="compare KV caches of few bits in place of linear layers")
    parser.add_argument("--past", type=int, default=100, help="tokens before those of a forward")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    given = "kv_dtype" if arguments.caches else "quantize"
    schemes: dict[str, dict[str, Any]] = {name: {given: scheme} for name, scheme in MODELS.items()}
    targets = {
        name: random_model(arguments.model, dtype="bfloat16", device="cpu", **scheme) for name, scheme in schemes.items()
    }
    print(json.dumps({"weights_bytes": {name: weight_bytes(target.model) for name, target in targets.items()}}), flush=True)
    print(json.dumps({"cache_bytes_per_token": {name: target.kv_bytes for name, target in targets.items()}}), flush=True)
    if not arguments.replay:
        for each in forwards(targets, arguments.past, arguments.batch_size):
            print(json.dumps(each), flush=True)
        return
    with open(arguments.replay, encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, arguments.rows)]
    print(json.dumps(answers(targets, rows, arguments.trie, arguments.batch_size, arguments.turns)))


if __name__ == "__main__":
    main()
