"""Where no backend can be imported, models decode by their own modules, and options that need one end in one clear error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lookahead.decode.engine import DecodingEngine
from lookahead.errors import LookaheadError
from lookahead.models.load import load_model
from tests.architectures import decoded, plain_answers, random_prompts, tiny_model
from tests.support.drafts import drafter_of

WITHOUT = "import sys; sys.modules['lookahead.backends'] = None; from tests.backends import test_without as t; "
NAMES = ("llama", "gptj", "gpt_neo", "bamba")  # one of each mode that takes drafts
REFUSED = {
    "quantize='int8'": "--quantize int8: there is no kernel for this CPU",
    "kv_dtype='int4'": "--kv-dtype int4: there is no kernel for this CPU",
    "engine_mode='program'": "--engine-mode program: its forward cannot be one native call",
    "exact=True": "--exact: scores are not the same bits in every forward (attention is not computed in a fixed order)",
}


def answers_are_plain(folder: str) -> None:
    """Called in a process without backends."""
    for name in NAMES:
        target = load_model(f"{folder}/{name}")
        assert target.program is None
        assert target.linear == "torch"
        answers = plain_answers(name, random_prompts((1, 9, 20)))
        generations = decoded(DecodingEngine(target, drafter_of("random_trees", answers, None), 3), [p for p, _ in answers])
        assert [generation.token_ids for generation in generations] == [answer for _, answer in answers], name


def is_refused(folder: str, option: str) -> None:
    with pytest.raises(LookaheadError) as error:
        load_model(f"{folder}/{NAMES[0]}", **eval(f"dict({option})"))
    assert REFUSED[option] in str(error.value)
    assert "\n" not in str(error.value)


def test_models_decode_and_options_are_refused(tmp_path: Path) -> None:
    for name in NAMES:
        tiny_model(name).save_pretrained(tmp_path / name)
    code = f"{WITHOUT}t.answers_are_plain({str(tmp_path)!r}); [t.is_refused({str(tmp_path)!r}, each) for each in t.REFUSED]"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
