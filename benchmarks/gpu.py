"""What a GPU does with this package, in stages of less than ten minutes each. In: a GPU, no weights. Out: a JSON file a stage.

    python benchmarks/gpu.py machine     bandwidth, multiplications, attention of torch with and without cuDNN
    python benchmarks/gpu.py forward     a 7B model of random weights: milliseconds of a step, eager and captured
    python benchmarks/gpu.py attention   lookahead::tree_attention: errors and microseconds
    python benchmarks/gpu.py exact       whether scores are the same bits in any company, and tokens those of `generate`
    python benchmarks/gpu.py job         tokens per second, plain and with drafts, one row at once and 32

Results are written to benchmarks/results/gpu-STAGE.json after each measurement. What is there already is not measured again, so
a stage that was cut short continues; --again measures anew. --small takes sizes that a CPU manages within seconds: it says
nothing about speed, and is how the stages are tested.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from lookahead.backends.cuda.device_program import DeviceProgram
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import DraftTree, chain, side_by_side
from lookahead.files.atomic import replacing
from lookahead.forward.processor import processor_name
from lookahead.forward.slots import PackedSlots
from lookahead.forward.target import TargetModel
from lookahead.forward.tree_meta import FIELDS, arrange
from lookahead.models.exact import batch_invariance_violation
from lookahead.models.load import random_model

RESULTS = Path(__file__).parent / "results"
Case = tuple[str, Callable[[], dict[str, Any]]]
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B = {**LLAMA_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
NO_LIMIT = 1 << 60


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured. bytes: that bandwidth is measured with."""

    device: torch.device
    dtype: torch.dtype
    models: dict[str, dict[str, int]]
    bytes: int
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    repeats: int
    cases: int

    @staticmethod
    def of(small: bool) -> Sizes:
        if small:
            cpu = torch.device("cpu"), torch.float32
            return Sizes(*cpu, {"tiny": TINY}, 1 << 20, (1, 8), (1, 2), (64, 300), 2, 3)
        gpu, models = torch.device("cuda"), {"llama-7b": LLAMA_7B, "llama-8b": LLAMA_8B}
        keys = 512, 2048, 8192, 32768
        return Sizes(gpu, torch.bfloat16, models, 8 << 30, (1, 8, 64, 128, 256), (1, 32), keys, 20, 50)

    def seconds(self, run: Callable[[], Any]) -> float:
        """The median of some runs, after two that do not count."""
        found = []
        for _ in range(self.repeats + 2):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found[2:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)


# ---- stages: the cases of each


def machine(sizes: Sizes) -> Iterator[Case]:
    """The machine itself."""
    numbers = torch.zeros(sizes.bytes // 4, dtype=torch.float32, device=sizes.device)
    upper, lower = numbers.chunk(2)
    yield "read", functools.partial(_bandwidth, sizes, numbers.sum)
    yield "copy", functools.partial(_bandwidth, sizes, functools.partial(upper.copy_, lower))
    for name, shape in sizes.models.items():
        for what, rows in (("attention", shape["hidden_size"]), ("mlp", shape["intermediate_size"])):
            for tokens in sizes.tokens:
                yield f"linear/{name}/{what}/{tokens}", functools.partial(_linear, sizes, rows, shape["hidden_size"], tokens)
    for cudnn in (True, False):
        yield f"first_call_of_sdpa/cudnn={cudnn}", functools.partial(_first_calls, sizes, cudnn)


def _bandwidth(sizes: Sizes, run: Callable[[], Any]) -> dict[str, Any]:
    """Of what touches all bytes once."""
    return {"gb_per_sec": sizes.bytes / sizes.seconds(run) / 1e9}


def _linear(sizes: Sizes, outputs: int, inputs: int, tokens: int) -> dict[str, Any]:
    """A linear layer without bias."""
    weight, given = sizes.random(outputs, inputs), sizes.random(tokens, inputs)
    seconds = sizes.seconds(lambda: torch.nn.functional.linear(given, weight))
    return {"us": 1e6 * seconds, "gb_per_sec": weight.numel() * weight.element_size() / seconds / 1e9}


def _first_calls(sizes: Sizes, cudnn: bool) -> dict[str, Any]:
    """Milliseconds that torch's attention with a mask takes for shapes that it has not seen."""
    before, found = torch.backends.cuda.cudnn_sdp_enabled(), []
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        for number in range(10):
            query, keys = sizes.random(1, 8, 8, 64), sizes.random(1, 8, 264 + 16 * number + 8 * cudnn, 64)
            mask = sizes.random(1, 1, 8, keys.shape[2])
            sizes.wait()
            began = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
            sizes.wait()
            found.append(1e3 * (time.perf_counter() - began))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    return {"ms": found}


def forward(sizes: Sizes) -> Iterator[Case]:
    """Steps of a model, by its own forward and captured."""
    for name, shape in sizes.models.items():
        target = _model(name, shape, sizes)
        ways = [("eager", dataclasses.replace(target, capture=None)), *([("captured", target)] if target.capture else [])]
        for (way, each), rows, tokens in itertools.product(ways, sizes.rows, sizes.tokens):
            if tokens >= rows:
                yield f"{name}/{way}/{rows}x{tokens // rows}", functools.partial(_step_ms, sizes, each, rows, tokens // rows)


@torch.inference_mode()
def _step_ms(sizes: Sizes, target: TargetModel, rows: int, width: int) -> dict[str, Any]:
    """Milliseconds of a step until its best tokens are known, and of the first one."""
    random, context = np.random.default_rng(0), min(sizes.keys[0], target.longest_text // 2) - width
    texts = [random.integers(3, 500, context + 1).astype(np.int32) for _ in range(rows)]
    slots = PackedSlots(target)
    for text in texts:
        slots.begin(slots.add(text.tolist(), width + 8))
    for start in range(0, context, 256):
        slots.forward(side_by_side([chain(text[start : min(start + 256, context)]) for text in texts], ["last"] * rows))
        slots.keep([range(min(256, context - start))] * rows)
    trees = [_bush(width, random) for _ in texts]

    def step() -> None:
        scores = slots.forward(side_by_side(trees, ["all"] * rows))
        scores.wait()
        scores.best(0, 0)

    sizes.wait()
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    seconds = sizes.seconds(step)
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    return {"ms": 1e3 * seconds, "first_ms": 1e3 * first, "context": context, "weights_gb_per_sec": weights / seconds / 1e9}


def attention(sizes: Sizes) -> Iterator[Case]:
    """The attention op."""
    heads, key_heads, width = (32, 8, 128) if sizes.device.type == "cuda" else (4, 2, 32)
    for number in range(sizes.cases):
        yield f"error/{number}", functools.partial(_attention_error, sizes, np.random.default_rng(number))
    for rows, tokens, keys in itertools.product(sizes.rows, sizes.tokens, sizes.keys):
        if tokens >= rows and rows * keys <= 1 << 20:
            case = functools.partial(_attention_us, sizes, (heads, key_heads, width), rows, tokens // rows, keys)
            yield f"{rows}x{tokens // rows}/{keys} keys", case


def _attention_case(
    sizes: Sizes, shape: tuple[int, int, int], parents: list[np.ndarray], pasts: list[int], window: int
) -> tuple[Any, ...]:
    heads, key_heads, width = shape
    lengths = np.array([len(each) for each in parents])
    capacity = -(-int((np.array(pasts) + lengths).max()) // 256) * 256
    query = sizes.random(int(lengths.sum()), heads, width)
    key, value = (sizes.random(len(pasts) + 1, key_heads, capacity, width) for _ in range(2))
    limits = np.array([window]), np.array([NO_LIMIT])
    meta, every = np.zeros((1, len(query), FIELDS), np.int32), np.concatenate(parents)
    arrange(every, every, lengths, np.array(pasts), *limits, 0, np.zeros((4, len(query)), np.int64), meta)
    return query, key, value, torch.from_numpy(meta[0]).to(sizes.device), width**-0.5


def _attention_error(sizes: Sizes, random: np.random.Generator) -> dict[str, Any]:
    """How far outputs are from float32, for some trees."""
    rows = int(random.integers(1, 5))
    parents = [_bush(int(random.integers(1, 40)), random).parents for _ in range(rows)]
    pasts = [int(random.integers(0, sizes.keys[1])) for _ in range(rows)]
    shared = int(random.choice([1, 2, 4, 7]))
    shape = 2 * shared, 2, int(random.choice([64, 80, 128]))
    query, key, value, *rest = _attention_case(sizes, shape, parents, pasts, int(random.choice([NO_LIMIT, 100])))
    found = torch.ops.lookahead.tree_attention(query, key, value, *rest).float()
    on_cpu = (each.float().cpu() for each in (query, key, value))
    expected = torch.ops.lookahead.tree_attention(*on_cpu, rest[0].cpu(), rest[1]).to(found)
    return {"largest": float((found - expected).abs().max()), "spread": float(expected.std()), "shape": shape}


def _attention_us(sizes: Sizes, shape: tuple[int, int, int], rows: int, width: int, keys: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    past = max(0, keys - width)
    given = _attention_case(sizes, shape, [_bush(width, random).parents] * rows, [past] * rows, NO_LIMIT)
    seconds = sizes.seconds(lambda: torch.ops.lookahead.tree_attention(*given))
    read = 2 * rows * keys * shape[1] * shape[2] * given[1].element_size()
    return {"us": 1e6 * seconds, "gb_per_sec": read / seconds / 1e9}


def exact(sizes: Sizes) -> Iterator[Case]:
    """Whether drafts and batches change scores."""
    for name, shape in sizes.models.items():
        target = _model(name, {**shape, "num_hidden_layers": 2}, sizes)
        ways = {"": target}
        if isinstance(target.program, DeviceProgram):  # as --exact takes it
            ways["exact/"] = dataclasses.replace(target, program=DeviceProgram(target.program.plan, target.device, exact=True))
        for way, each in ways.items():
            yield f"{name}/{way}company", functools.partial(_company, each)
            yield f"{name}/{way}tokens", functools.partial(_identical, each)


def _company(target: TargetModel) -> dict[str, Any]:
    """In what company a token's scores are other bits; "" if in none."""
    about = {"mode": target.mode, "attention": target.setting.attention}
    return {**about, "differs": batch_invariance_violation(target)}


def _identical(target: TargetModel) -> dict[str, Any]:
    """Rows whose tokens with drafts, 8 at once, are those of plain decoding one at a time."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 500, 30).tolist() for _ in range(8)]
    found = []
    for options, batch_size in ((DraftOptions(strategy="off"), 1), (DraftOptions(decoding_length=32, adaptive=False), 8)):
        engine = DecodingEngine(target, Drafter([], options), batch_size)
        requests = [engine.request(prompt, 32) for prompt in prompts]
        assert len(list(engine.run(requests))) == len(prompts)
        found.append([request.token_ids for request in requests])
    return {"rows": len(prompts), "identical": sum(a == b for a, b in zip(*found, strict=True))}


def job(sizes: Sizes) -> Iterator[Case]:
    """Jobs of random weights, whose answers repeat themselves: what a step costs, not what drafts are worth."""
    for name, shape in sizes.models.items():
        target = _model(name, shape, sizes)
        for rows in sizes.rows:
            for way, options in (
                ("plain", DraftOptions(strategy="off")),
                ("auto", DraftOptions()),
                ("64", DraftOptions(decoding_length=min(64, 256 // rows), adaptive=False)),
            ):
                yield f"{name}/{way}/{rows} rows", functools.partial(_job, sizes, target, rows, options)


def _job(sizes: Sizes, target: TargetModel, rows: int, options: DraftOptions) -> dict[str, Any]:
    random, new_tokens = np.random.default_rng(0), 16 if sizes.device.type == "cpu" else 128
    engine = DecodingEngine(target, Drafter([], options), rows, 2048 if sizes.device.type == "cuda" else 512)
    found = []
    for _ in range(2):  # the first one captures, and learns costs
        steps, requests = (
            engine.clock.steps,
            [engine.request(random.integers(3, 500, 100).tolist(), new_tokens) for _ in range(rows)],
        )
        began = time.perf_counter()
        assert len(list(engine.run(requests))) == rows
        seconds, tokens = time.perf_counter() - began, sum(len(request.token_ids) for request in requests)
        found.append({"tokens_per_sec": tokens / seconds, "ms_per_step": 1e3 * seconds / (engine.clock.steps - steps)})
    return {**found[1], "tokens": tokens, "steps": engine.clock.steps - steps}


STAGES = {each.__name__: each for each in (machine, forward, attention, exact, job)}


def _model(name: str, shape: dict[str, int], sizes: Sizes) -> TargetModel:
    """A model of this shape, with random weights."""
    config = transformers.LlamaConfig(**shape, max_position_embeddings=4096, torch_dtype=sizes.dtype)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        target = random_model(folder, dtype=str(sizes.dtype).removeprefix("torch."), device=str(sizes.device))
    return dataclasses.replace(target, name=name)


def _bush(size: int, random: np.random.Generator) -> DraftTree:
    """A tree of random tokens, whose nodes follow one of the four before them."""
    parents = np.array([-1, *(int(random.integers(max(0, node - 4), node)) for node in range(1, size))], np.int32)
    return dataclasses.replace(chain(random.integers(3, 500, size).astype(np.int32)), parents=parents)


def run(stage: str, sizes: Sizes, path: Path, minutes: float, again: bool) -> bool:
    """Measure what is not in the file yet. False: time was over first."""
    found: dict[str, Any] = {} if again or not path.exists() else json.loads(path.read_text("utf-8"))
    about = {
        "device": processor_name(sizes.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "transformers": transformers.__version__,
        "dtype": str(sizes.dtype).removeprefix("torch."),
    }
    if found.get("about", about) != about:
        sys.exit(f"{path}: was measured with other versions or on another device. Use --again, or another --results folder.")
    measured, end = found.setdefault("measured", {}), time.monotonic() + 60 * minutes
    found["about"] = about
    for name, measure in STAGES[stage](sizes):
        if name in measured:
            continue
        if time.monotonic() > end:
            return False
        try:
            measured[name] = measure()
        except Exception as error:  # the other measurements are worth having
            measured[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(f"{name}: {json.dumps(measured[name])}", flush=True)
        with replacing(path) as file:
            file.write(json.dumps(found, indent=1).encode())
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--small", action="store_true", help="on a CPU, within seconds")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no further measurement begins (9)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (benchmarks/results)")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device: use --small to try the stages on a CPU")
    path = arguments.results / f"gpu-{arguments.stage}.json"
    if not run(arguments.stage, Sizes.of(arguments.small), path, arguments.minutes, arguments.again):
        sys.exit(f"{arguments.stage}: the time is over. The same command continues.")


if __name__ == "__main__":
    main()
