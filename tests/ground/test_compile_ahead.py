"""Kernels that other processes compile: who waits for them, and what happens where such a process fails."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lookahead
from lookahead.native import cache as kernel_cache
from lookahead.native import compile_ahead
from lookahead.native.kernels import SOURCES

WARM_UP = """
from lookahead.native import compile_ahead
compile_ahead.MODULE = {module!r}
print(compile_ahead.start(["budget"]))
from lookahead.budget import policy
policy.Budget()
print(sum(policy.choose.stats.cache_misses.values()), compile_ahead.is_done("budget"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where kernels are kept."""
    monkeypatch.setattr(kernel_cache, "_candidates", lambda: (tmp_path,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    kernel_cache._readable.cache_clear()
    kernel_cache._problem_of.cache_clear()
    yield tmp_path
    kernel_cache._readable.cache_clear()
    kernel_cache._problem_of.cache_clear()


def in_new_process(code: str, tmp_path: Path) -> list[str]:
    """What it prints. It runs a copy of the package, as kernels may lie with the package itself."""
    package = Path(lookahead.__file__).parent
    shutil.copytree(package, tmp_path / "lookahead", ignore=shutil.ignore_patterns("__pycache__"))
    places = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "LOOKAHEAD_CACHE": str(tmp_path / "cache")}
    env = os.environ | places | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=tmp_path)
    return done.stdout.split()


@pytest.mark.parametrize("reason", ["all is there", "one processor", "no folder"])
def test_nothing_is_started_where(reason, folder, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process was started"))
    if reason == "all is there":
        kernel_cache.write_mark("budget", SOURCES)
    elif reason == "one processor":
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    else:
        monkeypatch.setattr(kernel_cache, "folder_to_write", lambda: None)
    assert not compile_ahead.start(["budget"])


def test_mark_of_other_sources_does_not_count(folder):
    kernel_cache.write_mark("budget", b"other sources")
    assert not compile_ahead.is_done("budget")


@pytest.mark.deep
def test_wheel_holds_the_kernels_of_all_groups(tmp_path):
    code = "import sys, hatch_build; from pathlib import Path; print(len(hatch_build.compiled(*map(Path, sys.argv[1:]))))"
    root, built = Path(lookahead.__file__).parents[1], tmp_path / "built"
    built.mkdir()
    done = subprocess.run([sys.executable, "-c", code, root, built], capture_output=True, text=True, check=True, cwd=root)
    assert int(done.stdout) > 40
    shutil.copytree(built / "kernels", tmp_path / "kernels")
    look = (
        "from lookahead.native import compile_ahead; from lookahead.budget import policy; policy.Budget()\n"
        "misses = sum(policy.choose.stats.cache_misses.values())\n"
        "print(misses, *(compile_ahead.is_done(group) for group in compile_ahead.GROUPS))"
    )
    assert in_new_process(look, tmp_path) == ["0", *["True"] * len(compile_ahead.GROUPS)]


@pytest.mark.deep
@pytest.mark.parametrize(("module", "missed"), [(compile_ahead.MODULE, "0"), ("lookahead.no_such_module", "1")])
def test_kernel_of_another_process_is_waited_for_and_compiled_here_only_where_that_one_fails(tmp_path, module, missed):
    _, misses, done = in_new_process(WARM_UP.format(module=module), tmp_path)
    assert misses == missed
    assert missed == "0" or done == "False"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_processes_end_with_the_one_that_started_them(tmp_path):
    code = (
        "import os; from lookahead.native import compile_ahead\n"
        "compile_ahead.atexit.register = lambda end: None\n"  # as if it were killed
        "started = compile_ahead._Started(['drafting'])\n"
        "print(started._processes[0][0].pid, flush=True); os._exit(0)"
    )
    (pid,) = in_new_process(code, tmp_path)
    for _ in range(3000):
        if not Path("/proc", pid).exists() or "Z" in Path("/proc", pid, "stat").read_text().split(")")[1].split()[0]:
            return
        time.sleep(0.1)
    pytest.fail("the process that compiles is still there")
