"""Our engine beside OpenVINO GenAI: same model, prompts and machine, by turns.

In: a model, prompts, a Python that has OpenVINO. Out: tokens per second of each, ratios to OpenVINO's plain decoding, and how
many answers are the same.

    python -m venv ov && ov/bin/pip install openvino-genai 'optimum-intel[openvino]'
    python benchmarks/beside_openvino.py --peer ov/bin/python
    python benchmarks/beside_openvino.py --peer ov/bin/python --batch-size 8 --dtype bfloat16
    python benchmarks/beside_openvino.py --peer ov/bin/python --forwards --model FOLDER

The peer runs in an environment of its own, as a process that answers the prompts that it is sent; it converts the model once,
into --folder. Everything is greedy, and each turn is a few prompts that all contenders answer one after the other, so that what
else the machine does meets all of them. At batch size 1 the peer is `LLMPipeline`, without and with its prompt lookup, above
that `ContinuousBatchingPipeline`; its precision and that of its keys and values are those asked for here. --forwards compares
single forwards of a few sizes, behind texts of PAST tokens, in place of answers.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

SAMPLES = Path(__file__).parent.parent / "samples"
WARM_UP = 2  # turns before, of other prompts
# For a prompt lookup: tokens that are drafted at most, and those that must match. As in OpenVINO's own example.
LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}
FORWARDS = ((1, 1), (1, 4), (1, 8), (1, 16), (1, 64), (8, 1), (8, 4))  # rows, tokens of each
PAST, TURNS = 128, 15
Answered = tuple[list[list[int]], float]  # token ids of each prompt, seconds
Answer = Callable[[list[list[int]]], Answered]


# The peer, in a process and an environment of its own.


def serve(model: str, folder: Path, dtype: str, threads: int, batch_size: int, tokens: int) -> None:
    """Answer prompts: a line of JSON each way."""
    import numpy as np
    import openvino
    import openvino_genai

    if not (folder / "openvino_model.xml").exists():
        _convert(model, folder)
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": threads,
    }
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
    lookup = openvino_genai.GenerationConfig()
    lookup.max_new_tokens, lookup.do_sample, lookup.ignore_eos = tokens, False, True
    for name, value in LOOKUP.items():
        setattr(lookup, name, value)

    def tensor(ids: list[int]) -> Any:
        return openvino.Tensor(np.array([ids], np.int64))

    pipes: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {}
    if batch_size > 1:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.enable_prefix_caching, scheduler.cache_size = batch_size, False, 1
        batching = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

        def batched(prompts: list[list[int]]) -> list[list[int]]:
            found = batching.generate([tensor(ids) for ids in prompts], [config] * len(prompts))
            return [list(each.m_generation_ids[0]) for each in found]

        pipes["openvino"] = batched
    else:

        def alone(pipe: Any, config: Any) -> Callable[[list[list[int]]], list[list[int]]]:
            def answer(prompts: list[list[int]]) -> list[list[int]]:
                found = []
                for ids in prompts:
                    mask = openvino.Tensor(np.ones((1, len(ids)), np.int64))
                    found.append(list(pipe.generate(openvino_genai.TokenizedInputs(tensor(ids), mask), config).tokens[0]))
                return found

            return answer

        pipes["openvino"] = alone(openvino_genai.LLMPipeline(str(folder), "CPU", **properties), config)
        with_lookup = openvino_genai.LLMPipeline(str(folder), "CPU", prompt_lookup=True, **properties)
        pipes["openvino prompt lookup"] = alone(with_lookup, lookup)
    print(json.dumps({"pipes": list(pipes), "version": openvino_genai.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        ids = pipes[asked["pipe"]](asked["prompts"])
        seconds = time.perf_counter() - began
        print(json.dumps({"ids": [[int(token) for token in each] for each in ids], "seconds": seconds}), flush=True)


def serve_forwards(model: str, folder: Path, dtype: str, threads: int) -> None:
    """Take forwards: a line of JSON, [rows, tokens], and a line of seconds back."""
    import numpy as np
    import openvino

    if not (folder / "openvino_model.xml").exists():
        _convert(model, folder)
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": threads}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(folder / "openvino_model.xml"), "CPU", properties)
    request = compiled.create_infer_request()
    names = {name for each in compiled.inputs for name in each.names}

    def infer(rows: int, begin: int, tokens: int) -> None:
        fed = {
            "input_ids": np.tile(np.arange(begin, begin + tokens, dtype=np.int64) + 5, (rows, 1)),
            "attention_mask": np.ones((rows, begin + tokens), np.int64),
            "position_ids": np.tile(np.arange(begin, begin + tokens, dtype=np.int64), (rows, 1)),
            "beam_idx": np.arange(rows, dtype=np.int32),
        }
        request.infer({name: array for name, array in fed.items() if name in names})

    print(json.dumps({"pipes": ["openvino"], "version": openvino.__version__}), flush=True)
    for line in sys.stdin:
        rows, tokens = json.loads(line)["forward"]
        request.reset_state()
        infer(rows, 0, PAST)
        infer(rows, PAST, tokens)  # memory for keys and values is there from then on
        began = time.perf_counter()
        infer(rows, PAST + tokens, tokens)
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


def _convert(model: str, folder: Path) -> None:
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    OVModelForCausalLM.from_pretrained(model, export=True, compile=False, load_in_8bit=False).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(folder)
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer

    for name, made in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True):
        save_model(made, folder / f"openvino_{name}.xml")


class Peer:
    """That process. pipes: its contenders."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._read()
        self.pipes, self.version = said["pipes"], said["version"]

    def answer(self, pipe: str) -> Answer:
        def asked(prompts: list[list[int]]) -> Answered:
            assert self._process.stdin
            print(json.dumps({"pipe": pipe, "prompts": prompts}), file=self._process.stdin, flush=True)
            said = self._read()
            return said["ids"], said["seconds"]

        return asked

    def forward(self, rows: int, tokens: int) -> float:
        """Seconds of one."""
        assert self._process.stdin
        print(json.dumps({"forward": [rows, tokens]}), file=self._process.stdin, flush=True)
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("the peer has ended: see above")


# Ours.


def ours(model: str, dtype: str, threads: int, batch_size: int, tokens: int, tries: Sequence[str]) -> dict[str, Answer]:
    """`model.generate` (of a folder, at batch size 1), our plain decoding, and drafts with lengths as they pay."""
    import torch
    from transformers import AutoModelForCausalLM

    from lookahead.decode.engine import DecodingEngine
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions
    from lookahead.models.load import load_model

    torch.set_num_threads(threads)
    target = load_model(model, dtype=dtype)
    found: dict[str, Answer] = {}

    def engine_of(drafter: Drafter) -> Answer:
        engine = DecodingEngine(target, drafter, batch_size)

        def answer(prompts: list[list[int]]) -> Answered:
            began = time.perf_counter()
            requests = [engine.request(ids, tokens) for ids in prompts]
            for request in requests:
                request.stop_ids = frozenset()
            for _ in engine.run(iter(requests)):
                pass
            return [request.token_ids for request in requests], time.perf_counter() - began

        return answer

    if batch_size == 1 and Path(model).is_dir():
        stock = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        stock.generation_config.eos_token_id = None

        def generate(prompts: list[list[int]], **lookup: int) -> Answered:
            began, answers = time.perf_counter(), []
            for ids in prompts:
                text, asked = torch.tensor([ids]), {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
                output = stock.generate(text, attention_mask=torch.ones_like(text), **asked, **lookup)
                answers.append(output[0, len(ids) :].tolist())
            return answers, time.perf_counter() - began

        found["model.generate"] = generate
        found["HF prompt lookup"] = functools.partial(generate, prompt_lookup_num_tokens=10)
    found["plain"] = engine_of(Drafter((), DraftOptions(strategy="off")))
    found["auto"] = engine_of(Drafter(tries, DraftOptions(adaptive=True)))
    return found


def compare(contenders: dict[str, Answer], prompts: Sequence[list[int]], size: int, reference: str) -> None:
    """Turn by turn. size: prompts of a turn. reference: whose speed and answers the others' are compared with."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    tokens, same = dict.fromkeys(contenders, 0), dict.fromkeys(contenders, 0)
    counted = len(prompts) - WARM_UP * size
    for number, turn in enumerate([*_turns(prompts[counted:], size), *_turns(prompts[:counted], size)]):
        answered = {name: answer(turn) for name, answer in contenders.items()}
        for name, (ids, taken) in answered.items() if number >= WARM_UP else ():
            seconds[name].append(taken)
            tokens[name] += sum(map(len, ids))
            same[name] += sum(a == b for a, b in zip(ids, answered[reference][0], strict=True))
    for name in contenders:
        ratio = median(theirs / own for theirs, own in zip(seconds[reference], seconds[name], strict=True))
        rate = tokens[name] / sum(seconds[name])
        print(f"{name:24} {rate:8.0f} tokens/s  {ratio:5.2f} x {reference}   {same[name]} of {counted} answers the same")


def compare_forwards(arguments: argparse.Namespace, peer: Peer) -> None:
    """Seconds of forwards of a few sizes, by turns."""
    import numpy as np
    import torch

    from lookahead.draft.tree import chain, side_by_side
    from lookahead.forward.slots import slots_of
    from lookahead.models.load import load_model

    torch.set_num_threads(arguments.threads)
    target = load_model(arguments.model, dtype=arguments.dtype)

    @torch.inference_mode()
    def forward(rows: int, tokens: int) -> float:
        slots = slots_of(target)
        for _ in range(rows):
            slots.add([*range(5, 5 + PAST + 2 * tokens)])  # nobody begins: a text that another holds would be copied
        seconds, end = 0.0, 5
        for more in (PAST, tokens, tokens):
            new = chain(np.arange(end, end + more, dtype=np.int32))
            began = time.perf_counter()
            slots.forward(side_by_side([new] * rows, ["all" if seconds else "none"] * rows))
            seconds = time.perf_counter() - began
            slots.keep([range(more)] * rows)
            end += more
        return seconds

    for rows, tokens in FORWARDS:
        pairs = [(forward(rows, tokens), peer.forward(rows, tokens)) for _ in range(TURNS)]
        own, theirs = (median(each) * 1e3 for each in zip(*pairs, strict=True))
        ratio = median(other / mine for mine, other in pairs)
        print(f"{rows} x {tokens:2} tokens  {own:8.2f} ms  openvino {theirs:8.2f} ms   {ratio:5.2f} x openvino", flush=True)


def _turns(prompts: Sequence[list[int]], size: int) -> Iterator[list[list[int]]]:
    for begin in range(0, len(prompts), size):
        yield list(prompts[begin : begin + size])


def main() -> None:
    arguments = _arguments()
    if arguments.serve:
        model, folder, dtype, threads = arguments.model, arguments.folder, arguments.dtype, arguments.threads
        if arguments.forwards:
            serve_forwards(model, folder, dtype, threads)
        else:
            serve(model, folder, dtype, threads, arguments.batch_size, arguments.tokens)
        return
    from lookahead.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        known = {"--model": arguments.model, "--folder": arguments.folder or temporary, "--dtype": arguments.dtype}
        known |= {"--threads": arguments.threads, "--batch-size": arguments.batch_size, "--tokens": arguments.tokens}
        given = [str(part) for option in known.items() for part in option] + ["--forwards"] * arguments.forwards
        peer = Peer([arguments.peer, __file__, "--serve", *given])
        if arguments.forwards:
            print(f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads; OpenVINO {peer.version}")
            compare_forwards(arguments, peer)
            peer.close()
            return
        tokenizer = load_tokenizer(arguments.model)
        with open(arguments.input, encoding="utf-8") as file:
            prompts = [prompt_ids(tokenizer, json.loads(line)) for line in file]
        size = arguments.turn * arguments.batch_size
        prompts = prompts[: arguments.rows + WARM_UP * size]
        if len(prompts) < (WARM_UP + 1) * size:
            sys.exit(f"{arguments.input}: has {len(prompts)} prompts; {WARM_UP + 1} turns need {(WARM_UP + 1) * size}.")
        of_ours = arguments.model, arguments.dtype, arguments.threads, arguments.batch_size, arguments.tokens
        contenders = ours(*of_ours, arguments.trie or ()) | {name: peer.answer(name) for name in peer.pipes}
        print(
            f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, batch {arguments.batch_size}, "
            f"{arguments.tokens} tokens each; OpenVINO GenAI {peer.version}"
        )
        compare(contenders, prompts, size, "openvino")
        peer.close()


def prompt_ids(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Of a row with a prompt, or with messages."""
    if "prompt" in row:
        return list(tokenizer.encode(row["prompt"]))
    return list(tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=True)["input_ids"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="a Python with openvino-genai and optimum-intel", default=sys.executable)
    parser.add_argument("--model", default=str(SAMPLES / "demo-model"))
    parser.add_argument("--input", default=str(SAMPLES / "prompts.jsonl"))
    parser.add_argument("--trie", action="append", help="that drafts come from")
    parser.add_argument("--folder", type=Path, help="of the converted model, which is kept there")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--turn", type=int, default=4, help="prompts of a turn, times the batch size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forwards", action="store_true", help="of a few sizes, in place of answers")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
