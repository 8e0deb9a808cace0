"""The model `lookahead` of lm-evaluation-harness has the scores of its `hf` model, at any batch size, with drafts and without.

Where lm-eval is installed: pip install 'lookahead[harness]'.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead.errors import LookaheadError, UsageError
from lookahead.harness.__main__ import main
from tests.support.jobs import MODEL

ROOT = Path(__file__).parents[2]
GENERATE, CHOICE, ROLLING = TASKS = ["questions_generate", "questions_choice", "questions_rolling"]
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")


@pytest.fixture(autouse=True)
def from_a_checkout(monkeypatch):
    """Tasks name their files from there."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model without the max_new_tokens of its generation config, by which `hf` answers in place of max_gen_toks."""
    folder = tmp_path_factory.mktemp("model") / "demo"
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.unlink()
    path.write_text(json.dumps({**config, "max_new_tokens": None}), "utf-8")
    return str(folder)


def evaluated(model: Any, tasks: list[str] = TASKS, limit: int = 5, chat: bool = False, **arguments: Any) -> dict[str, Any]:
    """Of each task its metrics and what the model answered to each request."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"device": "cpu", "dtype": "float32", **arguments},
        tasks=tasks,
        task_manager=TaskManager(include_path="samples/harness", include_defaults=False),
        limit=limit,
        bootstrap_iters=0,
        apply_chat_template=chat,
        gen_kwargs={"max_gen_toks": 40},
    )
    return {task: (found["results"][task], [doc["resps"] for doc in found["samples"][task]]) for task in tasks}


def near(found: Any) -> Any:
    """Equal up to the rounding of float32."""
    if isinstance(found, dict):
        return {name: near(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(near, found))
    return pytest.approx(found, rel=1e-4) if isinstance(found, float) else found


@pytest.fixture(scope="module")
def lookahead_model():
    from lookahead.harness.model import LookaheadLM

    return LookaheadLM


@needs_lm_eval
@pytest.mark.parametrize(("longest", "chat"), [(1024, False), (1024, True), (90, False)])
def test_scores_are_those_of_hf_which_cuts_long_texts_on_the_left(lookahead_model, folder, longest, chat):
    asked = {"pretrained": folder, "max_length": longest, "chat": chat}
    assert evaluated("lookahead", batch_size=3, **asked) == near(evaluated("hf", batch_size=1, **asked))


@needs_lm_eval
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_the_same_bits_at_any_batch_size_with_drafts_and_without(lookahead_model, dtype):
    asked = {"pretrained": str(MODEL), "dtype": dtype}
    plain = evaluated("lookahead", **asked, batch_size=1, strategy="off")
    assert plain == evaluated("lookahead", **asked, batch_size=8)
    assert plain == evaluated("lookahead", **asked, batch_size="auto", trie=f"samples/corpus.jsonl;{ROOT}/samples/corpus.jsonl")


@needs_lm_eval
def test_samples_depend_on_the_seed_and_their_request_alone(lookahead_model):
    requests = [request(f"Question: How many legs do {n % 2 + 3} cats have?\nAnswer:") for n in range(4)]
    answers = {}
    for name, size, strategy in (("plain", 1, "off"), ("drafted", 4, "auto")):
        model = lookahead_model(str(MODEL), batch_size=size, strategy=strategy, device="cpu")
        answers[name] = model.generate_until(requests)
    assert answers["plain"] == answers["drafted"]
    assert len(set(answers["plain"])) == 4


def request(context: str, **gen_kwargs: Any) -> Any:
    from lm_eval.api.instance import Instance

    wished = {"until": ["Question:"], "do_sample": True, "temperature": 1.5, "max_gen_toks": 16, **gen_kwargs}
    return Instance("generate_until", {}, (context, wished), 0)


@needs_lm_eval
def test_context_that_choices_share_is_computed_once(lookahead_model):
    model = lookahead_model(str(MODEL), batch_size=8, device="cpu")
    evaluated(model, [CHOICE], limit=12)
    clock = model.engine._engine.clock  # 12 questions of 4 choices, behind the first 3 others
    assert clock.taken_over > 6 * clock.prefilled


@needs_lm_eval
def test_run_that_was_interrupted_answers_the_others_only(lookahead_model, tmp_path, monkeypatch):
    """With --use_cache of lm-eval."""
    from lm_eval.api.model import CachingLM

    model = lookahead_model(str(MODEL), batch_size=1, device="cpu")
    requests = [request(f"Question: {text}\nAnswer:", do_sample=False, temperature=0) for text in ("a", "b", "c")]
    expected, decode, answered = model.generate_until(requests), model.tok_decode, []

    def until_the_third(tokens, **how):
        if isinstance(tokens, list):  # of an answer
            answered.append(tokens)
            if len(answered) == 3:
                raise KeyboardInterrupt
        return decode(tokens, **how)

    monkeypatch.setattr(model, "tok_decode", until_the_third)
    for _ in range(2):
        cached = CachingLM(model, str(tmp_path / "answers.db"))
        try:
            found = cached.generate_until(requests)
        except KeyboardInterrupt:
            assert len(cached.dbdict) == 2
    assert found == expected
    assert len(answered) == 4


@needs_lm_eval
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtyp": "float32"}, "no argument dtyp: give pretrained, trie, strategy,"),
        ({"strategy": "fast"}, "strategy 'fast': choose one of"),
        ({"max_length": 1025}, "max_length is 1025: .*demo-model has 1024 positions"),
        ({"enable_thinking": True}, "think_end_token is None: give the text"),
        ({"think_end_token": 5}, "think_end_token is 5: give the text"),
        ({"chat_template_args": 3}, "chat_template_args is 3: give a dict"),
        ({"max_length": 0}, "max_length is 0: it must be a whole number above 0"),
        ({"max_length": "64x"}, "max_length is '64x': it must be a whole number above 0"),
        ({"pretrained": None}, "name a model: pretrained=NAME_OR_DIR"),
        ({"batch_size": "8x"}, "batch_size is '8x': it must be a whole number"),
        ({"trie": "no.trie"}, "no.trie"),
        ({"pretrained": "./no-such-model"}, "no-such-model"),
    ],
)
def test_wrong_model_argument_is_one_clear_error(lookahead_model, arguments, says):
    with pytest.raises(LookaheadError, match=says):
        lookahead_model(**{"pretrained": str(MODEL), "device": "cpu", **arguments})


@needs_lm_eval
def test_what_no_request_can_ask_is_one_clear_error(lookahead_model):
    model = lookahead_model(str(MODEL), device="cpu", max_length=64)
    for wrong, says in ({"num_beams": 4}, "no num_beams: give until"), ({"max_gen_toks": 64}, "below max_length, 64 tokens"):
        with pytest.raises(UsageError, match=says):
            model.generate_until([request("a", **wrong)])
    with pytest.raises(LookaheadError, match="a continuation has 100 tokens: 1 to 64"):
        model._loglikelihood_tokens([(None, [5], [6] * 100)])
    assert model.generate_until([]) == model.loglikelihood([]) == []


@needs_lm_eval
def test_command_line_is_that_of_lm_eval_with_one_model_more(tmp_path):
    command = [sys.executable, "-m", "lookahead.harness", "--model", "lookahead", "--batch_size", "auto", "--limit", "2"]
    command += ["--model_args", f"pretrained={MODEL},trie=['samples/corpus.jsonl']", "--output_path", str(tmp_path)]
    command += ["--include_path", "samples/harness", "--tasks", GENERATE]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert f"|{GENERATE}|" in done.stdout
    (saved,) = tmp_path.rglob("results*.json")
    config = json.loads(saved.read_text("utf-8"))["config"]
    assert (config["model"], config["model_dtype"]) == ("lookahead", "torch.float32")
    assert "model_num_parameters" not in config


def test_missing_lm_eval_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    assert main() == 2
    assert "needs lm_eval, which is not installed: pip install 'lookahead[harness]'" in capsys.readouterr().err
