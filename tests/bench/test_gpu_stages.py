"""benchmarks/gpu.py: its stages run, small, on a CPU; one that was cut short continues."""

import json

import pytest

from benchmarks import gpu


@pytest.mark.parametrize("stage", gpu.STAGES)
def test_every_stage_measures_and_nothing_twice(stage, tmp_path, capsys):
    path, sizes = tmp_path / "found.json", gpu.Sizes.of(True)
    assert not gpu.run(stage, sizes, path, 0.0, False)  # no time
    assert gpu.run(stage, sizes, path, 9.0, False)
    found = json.loads(path.read_text("utf-8"))
    assert found["about"]["dtype"] == "float32"
    assert found["measured"]
    assert not [name for name, each in found["measured"].items() if "error" in each]
    assert len(capsys.readouterr().out.splitlines()) == len(found["measured"])
    assert gpu.run(stage, sizes, path, 0.0, False)
    assert not capsys.readouterr().out
    if stage == "exact":
        assert found["measured"]["tiny/company"]["differs"] == ""
        assert found["measured"]["tiny/tokens"]["identical"] == 8
    if stage == "attention":
        assert all(each["largest"] < 1e-5 for name, each in found["measured"].items() if name.startswith("error"))
