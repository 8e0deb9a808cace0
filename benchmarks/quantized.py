"""Quantized models beside bfloat16: single forwards, logged answers, memory. In: a model's shape, a log of ids. Out: tables.

    python benchmarks/quantized.py --model FOLDER --replay logged.jsonl --trie answers.trie

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
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain
from lookahead.forward.slots import Slots, slots_of
from lookahead.forward.target import TargetModel
from lookahead.models.linear import LaidOutLinear
from lookahead.models.load import random_model
from lookahead.trie.file import Trie

MODELS = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
TOKENS = (1, 4, 8, 16, 64)
PAST = 100  # tokens before those of a forward
TURNS = 25


def weights_of(target: TargetModel) -> int:
    """Bytes of its weights, each counted once."""
    held = {id(tensor): tensor for tensor in target.model.parameters()}
    layers = [module.laid_out for module in target.model.modules() if isinstance(module, LaidOutLinear)]
    held |= {id(layer.weight): layer.weight for layer in layers}  # type: ignore[union-attr]
    return sum(tensor.nbytes for tensor in held.values())


def begun(target: TargetModel) -> Slots:
    slots = slots_of(target)
    text = np.arange(5, 5 + PAST, dtype=np.int32)
    slots.begin(slots.add(text.tolist(), PAST))
    slots.forward([chain(text)], ["last"])
    slots.keep([range(PAST)])
    return slots


@torch.inference_mode()
def forwards(targets: dict[str, TargetModel]) -> Iterator[dict[str, Any]]:
    """Median milliseconds of a forward of so many tokens, their scores included."""
    started = {name: begun(target) for name, target in targets.items()}
    for tokens in TOKENS:
        tree, taken = chain(np.arange(5, 5 + tokens, dtype=np.int32)), {name: list[float]() for name in targets}
        for _ in range(TURNS):
            for name, slots in started.items():
                start = time.perf_counter()
                slots.forward([tree], ["all"])
                taken[name].append(1e3 * (time.perf_counter() - start))
                slots.keep([[]])
        yield {"tokens": tokens, "ms": {name: round(median(times), 2) for name, times in taken.items()}}


def answers(
    targets: dict[str, TargetModel], rows: list[dict[str, Any]], trie: str, batch_size: int, turns: int
) -> dict[str, Any]:
    """Median tokens/s of plain decoding and of auto."""
    prompts, said = [row["prompt_ids"] for row in rows], [row["response_ids"] for row in rows]
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    for turn in range(turns):
        for name, target in targets.items():
            options = {"peers": False, "batch_size": batch_size, "answers": said, "warm_up": 0 if turn else 2}
            for run in compare(target, prompts, [Trie(trie)], [DraftOptions()], **options).runs:  # type: ignore[arg-type]
                speeds[name].setdefault(run.name, []).append(run.tokens / run.seconds)
    found = {name: {run: round(median(each), 1) for run, each in runs.items()} for name, runs in speeds.items()}
    return {"batch_size": batch_size, "tokens_per_second": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name; its config.json is enough")
    parser.add_argument("--replay", help="logged answers, of ids")
    parser.add_argument("--trie", help="to draft from")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    targets = {name: random_model(arguments.model, "bfloat16", "cpu", quantize=scheme) for name, scheme in MODELS.items()}
    print(json.dumps({"weights_bytes": {name: weights_of(target) for name, target in targets.items()}}), flush=True)
    if not arguments.replay:
        for each in forwards(targets):
            print(json.dumps(each), flush=True)
        return
    with open(arguments.replay, encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, arguments.rows)]
    print(json.dumps(answers(targets, rows, arguments.trie, arguments.batch_size, arguments.turns)))


if __name__ == "__main__":
    main()
