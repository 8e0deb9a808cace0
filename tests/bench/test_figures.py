"""Figures: kinds of file, what stands at their border, metrics' labels."""

import warnings
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from lookahead.bench.plot import draw_capacity, draw_profile, head, save_figure
from lookahead.bench.trie_report import Capacity
from lookahead.budget.profile import read_profile
from tests.support.cli import write_jsonl

BEGINS = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-", "svg": b"<?xml"}
CURVE = [Capacity(0, 0, 2.3), *(Capacity(1000 << n, 6000 << n, 2.3 + 0.1 * n) for n in range(5))]


@pytest.mark.parametrize("ending", ["png", "pdf", "svg", "PNG"])
def test_ending_says_what_is_drawn(tmp_path, ending):
    draw_profile(read_profile("llama-7b-h200"), str(tmp_path / f"a.{ending}"))
    assert (tmp_path / f"a.{ending}").read_bytes().startswith(BEGINS[ending.lower()])


def border_is_white(path: Path) -> bool:
    """Nothing stands at the border of a picture, where it could be cut."""
    pixels = np.asarray(matplotlib.image.imread(path))[..., :3]
    return all((line > 0.99).all() for line in (pixels[:3], pixels[-3:], pixels[:, :3], pixels[:, -3:]))


def test_long_title_is_broken_and_nothing_is_cut_at_the_border(tmp_path):
    draw_capacity(CURVE, "/a/long/folder" * 30 + " answers.trie on held-out.jsonl", str(tmp_path / "a.png"))
    assert border_is_white(tmp_path / "a.png")
    assert matplotlib.image.imread(tmp_path / "a.png").shape[1] < 1000
    draw_profile(read_profile("llama-15m-cpu-float32"), str(tmp_path / "b.png"))
    assert border_is_white(tmp_path / "b.png")


def test_names_that_the_font_lacks_or_that_have_effects_are_drawn_without_a_warning(tmp_path):
    from matplotlib import pyplot

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ending in BEGINS:
            figure = pyplot.figure(figsize=(3, 2))
            head(figure, "漢字 $x$ \x1b[31m")
            save_figure(figure, str(tmp_path / f"a.{ending}"))
    assert b"\x1b" not in (tmp_path / "a.svg").read_bytes()


def test_unknown_ending_is_refused_before_the_work(cli, tmp_path):
    pairs = write_jsonl(tmp_path / "p.jsonl", [{"prompt_ids": [1, 2], "response_ids": [3, 4, 1, 2, 3, 4]}])
    asked = [
        ("bench", "--replay", pairs, "--cost-profile", "llama-7b-h200"),
        ("replay", pairs, "--sweep"),
        ("calibrate", "--model", tmp_path / "no-such-model"),
        ("inspect-trie", tmp_path / "no-such.trie", "--coverage", pairs),
    ]
    for command in asked:
        for name in ("figure.gif", "figure"):
            cli.fails(2, *command, "--plot", tmp_path / name, saying=[f"--plot {tmp_path / name}: ", ".png, .pdf, .svg"])
    assert not list(tmp_path.glob("figure*"))
