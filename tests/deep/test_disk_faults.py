"""A disk that fails, fills up or is taken away at any call of a command: old or new file whole, one true line, nothing left."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deep.fault_scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
STRIDE = os.environ.get("FAULTS_STRIDE", "8")  # of many calls that only read, every so-manyth is tried; 1 by hand: all


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """faults.c, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("faults are injected by a C library under Linux: needs a C compiler")
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    source = ROOT / "tests" / "deep" / "faults.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def injected(shim: Path, scenario: str, folder: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "SOURCE_DATE_EPOCH": "1700000000",  # the same bytes in each run
    }
    command = [sys.executable, "-m", "tests.deep.faults", scenario, str(folder), STRIDE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_at_any_call_leaves_the_old_file_or_the_new_one_and_one_true_line(shim, scenario, tmp_path, record_property):
    found = injected(shim, scenario, tmp_path)
    record_property("faults", {name: found[name] for name in ("cases", "fired", "codes", "calls")})
    print(scenario, found["cases"], "faults,", found["fired"], "met a call; exit codes", found["codes"])
    assert found["violations"] == {}, found["examples"]
    assert found["fired"] > 100
