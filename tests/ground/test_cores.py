"""Cores that a process may use are those that the system gives it, less where its control groups pay for less."""

from pathlib import Path

import pytest
import torch

from lookahead.models.load import load_model
from lookahead.native import cores


def quotas(tmp_path: Path, own: str, files: dict[str, str]) -> list[float]:
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return cores._quotas(tmp_path / "groups", tmp_path / "own")


def test_quotas_of_all_groups_around_a_process_count(tmp_path):
    files = {"cpu.max": "max 100000\n", "pods/cpu.max": "250000 100000\n", "pods/one/cpu.max": "max 100000\n"}
    assert quotas(tmp_path, "0::/pods/one\n", files) == [2.5]


def test_quotas_of_version_1_are_those_of_the_group_of_its_controller(tmp_path):
    one = "cpu,cpuacct/docker/one/cpu.cfs_"
    files = {f"{one}quota_us": "150000\n", f"{one}period_us": "100000\n", "cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}
    assert quotas(tmp_path, "5:memory:/docker/one\n4:cpu,cpuacct:/docker/one\n", files) == [1.5]


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/gone\n"])
def test_without_quotas_a_process_has_the_cores_that_it_may_run_on(tmp_path, own):
    assert quotas(tmp_path, own, {}) == []


def test_models_take_as_many_threads_as_there_are_cores_or_as_were_asked_for(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr("lookahead.models.load.usable_cores", lambda: 2)
        assert load_model("samples/demo-model", device="cpu").setting.threads == 2
        assert load_model("samples/demo-model", device="cpu", threads=4).setting.threads == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("quotas", "expected"), [([], 4), ([8.0, 2.5], 2), ([0.3], 1)])
def test_cores_are_whole_ones_and_one_at_least(monkeypatch, quotas, expected):
    monkeypatch.setattr(cores, "_quotas", lambda: quotas)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert cores.usable_cores() == expected
