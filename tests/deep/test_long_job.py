"""A job of 20,000 short rows: memory, open files, threads and temporary files stay as they were at a tenth of it."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL

ROWS = int(os.environ.get("LONG_JOB_ROWS", 20_000))
MIB = 1 << 20


def test_job_of_many_rows_stays_flat(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    rows = ({"id": number, "prompt": f"{number} apples"} for number in range(ROWS))
    source, out = write_jsonl(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "lookahead_cli", "generate", "--model", MODEL, "--input", source, "-o", out, "--quiet"]
    command += ["--max-new-tokens", "3", "--session-tokens", "100000", "--metrics", tmp_path / "job.prom"]
    command += ["--save-trie", tmp_path / "learned.trie"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    samples = []  # rows, bytes of memory, open files, threads, files in both folders
    with subprocess.Popen([*map(str, command)], env=environment, stderr=subprocess.PIPE, text=True) as job:
        process = Path(f"/proc/{job.pid}")
        while job.poll() is None:
            time.sleep(0.5)
            try:
                done = out.read_bytes().count(b"\n") if out.exists() else 0
                resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                files, threads = len(os.listdir(process / "fd")), len(os.listdir(process / "task"))
            except (FileNotFoundError, ProcessLookupError, IndexError):
                break  # it has ended
            left = len(os.listdir(tmp_path)) + len(os.listdir(temporary))
            if done >= ROWS // 10:
                samples.append((done, resident, files, threads, left))
        assert job.wait() == 0, job.stderr and job.stderr.read()
    counts = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["counts"]
    assert (counts["rows"], counts["errors"]) == (ROWS, 0)
    running = [sample for sample in samples if sample[0] < ROWS]
    assert len(running) > 20
    part = len(running) // 5
    memory, files, threads, left = ([sample[column] for sample in running] for column in (1, 2, 3, 4))
    first, last = statistics.median(memory[:part]), statistics.median(memory[-part:])
    assert last < first + 0.05 * first + 16 * MIB
    assert max(memory) < first + 0.1 * first + 32 * MIB
    assert statistics.median(files[-part:]) == statistics.median(files[:part])
    assert max(files) <= min(files) + 4  # while a manifest or the metrics are written
    assert statistics.median(threads[-part:]) == statistics.median(threads[:part])
    assert max(left) <= min(left) + 3  # their temporary siblings
    assert os.listdir(temporary) == []
    outputs = {f"out.jsonl{ending}" for ending in ("", ".journal", ".manifest.json")}
    assert set(os.listdir(tmp_path)) == {"in.jsonl", "job.prom", "learned.trie", "temporary", *outputs}
