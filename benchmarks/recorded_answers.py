"""Answers of a real model with its best tokens at each position: recorded once, replayed without the model.

In: a model and rows with prompts. Out of `record`: an .npz file of prompts, answers and, of the scores that each answer token
was chosen by, the best 8. Out of `replay`: EDL of such files at several numbers of draft tokens, cold and, with --trie, warm.
Logs replay without scores; a recording shows what runner-up tokens bring, too. Of nodes that were not
accepted the scores are unknown: a job also recycles those.

    python benchmarks/recorded_answers.py record --model FOLDER --input prompts.jsonl -o answers.npz
    python benchmarks/recorded_answers.py record --model FOLDER --input prompts.jsonl --temperature 0.8 -o sampled.npz
    python benchmarks/recorded_answers.py replay answers.npz sampled.npz --trie corpus.trie
    python benchmarks/recorded_answers.py replay        # the sample: 8 answers of SmolLM2-135M-Instruct to questions of GSM8K

Rows of --input hold `prompt` or `messages`, as those of `lookahead generate`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead.errors import LookaheadError

SAMPLE = Path(__file__).parent / "recorded" / "gsm8k-sample.npz"
BEST = 8


class Answer(NamedTuple):
    """prompt, answer: int32. ids, scores: int32 and float32 [answer tokens, 8], of the scores that each token was chosen by."""

    prompt: np.ndarray
    answer: np.ndarray
    ids: np.ndarray
    scores: np.ndarray


def record(model: str, prompts: Path, path: Path, rows: int, tokens: int, temperature: float) -> None:
    """Answer the first rows of a file and write the recording."""
    from lookahead import GenerationParams, LookaheadEngine
    from lookahead.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()[:rows]]
    chat = {"add_generation_prompt": True, "return_dict": False}
    asked = [
        tokenizer.apply_chat_template(line["messages"], **chat)
        if "messages" in line
        else tokenizer(line["prompt"])["input_ids"]
        for line in lines
    ]
    params = GenerationParams(max_new_tokens=tokens, temperature=temperature or None, seed=1, logprobs=BEST)
    found = LookaheadEngine(model, tokenizer, batch_size=8).generate(asked, params)
    top = [position.top for each in found for position in each.logprobs or ()]
    np.savez_compressed(
        path,
        prompts=np.concatenate(asked).astype(np.int32),
        answers=np.concatenate([each.token_ids for each in found]).astype(np.int32),
        prompt_lengths=[len(each) for each in asked],
        answer_lengths=[len(each.token_ids) for each in found],
        ids=np.array([[token for token, _ in each] for each in top], np.int32),
        scores=np.array([[score for _, score in each] for each in top], np.float16),
    )
    print(f"{path}: {len(found)} answers of {len(top)} tokens")


def read(path: Path) -> list[Answer]:
    """The answers of a recording."""
    try:
        with np.load(path) as file:
            prompts, answers = (np.cumsum(file[name])[:-1] for name in ("prompt_lengths", "answer_lengths"))
            columns = [np.split(file["prompts"], prompts)]
            columns += [np.split(file[name], answers) for name in ("answers", "ids", "scores")]
    except (ValueError, KeyError):
        raise LookaheadError(f"{path}: is not a recording. Make one: python benchmarks/recorded_answers.py record") from None
    return [Answer(p, a, i, s.astype(np.float32)) for p, a, i, s in zip(*columns, strict=True) if len(a) > 1]


def edl(answers: Sequence[Answer], tries: Sequence[Any], draft_tokens: int) -> float:
    """Emitted tokens a step, the first of each answer not counted, with drafts of a fixed size."""
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions
    from lookahead.draft.recycled import ANY

    drafter = Drafter(tries, DraftOptions(decoding_length=draft_tokens + 1, branch_length=draft_tokens, adaptive=False))
    best, steps = drafter.recycled.tokens.shape[1], 0
    for prompt, answer, ids, scores in answers:
        row, text, done, emitted = drafter.start(prompt), np.concatenate([prompt, answer]), 0, answer[:1].tolist()
        while True:
            row.accept(emitted)
            root, now = len(prompt) + done - 1, slice(done, done + len(emitted))  # the scores behind the root and on are known
            drafter.recycled.add(
                text[root : root + len(emitted)],
                np.arange(-1, len(emitted) - 1, dtype=np.int32),
                np.array([len(emitted)]),
                np.array([[ANY, ANY, *text[max(0, root - 2) : root].tolist()][:-3:-1]], np.int32),
                np.ascontiguousarray(ids[now, :best]),
                np.ascontiguousarray(scores[now, :best]),
            )
            done += len(emitted)
            if done == len(answer):
                break
            emitted, _ = row.draft(branch_length=len(answer) - done).follow(partial(_next_of, iter(answer[done:].tolist())))
            steps += 1
        row.finish()
    return sum(len(answer) - 1 for _, answer, _, _ in answers) / steps


def _next_of(ahead: Iterator[int], node: int, emitted: list[int]) -> int | None:
    return next(ahead, None)


def replay(paths: Sequence[Path], tries: Sequence[str], sizes: Sequence[int]) -> None:
    """Print EDL of each recording and the geometric means."""
    from lookahead.trie.file import Trie

    opened, recordings = [Trie(trie) for trie in tries], [read(path) for path in paths]
    starts = {"cold": [], **({"warm": opened} if opened else {})}
    print(("{:32}" + "{:>12}" * len(sizes) * len(starts)).format("EDL", *(f"{n} {start}" for start in starts for n in sizes)))
    means = []
    for path, answers in zip(paths, recordings, strict=True):
        found = [edl(answers, start, n) for start in starts.values() for n in sizes]
        means.append(found)
        print(f"{path.stem:32}" + "".join(f"{each:12.3f}" for each in found), flush=True)
    if len(means) > 1:
        mean = [math.prod(column) ** (1 / len(means)) for column in zip(*means, strict=True)]
        print(f"{'geometric mean':32}" + "".join(f"{each:12.3f}" for each in mean))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    recording = what.add_parser("record")
    recording.add_argument("--model", required=True)
    recording.add_argument("--input", type=Path, required=True)
    recording.add_argument("--rows", type=int, default=48)
    recording.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    recording.add_argument("--temperature", type=float, default=0.0)
    recording.add_argument("-o", "--output", type=Path, required=True)
    replaying = what.add_parser("replay")
    replaying.add_argument("recordings", type=Path, nargs="*", default=[SAMPLE])
    replaying.add_argument("--trie", action="append", default=[], help="that drafts come from")
    replaying.add_argument("--draft-tokens", default="3,7,15,63")
    args = parser.parse_args()
    try:
        if args.what == "record":
            record(args.model, args.input, args.output, args.rows, args.tokens, args.temperature)
        else:
            replay(args.recordings, args.trie, [int(n) for n in args.draft_tokens.split(",")])
    except (OSError, LookaheadError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
