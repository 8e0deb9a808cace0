"""Our engine beside llama.cpp: the same GGUF file, prompts and machine, by turns, at batch size 1.

In: a GGUF file, prompts, a Python that has llama-cpp-python. Out: as of beside_openvino.py, which tells how turns are taken.

    python -m venv llama && llama/bin/pip install llama-cpp-python
    python benchmarks/beside_llama_cpp.py --peer llama/bin/python --model FILE.gguf --dtype bfloat16 --input rows.jsonl

Its plain decoding is a loop of `llama_decode` and the largest score, without what its Python classes add; its drafts are those
of its `LlamaPromptLookupDecoding`. It multiplies the blocks of a file with tokens of 8 bits, ours with tokens of --dtype, so
answers differ. Peer and contenders are each told the number of threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from beside_openvino import SAMPLES, WARM_UP, Peer, compare, ours, prompt_ids

ROOM = 4096  # tokens of a text


def serve(model: str, threads: int, tokens: int) -> None:
    """Answer prompts: a line of JSON each way."""
    import llama_cpp
    import numpy as np
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    known: dict[str, Any] = {
        "model_path": model,
        "n_ctx": ROOM,
        "n_threads": threads,
        "n_threads_batch": threads,
        "verbose": False,
    }
    plain, drafting = Llama(**known), Llama(**known, draft_model=LlamaPromptLookupDecoding(), logits_all=True)
    context, vocab = plain.ctx, plain.n_vocab()
    batch = llama_cpp.llama_batch_init(ROOM, 0, 1)

    def next_token(ids: list[int], begin: int) -> int:
        """Put tokens into the cache, from this position on."""
        batch.n_tokens = len(ids)
        for number, token in enumerate(ids):
            batch.token[number], batch.pos[number], batch.logits[number] = token, begin + number, number == len(ids) - 1
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, 0
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        scores = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, len(ids) - 1), (vocab,))
        return int(scores.argmax())

    def decode(prompt: list[int]) -> list[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        answer: list[int] = []
        for begin in range(0, len(prompt), plain.n_batch):  # so many that it takes at once
            last = next_token(prompt[begin : begin + plain.n_batch], begin)
        while len(answer) < tokens:
            answer.append(last)
            if len(answer) < tokens:
                last = next_token([last], len(prompt) + len(answer) - 1)
        return answer

    def draft(prompt: list[int]) -> list[int]:
        answer = []
        for token in drafting.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            answer.append(int(token))
            if len(answer) == tokens:
                break
        return answer

    pipes: dict[str, Callable[[list[int]], list[int]]] = {"llama.cpp": decode, "llama.cpp prompt lookup": draft}
    print(json.dumps({"pipes": list(pipes), "version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        ids = [pipes[asked["pipe"]](prompt) for prompt in asked["prompts"]]
        print(json.dumps({"ids": ids, "seconds": time.perf_counter() - began}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="a Python with llama-cpp-python", default=sys.executable)
    parser.add_argument("--model", help="a GGUF file", required=True)
    parser.add_argument("--input", default=str(SAMPLES / "prompts.jsonl"))
    parser.add_argument("--trie", action="append", help="that drafts come from")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--turn", type=int, default=2, help="prompts of a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.model, arguments.threads, arguments.tokens)
        return
    from lookahead.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(arguments.model)
    with open(arguments.input, encoding="utf-8") as file:
        prompts = [prompt_ids(tokenizer, json.loads(line)) for line in file][: arguments.rows + WARM_UP * arguments.turn]
    command = [arguments.peer, __file__, "--serve", "--model", arguments.model]
    peer = Peer([*command, "--threads", str(arguments.threads), "--tokens", str(arguments.tokens)])
    contenders = ours(arguments.model, arguments.dtype, arguments.threads, 1, arguments.tokens, arguments.trie or ())
    contenders |= {name: peer.answer(name) for name in peer.pipes}
    how = f"{arguments.dtype}, {arguments.threads} threads, {arguments.tokens} tokens each"
    print(f"{arguments.model}, {how}; llama-cpp-python {peer.version}")
    compare(contenders, prompts, arguments.turn, "llama.cpp")
    peer.close()


if __name__ == "__main__":
    main()
