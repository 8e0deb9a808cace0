"""benchmarks/gpu.py: its stages run, small, on a CPU; one that was cut short continues."""

import json
import sys

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


def test_results_of_another_machine_are_not_continued(tmp_path):
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"about": {"device": "another"}, "measured": {}}))
    with pytest.raises(SystemExit, match="another device"):
        gpu.run("machine", gpu.Sizes.of(True), path, 9.0, False)


def test_machine_without_a_gpu_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "machine"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no CUDA device" in capsys.readouterr().err
