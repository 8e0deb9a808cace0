"""Seconds that drafting takes of a step of another engine: from the tokens of a batch to their drafts.

In: logged prompts and answers, tries. Out: milliseconds of `Requests.step` (median and 95th percentile over steps) for
each batch size; tokens drafted and emitted per row. Rows are answered as logged, all at once; a row whose answer
has ended starts another one. `--evict` overwrites that many MiB between two steps, as the forward of a model on this CPU does:
then the arrays of drafting are not in the caches.

    python benchmarks/draft_time.py
    python benchmarks/draft_time.py --pairs logged.jsonl --trie corpus.trie --batch-sizes 32,128,256

Rows of --pairs hold `prompt_ids` and `response_ids`. The default is the logged sample, as in host_time.py.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from host_time import Pair, read_pairs, sample_pairs, sample_trie

from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions, Strategy
from lookahead.draft.tree import DraftTree
from lookahead.engines.requests import NewTokens, Requests
from lookahead.trie.file import Trie

WARM_UP = 20  # steps before the clock counts


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [pair for path in arguments.pairs for pair in read_pairs(path)] or sample_pairs()
        tries = [Trie(path) for path in arguments.trie or ([] if arguments.pairs else [sample_trie(Path(folder))])]
        for rows in map(int, arguments.batch_sizes.split(",")):
            kind: Strategy = "single" if arguments.chains else "hierarchical"
            options = DraftOptions(
                kind, arguments.draft_tokens + 1, arguments.draft_tokens, price=arguments.price, recycle=False
            )
            took, drafted, emitted = _measure(Drafter(tries, options), pairs, rows, arguments.steps, arguments.evict)
            print(
                f"{rows:4} rows   {1e3 * np.median(took):6.2f} ms (p95 {1e3 * np.percentile(took, 95):.2f})   "
                f"{drafted:.2f} drafted, {emitted:.2f} emitted per row and step",
                flush=True,
            )


def _measure(drafter: Drafter, pairs: Sequence[Pair], rows: int, steps: int, evict: int) -> tuple[np.ndarray, float, float]:
    """(seconds of each step, draft tokens, emitted tokens, of a row and step)."""
    requests, waiting, numbers = Requests(drafter), itertools.cycle(pairs), itertools.count()
    running: dict[Hashable, list[int]] = {}  # request -> what is left of its answer
    drafts: dict[Hashable, DraftTree] = {}
    spoiled = np.zeros(evict << 17)
    took, drafted, emitted = [], 0, 0
    for step in range(WARM_UP + steps):
        for number in [each for each, left in running.items() if not left]:
            requests.finish(number)
            del running[number], drafts[number]
        while len(running) < rows:
            prompt, answer = next(waiting)
            number = next(numbers)
            requests.begin(number, prompt)
            running[number] = list(answer[(7 * number) % max(1, len(answer) // 2) if step == 0 else 0 :])
        new = [NewTokens(number, list(_accepted(drafts.get(number), left)), 512) for number, left in running.items()]
        spoiled += 1
        began = time.perf_counter()
        trees = requests.step(new)
        seconds = time.perf_counter() - began
        for each, tree in zip(new, trees, strict=True):
            drafts[each.request_id] = tree
            del running[each.request_id][: len(each.token_ids)]
        if step >= WARM_UP:
            took.append(seconds)
            drafted += sum(map(len, trees)) - rows
            emitted += sum(len(each.token_ids) for each in new)
    return np.array(took), drafted / rows / steps, emitted / rows / steps


def _accepted(tree: DraftTree | None, left: Sequence[int]) -> Iterator[int]:
    """What a step emits: the path of a draft that is the answer's, and one token more."""
    node = 0
    for token in left:
        yield token
        children: Sequence[int] | np.ndarray = (
            [] if tree is None else np.flatnonzero((tree.parents == node) & (tree.token_ids == token))
        )
        if not len(children):
            return
        node = int(children[0])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="append", default=[], help="rows of prompt_ids and response_ids")
    parser.add_argument("--trie", action="append", help="that drafts come from")
    parser.add_argument("--batch-sizes", default="1,8,32,128,256")
    parser.add_argument("--draft-tokens", type=int, default=8, help="of a row and step, at most")
    parser.add_argument("--price", type=float, default=0.1, help="path probability that a draft token must have")
    parser.add_argument("--trees", dest="chains", action="store_false", help="instead of chains")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100, help="that are timed")
    parser.add_argument("--evict", type=int, default=0, help="MiB that are overwritten between two steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
