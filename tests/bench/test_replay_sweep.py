"""EDL against decoding and branch length from logged answers alone: tables, JSON and figure."""

from typing import Any

import pytest

from tests.support.cli import write_jsonl

ROWS = [{"prompt_ids": [1, 2, 3, n], "response_ids": [n, 1, 2, 3, 4, 5, 6, n, 7, 8, 9]} for n in range(20, 30)]


@pytest.fixture
def pairs(tmp_path):
    return write_jsonl(tmp_path / "pairs.jsonl", ROWS)


def edl_by_lengths(value: Any) -> dict[tuple[int, int], float]:
    return {(run["decoding_length"], run["branch_length"]): run["edl"] for run in value["strategies"]}


def test_every_cell_is_the_replay_of_these_lengths(cli, pairs):
    lengths = ("--decoding-length", "2,4,16", "--branch-length", "1,2,8")
    swept = edl_by_lengths(cli("replay", pairs, "--sweep", *lengths, "--json").json)
    assert set(swept) == {(2, 1), (4, 1), (4, 2), (4, 8), (16, 1), (16, 2), (16, 8)}
    for (length, branch), edl in swept.items():
        one = ("--strategy", "hierarchical", "--decoding-length", length, "--branch-length", branch, "--json")
        assert edl_by_lengths(cli("replay", pairs, *one).json) == {(length, branch): edl}
    assert swept[16, 8] > swept[16, 2] > swept[16, 1]
    assert swept == edl_by_lengths(cli("bench", "--replay", pairs, "--sweep", *lengths, "--json").json)


def test_tables_have_both_axes_and_the_figure_is_drawn(cli, pairs, tmp_path):
    plot, saved = tmp_path / "sweep.png", tmp_path / "s.json"
    lengths = ("--decoding-length", "4,16", "--branch-length", "2,8")
    out = cli("replay", pairs, "--sweep", *lengths, "--plot", plot, "--save", saved).out
    edl = edl_by_lengths(cli("replay", pairs, "--sweep", *lengths, "--json").json)
    lines = [line.split() for line in out.splitlines()]
    assert ["4", f"{edl[4, 2]:.2f}", f"{edl[4, 8]:.2f}"] in lines
    assert ["16", f"{edl[16, 2]:.2f}", f"{edl[16, 8]:.2f}"] in lines
    assert "draft us" in out
    assert f"highest EDL {max(edl.values()):.2f}" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert '"branch_length": 8' in saved.read_text()


def test_what_a_sweep_cannot_do_is_refused(cli, pairs, tmp_path):
    cli.fails(2, "replay", pairs, "--sweep", "--baselines", saying=["--baselines"])
    cli.fails(2, "replay", pairs, "--plot", tmp_path / "x.png", saying=["--plot", "--sweep"])
    cli.fails(2, "replay", pairs, "--sweep", "--strategy", "auto", saying=["--strategy auto"])
    cli.fails(2, "replay", pairs, "--branch-length", "4,8", saying=["--branch-length 4,8", "--sweep"])
