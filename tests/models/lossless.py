"""What all models with quantized weights, tokens or caches must hold: drafts and batches change no token."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.forward.target import TargetModel
from lookahead.tokenizer import load_tokenizer
from tests.architectures import VOCAB_SIZE, decoded, random_prompts
from tests.support.cli import Cli, write_jsonl
from tests.support.drafts import drafter_of
from tests.support.jobs import rows_of

DEMO = "samples/demo-model"


def assert_any_draft_yields_the_plain_tokens(target: TargetModel, make_trie: Any) -> None:
    assert target.exact, target.reason
    prompts = random_prompts()
    plain = decoded(DecodingEngine(target, Drafter([], DraftOptions("off")), 1), prompts)
    answers = [(prompt, each.token_ids) for prompt, each in zip(prompts, plain, strict=True)]
    trie = make_trie([[*prompt, *answer] for prompt, answer in answers], VOCAB_SIZE)
    for draft, batch_size in (("perfect", 1), ("random_trees", 8), ("trie", 3), ("none", 8)):
        done = decoded(DecodingEngine(target, drafter_of(draft, answers, trie), batch_size), prompts)
        assert [g.token_ids for g in done] == [answer for _, answer in answers], (draft, batch_size)
        assert draft != "perfect" or sum(each.steps for each in done) < sum(each.steps for each in plain)


def assert_demo_model_answers_the_same(target: TargetModel, new_tokens: int) -> None:
    """With drafts, with as many as pay, and in batches."""
    assert target.exact, target.reason
    tokenizer = load_tokenizer(DEMO)
    prompts = [tokenizer(f"Question: {n} apples and {n + 3} pears cost {n * 7}.\nAnswer:")["input_ids"] for n in range(2, 12)]
    plain, *others = (
        [each.token_ids for each in decoded(DecodingEngine(target, Drafter([], options), batch_size), prompts, new_tokens)]
        for options, batch_size in (
            (DraftOptions("off"), 1),
            (DraftOptions(decoding_length=16, adaptive=False), 1),
            (DraftOptions(), 8),
        )
    )
    assert others == [plain, plain]


def answers_of_jobs(cli: Cli, folder: Path, jobs: Iterable[Sequence[object]]) -> list[dict[Any, list[int]]]:
    """Of each job, given by its options: id -> token ids. The rows are the same; the outputs are 0.jsonl, 1.jsonl ..."""
    rows = [{"prompt": f"Question: {n} apples cost {2 * n}. How much do {3 * n}?\nAnswer:"} for n in range(2, 10)]
    prompts, found = write_jsonl(folder / "prompts.jsonl", rows), []
    for number, options in enumerate(jobs):
        out = folder / f"{number}.jsonl"
        result = cli("generate", "--input", prompts, "-o", out, "--max-new-tokens", 30, "--token-ids", *options)
        assert result.code == 0, result.err
        found.append({row["id"]: row["token_ids"] for row in rows_of(out)})
    return found
