"""Time that the engine itself takes for a step: everything but the model's forward.

In: logged prompts and answers, tries. Out: microseconds per step, for each batch size and way of drafting. The engine runs over
a simulated model (lookahead/models/simulated.py) that computes nothing, with the answers given, so what is measured is
drafting, the draft budget, scheduling, packing, acceptance and accounting, as CPU time. With --model it runs over a real one;
then it is the time of steps less that of their forwards, prefills included.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --model samples/demo-model
    python benchmarks/host_time.py --pairs logged.jsonl --trie corpus.trie --rows 150

Rows of --pairs hold `prompt_ids` and `response_ids`. The default is the logged sample, which is tokenised by the demo model's
tokenizer, and a trie of the sample corpus.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lookahead.budget.profile import read_profile
from lookahead.decode.engine import DecodingEngine, Generation
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.forward.target import TargetModel
from lookahead.models.load import load_model
from lookahead.models.simulated import simulated_model
from lookahead.trie.file import Trie
from lookahead_cli.app import run

SAMPLES = Path(__file__).parent.parent / "samples"
WARM_UP = 4  # requests that are answered before the clock starts
Pair = tuple[list[int], list[int]]
WAYS = {
    "plain": DraftOptions(strategy="off"),
    "auto": DraftOptions(adaptive=True),
    "fixed 8": DraftOptions(decoding_length=8, adaptive=False),
}


def main() -> None:
    arguments = _arguments()
    target = load_model(arguments.model, dtype="float32", device="cpu") if arguments.model else None
    if target is None:
        torch.set_num_threads(1)
    profile = read_profile(arguments.profile)
    with tempfile.TemporaryDirectory() as folder:
        pairs = read_pairs(arguments.pairs) if arguments.pairs else sample_pairs()
        tries = [Trie(arguments.trie or sample_trie(Path(folder)))] if arguments.trie or not arguments.pairs else []
        for batch_size in arguments.batch_sizes:
            rows = pairs[: arguments.rows or max(25, 5 * batch_size)]
            for way, options in WAYS.items():
                runs = [
                    _run(target or simulated_model(profile), tries, options, batch_size, rows) for _ in range(arguments.repeats)
                ]
                seconds, steps, tokens = min(runs)
                print(
                    f"batch {batch_size:3}  {way:8} {1e6 * seconds / steps:7.0f} us per step   {steps} steps, "
                    f"{tokens / steps:.2f} tokens per step",
                    flush=True,
                )


def _run(
    target: TargetModel, tries: Sequence[Trie], options: DraftOptions, batch_size: int, rows: Sequence[Pair]
) -> tuple[float, int, int]:
    """(Seconds outside of forwards, steps, tokens) of answering these rows."""
    drafter = Drafter(tries, options)
    drafter.warm_up()
    engine = DecodingEngine(target, drafter, batch_size, prefill_chunk=4096)
    for _ in engine.run(given_requests(engine, rows[-WARM_UP:])):
        pass
    steps, forwards, clock = engine.clock.steps, engine.clock.forward, time.process_time
    if target.program is not None:
        clock = time.perf_counter
    began = clock()
    tokens = sum(len(generation.token_ids) for generation in engine.run(given_requests(engine, rows)))
    seconds = clock() - began
    if target.program is not None:
        seconds -= engine.clock.forward - forwards
    return seconds, engine.clock.steps - steps, tokens


def given_requests(engine: DecodingEngine, rows: Sequence[Pair]) -> Iterator[Generation]:
    """Requests whose answers are given."""
    for prompt_ids, response_ids in rows:
        generation = engine.request(prompt_ids, len(response_ids))
        generation.forced = response_ids
        yield generation


def read_pairs(path: str | Path) -> list[Pair]:
    """Logged prompts and answers, as token ids."""
    with open(path, encoding="utf-8") as file:
        return [(row["prompt_ids"], row["response_ids"]) for row in map(json.loads, file)]


def sample_pairs() -> list[Pair]:
    from lookahead.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(SAMPLES / "demo-model"))
    with open(SAMPLES / "prompts.jsonl", encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    with open(SAMPLES / "logged.jsonl", encoding="utf-8") as file:
        answers = [json.loads(line)["token_ids"] for line in file]
    return [(tokenizer.encode(prompt), answer) for prompt, answer in zip(prompts, answers, strict=False)]


def sample_trie(folder: Path) -> Path:
    path = folder / "corpus.trie"
    run(["build-trie", str(SAMPLES / "corpus.jsonl"), "-o", str(path), "--tokenizer", str(SAMPLES / "demo-model"), "--json"])
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", help="JSON lines with prompt_ids and response_ids")
    parser.add_argument("--trie", help="default: none with --pairs, else one of the sample corpus")
    parser.add_argument("--profile", default="llama-7b-h200", help="cost profile, as of `lookahead replay`")
    parser.add_argument("--model", help="a model with a program of its own (--engine-mode program), instead of a simulated one")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, help="default: 5 for each row of a batch, at least 25")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
