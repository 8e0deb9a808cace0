"""Which model is loaded and how it samples, as typed: adapters, tokenizers, code of its own, revisions, --sampling model."""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lookahead.api import GenerationParams, LookaheadEngine
from lookahead.errors import LookaheadError, ModelError, UsageError
from lookahead.job.setup import EngineSettings
from lookahead.models.load import load_model
from lookahead.models.options import ModelOptions
from lookahead.tokenizer import TOKENIZER_FILES
from tests.architectures import plainly, random_prompts, tiny_config, tiny_model
from tests.support.cli import Cli, write_jsonl
from tests.support.cpu import needs_halves
from tests.support.jobs import MODEL, PROMPTS, rows_of

IDS = random_prompts((4, 9))
ROWS = [{"prompt_ids": ids} for ids in IDS]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("base")
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    return folder


@pytest.fixture
def configured(base, tmp_path):
    """configured(**fields) -> a folder with the tiny model and this generation config."""

    def folder(**fields):
        made = tmp_path / "-".join(["model", *fields])
        shutil.copytree(base, made)
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **fields}))
        return made

    return folder


def adapter_of(folder: Path, model: Any, config: Any = None) -> Path:
    """Save a PEFT adapter with random weights."""
    targets = ["q_proj", "v_proj", "down_proj"]
    config = config or LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return adapter_of(tmp_path_factory.mktemp("adapter"), tiny_model("llama"))


def answers(cli: Cli, folder: Path, rows: list[Any], *options: object) -> tuple[list[Any], str]:
    """(what each row says, stderr)."""
    source, out = write_jsonl(folder / "in.jsonl", rows), folder / "out.jsonl"
    job = ("--input", source, "-o", out, "--overwrite", "--quiet", "--token-ids", "--max-new-tokens", 12)
    result = cli("generate", *job, *options)
    assert result.code == 0, result.err
    return [row["token_ids"] for row in rows_of(out)], result.err


# ---- adapters
@pytest.mark.parametrize("saved", [None, LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"])])
def test_adapter_gives_the_tokens_of_the_merged_model(base, tmp_path, saved):
    adapter = adapter_of(tmp_path / "a", tiny_model("llama"), saved)
    if saved:
        file = next((tmp_path / "a").glob("*.safetensors"))
        save_file({name: torch.randn_like(value) / 3 for name, value in load_file(file).items()}, file)
    merged = PeftModel.from_pretrained(copy.deepcopy(tiny_model("llama")), adapter).merge_and_unload()
    expected = [plainly(merged, ids, 12) for ids in IDS]
    target = load_model(str(base), adapter=str(adapter))
    assert target.mode == "packed"
    results = LookaheadEngine(target).generate(IDS, GenerationParams(max_new_tokens=12))
    assert [result.token_ids for result in results] == expected
    assert expected != [plainly(tiny_model("llama"), ids, 12) for ids in IDS]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 2}, "bias": "all"},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_adapter_of_embeddings_is_merged_as_peft_does(tied, fields, tmp_path, caplog):
    config = tiny_config("llama")
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    adapter = adapter_of(tmp_path / "a", model, LoraConfig(r=4, lora_alpha=64, task_type="CAUSAL_LM", **fields))
    file = adapter / "adapter_model.safetensors"
    save_file({name: value + torch.randn_like(value) / 9 for name, value in load_file(file).items()}, file)
    merged = PeftModel.from_pretrained(copy.deepcopy(model), adapter).merge_and_unload(safe_merge=True)
    assert plainly(merged, IDS[0], 12) == plainly(load_model(str(tmp_path / "model"), adapter=str(adapter)).model, IDS[0], 12)
    of_both = tied and bool({"embed_tokens", "lm_head"} & {*fields["target_modules"]})
    assert ("answers are not those of the adapter that is not merged" in caplog.text) == of_both


def test_job_with_an_adapter_remembers_its_files(cli, base, adapter, tmp_path):
    said, _ = answers(cli, tmp_path, ROWS, "--model", base, "--adapter", adapter)
    merged = PeftModel.from_pretrained(copy.deepcopy(tiny_model("llama")), adapter).merge_and_unload()
    assert said == [plainly(merged, ids, 12) for ids in IDS]
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors", "config.json"} <= manifest["model_files"].keys()
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(adapter, moved)
    job = ["generate", "--input", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--token-ids", "--max-new-tokens", 12]
    assert cli(*job, "--model", base, "--adapter", moved, "--resume").code == 0
    adapter_of(other, tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    cli.fails(2, *job, "--model", base, "--adapter", other, "--resume", saying=["adapter/adapter_config.json of the model has"])
    cli.fails(2, *job, "--model", base, "--resume", saying=[f"--adapter {moved} then, no --adapter now"])


def test_adapter_that_does_not_fit_is_refused_in_one_line(base, adapter, tmp_path):
    def refused(saying, adapter, model=base):
        with pytest.raises(ModelError, match=saying) as raised:
            load_model(str(model), adapter=str(adapter))
        assert "\n" not in str(raised.value)

    for field, value, saying in (
        ("hidden_size", 64, "other shapes .size mismatch"),
        ("num_hidden_layers", 2, "made for another model"),
        ("num_hidden_layers", 4, "made for another model"),
    ):
        config, made = tiny_config("llama"), tmp_path / f"{field}-{value}"
        setattr(config, field, value)
        AutoModelForCausalLM.from_config(config).save_pretrained(made)
        refused(saying, adapter, made)
    llama, partly = tiny_model("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    file = adapter_of(tmp_path / "partly", llama, partly) / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "lm_head" not in name}, file)
    refused("cannot be loaded .*lm_head", tmp_path / "partly")
    copies = LoraConfig(r=2, target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]])
    refused("type LORA with layer_replication cannot be merged", adapter_of(tmp_path / "copies", llama, copies))
    prompts = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    refused("type PROMPT_TUNING cannot be merged", adapter_of(tmp_path / "prompts", llama, prompts))
    of_gpt2 = adapter_of(tmp_path / "gpt2", tiny_model("gpt2"), LoraConfig(target_modules=["c_attn"]))
    refused("cannot be loaded .Target modules", of_gpt2)
    file.unlink()
    refused(r"no adapter_model\.\* in this folder", tmp_path / "partly")
    refused("no such folder", "./missing")
    refused("no adapter_config.json", base)
    refused("is a file", base / "config.json")
    refused("no such folder, and not from the hub", "org/adapter-of-nobody")


def test_missing_peft_is_said_with_what_to_install(base, adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LookaheadError, match=r"pip install 'lookahead\[adapter\]'"):
        load_model(str(base), adapter=str(adapter))


# ---- code of its own, revisions, tokenizers
@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """The folder of a model that transformers does not know: a Llama that says everything twice as loud."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "own"
    copy.deepcopy(tiny_model("llama")).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config |= {"model_type": "own_of_a_test", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_of_a_test'\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


def test_code_of_the_models_own_runs_only_when_it_is_trusted(cli, own_code, base, tmp_path):
    job = ("generate", "--model", own_code, "--input", write_jsonl(tmp_path / "rows.jsonl", ROWS), "-o", tmp_path / "x.jsonl")
    cli.fails(1, *job, saying=[f"{own_code}: brings code of its own", "--trust-remote-code"])
    assert not (tmp_path / "modules").exists()
    said, _ = answers(cli, tmp_path, ROWS, "--model", own_code, "--trust-remote-code")
    assert said == [plainly(tiny_model("llama"), ids, 12) for ids in IDS]
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert "own.py" in manifest["model_files"]
    assert manifest["answering"]["trust_remote_code"] is True
    cli.fails(1, "calibrate", "--model", own_code, saying=["--trust-remote-code"])


def test_revision_of_a_folder_is_refused_by_every_command(cli, base, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    for command in (("generate", "--input", source), ("bench", "--input", source), ("calibrate",)):
        cli.fails(2, *command, "--model", base, "--revision", "v2", saying=["--revision v2", f"{base} is a folder"])
    with pytest.raises(UsageError, match="revision"):
        LookaheadEngine(tiny_model("llama"), revision="v2")


def test_model_without_a_tokenizer_answers_with_that_of_another_folder(cli, tmp_path):
    bare, rows = tmp_path / "bare", [{"prompt": PROMPTS[0]}]
    bare.mkdir()
    for path in MODEL.iterdir():
        if path.name not in TOKENIZER_FILES:
            (bare / path.name).symlink_to(path)
    expected, _ = answers(cli, tmp_path, rows, "--model", MODEL)
    said, _ = answers(cli, tmp_path, rows, "--model", bare, "--tokenizer", MODEL, "--save-trie", tmp_path / "learned.trie")
    assert said == expected
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert "tokenizer/tokenizer.json" in manifest["model_files"]
    assert cli("inspect-trie", tmp_path / "learned.trie", "--json").code == 0
    job = ("generate", "--model", bare, "--input", tmp_path / "in.jsonl", "-o", tmp_path / "x.jsonl")
    cli.fails(1, *job, "--tokenizer", tmp_path / "none", saying=["none: no such folder"])


# ---- sampling
def test_sampling_that_the_model_asks_for_is_said_once_and_done_when_asked(cli, base, configured, tmp_path):
    model = configured(do_sample=True, temperature=1.5, top_p=0.9, num_beams=4)
    greedy, plain_err = answers(cli, tmp_path, ROWS, "--model", base)
    assert plain_err == ""
    said, err = answers(cli, tmp_path, ROWS, "--model", model)
    assert said == greedy
    (line,) = err.splitlines()
    assert "it samples (temperature 1.5, top_p 0.9), these answers are greedy: --sampling model" in line
    assert "num_beams 4 is not used: there is no beam search" in line
    sampled, err = answers(cli, tmp_path, ROWS, "--model", model, "--sampling", "model")
    assert "samples" not in err
    assert sampled != greedy
    typed = ("--temperature", 1.5, "--top-p", 0.9, "--top-k", 50)  # 50 is the default of generate
    assert answers(cli, tmp_path, ROWS, "--model", base, *typed)[0] == sampled
    rows = [{**ROWS[0], "params": {"temperature": 0}}, ROWS[1]]
    assert answers(cli, tmp_path, rows, "--model", model, "--sampling", "model")[0] == [greedy[0], sampled[1]]


def test_wrong_sampling_of_the_model_is_refused_where_it_is_asked_for(cli, configured, tmp_path):
    model, rows = configured(do_sample=True, min_p=3.0), write_jsonl(tmp_path / "rows.jsonl", ROWS)
    job = ("generate", "--model", model, "--input", rows, "-o", tmp_path / "x.jsonl")
    cli.fails(1, *job, "--sampling", "model", saying=["its generation config cannot be used", "min_p"])
    assert cli(*job, "--max-new-tokens", 2, "--overwrite").code == 0


TYPED = """--temperature 0.9 --typical-p 0.8 --frequency-penalty 0.7 --presence-penalty 0.3 --no-repeat-ngram-size 3
    --min-new-tokens 5 --stop-token-ids 20 --stop-token-ids 21 --bad-words-ids 30 --bad-words-ids 31,32 --logit-bias 40=2.0
    --logit-bias 41=-3.0 --repetition-penalty 1.1"""
PARAMS = {
    "temperature": 0.9, "typical_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.3, "no_repeat_ngram_size": 3,
    "min_new_tokens": 5, "stop_token_ids": [20, 21], "bad_words_ids": [[30], [31, 32]], "logit_bias": {"40": 2.0, "41": -3.0},
    "repetition_penalty": 1.1,
}  # fmt: skip


def test_flags_ask_for_what_a_rows_params_do(cli, base, tmp_path):
    rows = [{"id": 1, "prompt_ids": IDS[1]}]
    by_flags, _ = answers(cli, tmp_path, rows, "--model", base, *TYPED.split())
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["answering"]["logit_bias"] == ["40=2.0", "41=-3.0"]
    by_params, _ = answers(cli, tmp_path, [{**rows[0], "params": PARAMS}], "--model", base)
    assert by_flags == by_params != answers(cli, tmp_path, rows, "--model", base, "--temperature", 0.9)[0]


@pytest.mark.parametrize(
    ("typed", "saying"),
    [
        (("--sampling", "beam"), "choose greedy or model"),
        (("--logit-bias", "5"), "--logit-bias 5: give ID=B"),
        (("--logit-bias", "5=nan"), "give ID=B"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "token 5 is given twice"),
        (("--bad-words-ids", "the"), "--bad-words-ids the: give token ids"),
        (("--typical-p", "3"), "typical_p is 3.0"),
        (("--adapter", "x", "--tp-plan", "auto"), "leave --tp-plan out"),
    ],
)
def test_flag_that_makes_no_sense_is_a_usage_error(cli, tmp_path, typed, saying):
    source = write_jsonl(tmp_path / "in.jsonl", ROWS)
    cli.fails(2, "generate", "--model", MODEL, "--input", source, "-o", tmp_path / "x.jsonl", *typed, saying=[saying])


@needs_halves
def test_job_in_half_precision_states_whether_it_is_exact(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt_ids": [5, 6, 7, 8]}])
    for name, path, exact in (
        ("llama", "one native call, bfloat16, exact", True),
        ("gemma2", "module by module (its attention is a function of its own), bfloat16, not exact", False),
    ):
        copy.deepcopy(tiny_model(name)).bfloat16().save_pretrained(tmp_path / name)
        job = "generate", "--model", tmp_path / name, "--dtype", "bfloat16", "--input", source, "--max-new-tokens", 4
        result = cli(*job, "-o", tmp_path / f"{name}.jsonl", "--json")
        assert result.json["path"] == path
        assert ("is not exact in bfloat16" in result.err) is not exact


def test_revision_goes_to_the_hub_with_config_weights_and_tokenizer(monkeypatch):
    asked = {}
    monkeypatch.setattr("lookahead.files.hub._offline", lambda: False)
    monkeypatch.setattr("lookahead.files.hub._problem", lambda *_: "")  # the hub has it

    def of(kind):
        def from_pretrained(name, *_, **arguments):
            asked[kind] = name, arguments["revision"], arguments["trust_remote_code"]
            if kind == "AutoConfig":
                return tiny_config("llama")
            model = copy.deepcopy(tiny_model("llama"))
            nothing = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
            return (model, nothing) if "output_loading_info" in arguments else model

        return from_pretrained

    for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", of(kind))
    for module in ("models.load", "tokenizer"):
        monkeypatch.setattr(f"lookahead.{module}.located", lambda name, *_: (name, {}))
    settings = EngineSettings(ModelOptions("org/model", revision="v2", trust_remote_code=True))
    monkeypatch.setattr("lookahead.job.setup.assemble", lambda target, tokenizer, *_: (target, tokenizer))
    settings.load()
    assert asked == dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), ("org/model", "v2", True))
