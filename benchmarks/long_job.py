"""Memory of a long job, and what becomes of its rows while its engine dies at random.

In: how many rows, how often the engine dies. Out: a line of JSON for each number of rows: rows per second, deaths of the
engine, error rows, and the memory of the job's process at a tenth of the rows, at its end and at most. Each row must be
answered once, in its turn and rightly, in the output and in the journal.

The job is that of `lookahead generate --engine vllm`, with another engine in vLLM's stead: a process that computes nothing,
ends rows in any order and kills itself. Its answer to a row depends on the prompt only. --poison: the prompt of each row with
such a number kills it.

    python benchmarks/long_job.py --rows 1000000,3000000
    python benchmarks/long_job.py --rows 100000 --deaths 0.02 --poison 77777 --ids random
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lookahead.decode.request import Generation
from lookahead.engines.foreign import VLLM, ForeignEngine, ForeignTarget
from lookahead.engines.vllm_engine import VllmSettings
from lookahead.job.run import run_job
from lookahead.job.spec import JobSpec
from lookahead_cli.demo import samples_folder

MIB, PAGE = 1 << 20, os.sysconf("SC_PAGE_SIZE")
VOCABULARY, TOKENS, POISON = 1000, 4, 999  # POISON: a first token that ends the engine
PROCESS = """
import json, os, random, sys
deaths, batch_size, poison, draw = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), random.Random(sys.argv[4])
rows = []
for line in sys.stdin:
    rows += json.loads(line)
    running = rows[:batch_size]
    if draw.random() < deaths or any(prompt[0] == poison for _, prompt, _ in running):
        os.kill(os.getpid(), 9)
    draw.shuffle(running)
    ended, rows = running[::2], running[1::2] + rows[batch_size:]
    print(json.dumps([[name, [(sum(prompt) + number) % 1000 for number in range(tokens)]] for name, prompt, tokens in ended]),
          flush=True)
"""


class DyingEngine(ForeignEngine):
    """Answers in a process that kills itself. engine_args: deaths, that of a step, by probability."""

    features = VLLM
    _settings: VllmSettings

    def _start(self) -> None:
        settings = self._settings
        self.batch_size, self.device, self.dtype, self.quantization = settings.batch_size or 32, "cpu", "float32", None
        self.target = ForeignTarget(settings.model.name, VOCABULARY, 4096, {}, False)
        self._new: list[tuple[str, list[int], int]] = []
        words = settings.engine_args.get("deaths", 0), self.batch_size, POISON, self.deaths
        command = [sys.executable, "-I", "-S", "-c", PROCESS, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _add(self, name: str, generation: Generation) -> None:
        self._new.append((name, generation.prompt_ids, generation.room))

    def _advance(self) -> Iterator[tuple[str, Generation]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(self._new).encode() + b"\n")
        self.process.stdin.flush()
        self._new = []
        line = self.process.stdout.readline()
        if not line:
            raise ChildProcessError(f"its process ended with {self.process.wait()}")
        for name, token_ids in json.loads(line):
            generation = self._running[name].generation
            generation.token_ids = token_ids
            self._end(generation, len(token_ids) - 1, None, "length", False)
            yield name, generation

    def _abort(self, names: list[str]) -> None: ...

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return []

    version = "0"

    def forget(self) -> None: ...

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def install() -> None:
    """Let the engine stand for vLLM."""
    VllmSettings.start = lambda settings, tokenizer: DyingEngine(settings, tokenizer)  # type: ignore[assignment,method-assign,return-value]


def rows_of(count: int, ids: str, poison: int = 0) -> Iterator[dict[str, Any]]:
    """The input. ids: none, counted, or random. poison: every row with such a number, from 1, ends the engine."""
    draw = random.Random(0)
    for number in range(count):
        deadly = poison and number % poison == poison - 1
        row = {"prompt_ids": [POISON if deadly else number % 900, number // 900 % 1000, number // 900_000]}
        row_id = {"none": None, "counted": f"q{number}", "random": f"{draw.getrandbits(128):032x}"}[ids]
        yield row if row_id is None else {"id": row_id, **row}


def check(source: Path, out: Path, poison: int, kills: int = 0) -> int:
    """Compare input, output and journal row by row; returns the number of error rows. Raises AssertionError.

    kills: of the job, each of which may leave a line in the journal whose row is not in the output.
    """
    errors = 0
    with source.open() as asked, out.open() as answered, Path(f"{out}.journal").open() as journal:
        for number, (before, after) in enumerate(zip(asked, answered, strict=True)):
            row, answer = json.loads(before), json.loads(after)
            assert answer["id"] == row.get("id", number + 1), (row, answer)
            if "error" in answer:
                assert poison, answer
                assert number % poison == poison - 1, answer
                assert answer["error"]["type"] == "EngineDied", answer
                errors += 1
            else:
                wanted = [(sum(row["prompt_ids"]) + each) % 1000 for each in range(TOKENS)]
                assert answer["token_ids"] == wanted, (row, answer)
        total = number + 1
        numbers = array("Q", (json.loads(line)["row"] for line in journal))
    assert len(set(numbers)) == total <= len(numbers) <= total + kills, "each row once in the journal"
    assert errors == (total // poison if poison else 0), errors
    return errors


def measure(arguments: argparse.Namespace, count: int, folder: str) -> None:
    """Run one job, in a process of its own; prints its line."""
    source, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
    with source.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_of(count, arguments.ids, arguments.poison))
    install()
    logging.getLogger("lookahead").setLevel(logging.ERROR)  # not a line for each death
    options = {"max_new_tokens": TOKENS, "token_ids": True, "strategy": "off", "batch_size": arguments.batch_size}
    spec = JobSpec.of(
        model=str(samples_folder() / "demo-model"),
        engine="vllm",
        engine_arg=[f"deaths={arguments.deaths}"],
        input=[str(source)],
        out=str(out),
        **options,
    )
    memory: list[tuple[int, int]] = []  # bytes of the output, bytes resident
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            memory.append((out.stat().st_size if out.exists() else 0, resident))

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    report = run_job(spec)
    seconds = time.monotonic() - began
    over.set()
    assert report.state == "complete"
    errors, size = check(source, out, arguments.poison), out.stat().st_size
    print(
        json.dumps(
            {
                "rows": count,
                "error_rows": errors,
                "engine_deaths": report.used["engine_deaths"],
                "rows_per_sec": round(count / seconds),
                "mib_at_a_tenth": round(next(resident for done, resident in memory if done >= size / 10) / MIB, 1),
                "mib_at_the_end": round(memory[-1][1] / MIB, 1),
                "mib_at_most": round(max(resident for _, resident in memory) / MIB, 1),
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="1000000", help="numbers of rows of the jobs")
    parser.add_argument("--deaths", type=float, default=0.005, help="probability that the engine dies in a step")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--poison", type=int, default=0, help="every so many rows one kills the engine")
    parser.add_argument("--ids", choices=("none", "counted", "random"), default="counted")
    arguments = parser.parse_args()
    for count in map(int, arguments.rows.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            job = multiprocessing.get_context("spawn").Process(target=measure, args=(arguments, count, folder))
            job.start()
            job.join()
            if job.exitcode:
                sys.exit(f"the job of {count} rows has failed, see above")


if __name__ == "__main__":
    main()
