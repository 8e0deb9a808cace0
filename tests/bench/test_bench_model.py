"""bench on models: batch sizes, what excuses a divergence, logged answers forced on a model. Counts and ratios, never times."""

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from lookahead.bench.lossless import SHOWN, lossless
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.forward.kv_cache import SlotCache
from lookahead.forward.target import TargetModel
from lookahead.models.load import random_model
from lookahead.models.probe import probed
from tests.architectures import tiny_config
from tests.support.bench import compared_on
from tests.support.cli import write_jsonl
from tests.support.cpu import needs_halves
from tests.support.depth import deep
from tests.support.drafts import VOCAB_SIZE
from tests.support.jobs import MODEL

PROMPTS = MODEL.parent / "prompts.jsonl"
OPTIONS = [DraftOptions(decoding_length=8, adaptive=False)]
OFF = DraftOptions(strategy="off")
PEERS = ["model.generate", "HF prompt lookup"]
OF_A_COMPARISON = {
    "model", "device", "dtype", "mode", "batch_size", "rows", "repeats", "forced", "runs", "lossless", "lossless_rows",
    "divergences", "environment", "predicted",
}  # fmt: skip


def prompts_of(count: int) -> list[list[int]]:
    """Of 3 to 10 tokens, which repeat themselves, so that something is drafted."""
    generator = np.random.default_rng(0)
    return [[*ids, *ids][: 3 + number % 8] for number, ids in enumerate(generator.integers(3, VOCAB_SIZE, (count, 5)).tolist())]


@pytest.fixture(scope="session")
def half(tiny_model):
    """half(architecture) -> a tiny model in bfloat16, whose attention depends on the shape of the forward."""

    def make(architecture):
        return dataclasses.replace(probed(copy.deepcopy(tiny_model(architecture)).bfloat16()), attends_by_op=False)

    return functools.cache(make)


@pytest.fixture(scope="session")
def answers_of_half(half):
    """answers_of_half(architecture, options, batch_size) -> to prompts_of(16), computed once."""
    known = functools.cache(lambda name, options, size: answers(half(name), prompts_of(16), options, size))
    return lambda name, options, size: copy.deepcopy(known(name, options, size))


# batch sizes
@pytest.mark.parametrize("batch_size", [3, *deep([1])])
def test_all_contenders_say_the_same_at_every_batch_size(tiny_model, batch_size):
    prompts, done = prompts_of(14), []
    found = compared_on(
        probed(tiny_model("llama")), prompts, OPTIONS, max_new_tokens=12, batch_size=batch_size, progress=done.append
    )
    names = ["plain", "hierarchical 8", *PEERS]
    assert [run.name for run in found.runs] == names if batch_size == 1 else names[:-1]
    plain = found.runs[0]
    assert all(run.outputs == plain.outputs for run in found.runs)
    assert len(plain.outputs) == 14
    assert found.lossless is not None
    assert (found.lossless.checked, found.lossless.identical) == (14, 14)
    assert (plain.edl, found.runs[2].edl) == (1, 1)
    assert found.runs[1].steps < plain.steps
    assert done[-1] == 14


def test_generate_in_a_batch_keeps_each_row_within_the_models_positions(tiny_model):
    prompts = [ids * 3 for ids in prompts_of(12)]  # up to 30 tokens of 32
    found = compared_on(probed(tiny_model("gpt2_short")), prompts, OPTIONS, max_new_tokens=20, batch_size=4)
    assert found.runs[0].outputs == found.runs[2].outputs
    assert {len(output) for output in found.runs[0].outputs} >= {2, 20}


@pytest.mark.deep
def test_batch_sizes_give_one_object_or_one_for_each(cli, tmp_path):
    asked = (
        "bench", "--model", MODEL, "--input", PROMPTS, "--rows", 2, "--max-new-tokens", 12, "--strategy", "hierarchical",
    )  # fmt: skip
    one = cli(*asked, "--batch-size", 2, "--json").json
    assert set(one) == OF_A_COMPARISON
    assert one["batch_size"] == 2
    assert one["lossless"] == {"checked": 2, "identical": 2, "near_tie": 0, "different": 0}
    assert one["divergences"] == []
    saved, plot = tmp_path / "b.json", tmp_path / "b.png"
    result = cli(*asked, "--batch-size", "1,2,1", "--save", saved, "--plot", plot)
    assert [f"batch {n}\n" in result.out for n in (1, 2)] == [True, True]
    assert plot.read_bytes().startswith(b"\x89PNG")
    several = json.loads(saved.read_text())
    assert set(several) == {"batches"}
    assert [(each["batch_size"], set(each)) for each in several["batches"]] == [(1, OF_A_COMPARISON), (2, OF_A_COMPARISON)]
    names = [[run["name"] for run in each["runs"]] for each in several["batches"]]
    assert names == [["plain", "hierarchical 16", "model.generate", *lookup] for lookup in (["HF prompt lookup"], [])]


@pytest.mark.parametrize("sizes", ["0", "many", "1,,2", "-1", "1.5", "2000", ""])
def test_batch_sizes_that_are_none_are_refused(cli, sizes):
    cli.fails(2, "bench", "--model", MODEL, "--input", PROMPTS, f"--batch-size={sizes}", saying=["--batch-size", "1,4,8"])


# divergences
@pytest.mark.deep
@pytest.mark.parametrize("architecture", ["llama", *deep(["gemma3", "mixtral"])])
def test_divergences_of_a_healthy_bfloat16_model_are_near_ties(half, answers_of_half, architecture):
    plain = answers_of_half(architecture, OFF, 1)
    outputs = {str(size): answers_of_half(architecture, OPTIONS[0], size) for size in (1, 4, 8)}
    found = lossless(half(architecture), prompts_of(16), plain, outputs)
    assert found.different == 0, [each for each in found.divergences if each.kind == "different"]
    assert found.near_tie > 0
    assert found.identical + found.near_tie == found.checked == 48
    for each in found.divergences:
        assert each.got == outputs[each.run][each.row - 1][each.place]
        assert each.expected == plain[each.row - 1][each.place]
        assert plain[each.row - 1][: each.place] == outputs[each.run][each.row - 1][: each.place]
        assert None not in dataclasses.astuple(each)


def test_cache_that_keeps_rejected_drafts_is_told_from_rounding(half, monkeypatch):
    target, prompts = half("llama"), prompts_of(8)
    plain = answers(target, prompts, OFF, 2)
    monkeypatch.setattr(SlotCache, "move", lambda *arguments: None)
    found = lossless(target, prompts, plain, {"wrong": answers(target, prompts, OPTIONS[0], 2)})
    assert found.different > 0


def test_one_wrong_token_behind_a_near_tie_is_found_where_it_stands(half, answers_of_half):
    target, prompts = half("llama"), prompts_of(16)
    plain = answers_of_half("llama", OFF, 1)
    other = answers_of_half("llama", OPTIONS[0], 4)
    (first, *_) = lossless(target, prompts, plain, {"right": other}).divergences
    row, place = first.row - 1, first.place + 2
    other[row][place] = (other[row][place] + 1) % VOCAB_SIZE
    found = [each for each in lossless(target, prompts, plain, {"wrong": other}).divergences if each.row == first.row]
    assert [(each.place, each.got, each.kind) for each in found] == [(place, other[row][place], "different")]
    assert (found[0].expected_score or 0) - (found[0].got_score or 0) > (found[0].tolerance or 0)


def test_answer_that_ends_early_is_different_and_different_ones_are_shown_first(half, answers_of_half):
    target, prompts = half("llama"), prompts_of(16)
    plain = answers_of_half("llama", OFF, 1)
    other = answers_of_half("llama", OPTIONS[0], 4)
    cut = [*plain[:-1], plain[-1][:5]]
    found = lossless(target, prompts, plain, {**{str(n): other for n in range(SHOWN)}, "cut": cut})
    assert found.near_tie > SHOWN
    assert len(found.shown) == SHOWN
    shown = found.shown[0]
    assert (shown.run, shown.row, shown.place, shown.got, shown.kind) == ("cut", 16, 5, None, "different")
    assert [each.kind for each in found.shown[1:]] == ["near-tie"] * (SHOWN - 1)


@pytest.mark.parametrize("dtype", [*deep(["float32"]), pytest.param("bfloat16", marks=needs_halves)])
def test_exact_model_has_no_near_ties_and_bench_says_bit_for_bit(cli, tmp_path, dtype):
    shown = cli(
        "bench", "--model", MODEL, "--input", PROMPTS, "--rows", 4, "--max-new-tokens", 40, "--strategy", "hierarchical,single",
        "--dtype", dtype, "--no-peers", "--batch-size", 2, "--exact", "--save", tmp_path / "b.json",
    )  # fmt: skip
    assert "lossless: 8/8 outputs identical to plain decoding, bit for bit, 0 different" in shown.out
    value = json.loads((tmp_path / "b.json").read_text())
    assert value["lossless"] == {"checked": 8, "identical": 8, "near_tie": 0, "different": 0}


def test_output_of_an_exact_model_that_differs_is_no_near_tie(half, answers_of_half):
    target, prompts = half("llama"), prompts_of(16)
    plain = answers_of_half("llama", OFF, 1)
    outputs = {"batch": answers_of_half("llama", OPTIONS[0], 8)}
    found = lossless(target, prompts, plain, outputs)
    assert found.near_tie > 0
    exact = dataclasses.replace(target, exact=True)
    strictly = lossless(exact, prompts, plain, outputs)
    assert (strictly.near_tie, strictly.different) == (0, found.near_tie)


def answers(target: TargetModel, prompts: list[list[int]], options: DraftOptions, batch_size: int) -> list[list[int]]:
    engine = DecodingEngine(target, Drafter((), options), batch_size)
    generations = [engine.request(prompt, 40) for prompt in prompts]
    for generation in engine.run(generations):
        assert generation.error is None
    return [generation.token_ids for generation in generations]


# logged answers on a model
@pytest.fixture
def pairs(tmp_path):
    """Ten logged answers that repeat each other and their prompts."""
    rows = [{"prompt_ids": [1, 2, 3, n], "response_ids": [n, 1, 2, 3, 4, 5, 6, n, 2, 8, 9]} for n in range(20, 30)]
    return write_jsonl(tmp_path / "pairs.jsonl", rows)


@pytest.fixture(scope="session")
def shape(tmp_path_factory):
    """A folder with nothing but the config of a tiny model, whose token 2 ends texts."""
    folder = tmp_path_factory.mktemp("shape")
    tiny_config("llama").save_pretrained(folder)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


def test_forced_replay_needs_a_config_only_and_accepts_what_a_replay_without_model_does(cli, pairs, shape):
    asked = ("bench", "--replay", pairs, "--strategy", "hierarchical,single", "--decoding-length", "8", "--json")
    value = cli(*asked, "--model", shape, "--random-weights").json
    assert set(value) == OF_A_COMPARISON
    assert (value["rows"], value["forced"], value["lossless"], value["divergences"]) == (10, True, None, [])
    assert [run["name"] for run in value["runs"]] == ["plain", "hierarchical 8", "single 8", *PEERS]
    assert {run["tokens"] for run in value["runs"]} == {110}  # token 2 ends nothing here
    plain, *drafting, generate, lookup = value["runs"]
    assert (generate["edl"], generate["steps"], lookup["edl"] > 1) == (1, 100, True)
    assert (plain["edl"], plain["steps"], plain["forwards"]) == (1, 100, 110)
    without = cli(*asked).json["strategies"]
    told = [(run["strategy"], run["steps"], run["edl"], set(run["accepted_by_source"])) for run in drafting]
    assert told == [(run["strategy"], run["steps"], run["edl"], set(run["accepted_by_source"])) for run in without]
    assert set(drafting[0]["accepted_by_source"]) == {"prompt", "output", "session"}


@pytest.mark.deep
def test_forced_replay_takes_tries_batch_sizes_and_dtypes(cli, pairs, shape, tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"ids": json.loads(line)["response_ids"]} for line in pairs.open()])
    assert cli("build-trie", corpus, "-o", tmp_path / "c.trie", "--vocab-size", 40).code == 0
    asked = ("bench", "--replay", pairs, "--model", shape, "--random-weights", "--strategy", "hierarchical", "--dtype")
    asked = (*asked, "bfloat16", "--attn", "eager", "--batch-size", "1,4", "--no-peers")
    warm = cli(*asked, "--trie", tmp_path / "c.trie", "--json").json["batches"]
    assert [(each["batch_size"], each["dtype"], each["runs"][0]["tokens"]) for each in warm] == [
        (1, "bfloat16", 110),
        (4, "bfloat16", 110),
    ]
    shown = cli(*asked, "--save", tmp_path / "cold.json")
    cold = json.loads((tmp_path / "cold.json").read_text())["batches"]
    assert all(w["runs"][1]["edl"] > c["runs"][1]["edl"] > 1 for w, c in zip(warm, cold, strict=True))
    assert "trie:c" in warm[0]["runs"][1]["accepted_by_source"]
    assert f"{shape} (random weights): 10 logged answers, cpu, bfloat16, batch 4" in shown.out
    assert "lossless" not in shown.out


def test_random_model_is_the_same_each_time_and_leaves_the_random_stream_alone(shape):
    state = torch.random.get_rng_state()
    one, two = (random_model(str(shape)).model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("architecture", ["llama", "gpt_neo", "gpt2"])
@pytest.mark.parametrize("batch_size", [3, *deep([1])])
def test_answers_are_forced_row_by_row_on_models_of_all_modes(tiny_model, architecture, batch_size):
    prompts = prompts_of(7)
    logged = [[*prompt, 2, *prompt, *prompt][: 6 + number] for number, prompt in enumerate(prompts)]  # of several lengths
    found = compared_on(probed(tiny_model(architecture)), prompts, OPTIONS, batch_size=batch_size, answers=logged)
    assert all(run.outputs == logged for run in found.runs)
    assert found.lossless is None
    assert found.runs[1].steps < found.runs[0].steps


@pytest.mark.deep
@pytest.mark.parametrize("architecture", ["llama", *deep(["gpt_neo"])])
def test_peers_forced_to_say_what_they_would_say_do_what_they_would_do(tiny_model, architecture):
    target, prompts = probed(tiny_model(architecture)), [ids * 2 for ids in prompts_of(8)]
    options = [dataclasses.replace(option, recycle=False) for option in OPTIONS]  # of given answers nothing is recycled
    free = compared_on(target, prompts, options, max_new_tokens=24, lossless_rows=0)
    again = compared_on(target, prompts, options, answers=free.runs[0].outputs)
    for run, forced_run in zip(free.runs, again.runs, strict=True):
        assert forced_run.outputs == run.outputs
        assert (forced_run.steps, forced_run.draft_tokens_wasted) == (run.steps, run.draft_tokens_wasted)
    lookup = again.runs[-1]
    assert lookup.name == "HF prompt lookup"
    assert 0 < lookup.draft_tokens_wasted < lookup.counts.draft_tokens  # it is not told what is right


def test_forced_replay_refuses_what_does_not_fit(cli, pairs, shape, tmp_path):
    asked = ("bench", "--model", shape, "--random-weights", "--strategy", "single")
    cli.fails(2, "bench", "--random-weights", saying=["--random-weights", "--model", "--replay"])
    cli.fails(2, "bench", "--random-weights", "--replay", pairs, saying=["--random-weights", "--model"])
    cli.fails(2, *asked, "--input", pairs, saying=["--random-weights", "--replay"])
    cli.fails(2, *asked, "--replay", pairs, "--input", pairs, saying=["--random-weights", "--input"])
    cli.fails(2, *asked, "--replay", pairs, "--replay", pairs, saying=["one --replay"])
    cli.fails(2, *asked, "--replay", pairs, "--baselines", saying=["--baselines"])
    cli.fails(2, *asked, "--replay", pairs, "--max-new-tokens", 3, saying=["--max-new-tokens"])
    cli.fails(2, *asked, "--replay", pairs, "--check-lossless", saying=["--check-lossless", "nothing to compare"])
    cli.fails(2, *asked, "--replay", pairs, "--batch-size", 0, saying=["--batch-size 0"])
    cli.fails(2, *asked, "--replay", pairs, "--dtype", "int8", saying=["--dtype int8"])
    cli.fails(1, *asked, "--replay", tmp_path / "no.jsonl", saying=["no.jsonl: no such file"])
    cli.fails(1, "bench", "--replay", pairs, "--random-weights", "--model", tmp_path, saying=["no config.json"])
    good = {"prompt_ids": [1], "response_ids": [2, 3]}
    high = write_jsonl(tmp_path / "high.jsonl", [good, {"prompt_ids": [1], "response_ids": [2, VOCAB_SIZE]}])
    cli.fails(1, *asked, "--replay", high, saying=["high.jsonl:2", "token id 97", "vocabulary of 97"])
    long = write_jsonl(tmp_path / "long.jsonl", [good, good, {"prompt_ids": [1] * 9, "response_ids": [2] * 250}])
    cli.fails(1, *asked, "--replay", long, saying=["long.jsonl:3", "259 tokens", "256 positions"])
    corpus = write_jsonl(tmp_path / "c.jsonl", [{"ids": [1, 2, 500]}])
    assert cli("build-trie", corpus, "-o", tmp_path / "c.trie", "--vocab-size", 501).code == 0
    cli.fails(1, *asked, "--replay", pairs, "--trie", tmp_path / "c.trie", saying=["c.trie", "501", "97"])


def test_model_that_decodes_plainly_cannot_be_forced(cli, pairs, tmp_path):
    tiny_config("mamba").save_pretrained(tmp_path)
    asked = ("bench", "--replay", pairs, "--model", tmp_path, "--random-weights", "--strategy", "single")
    result = cli(*asked)
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith(f"error: {tmp_path}: answers of texts of 15 tokens cannot be replayed on it")


@pytest.mark.deep
def test_several_quantizations_make_one_table_of_speed_memory_and_loss(cli, tmp_path):
    given = (
        "bench", "--model", MODEL, "--input", PROMPTS, "--rows", 2, "--max-new-tokens", 8, "--no-peers", "--strategy", "auto",
    )  # fmt: skip
    several = "--quantize", "none,int4", "--kv-dtype", "none,int8"
    saved = tmp_path / "schemes.json"
    shown = cli(*given, *several, "--save", saved)
    assert shown.code == 0, shown.err
    schemes = {(each["quantize"], each["kv_dtype"]): each for each in json.loads(saved.read_text())["schemes"]}
    assert list(schemes) == [("none", "none"), ("none", "int8"), ("int4", "none"), ("int4", "int8")]
    for (quantize, kv_dtype), scheme in schemes.items():
        (comparison,) = scheme["comparisons"]
        assert comparison.keys() == OF_A_COMPARISON
        assert comparison["environment"]["kv_dtype"] == kv_dtype
        assert comparison["lossless"]["identical"] == comparison["lossless"]["checked"] == 2
        assert f"{scheme['loss']:.4f}" in shown.out
        assert (comparison["environment"]["linear"] == "int4") == (quantize == "int4")
    of_plain, of_both = schemes["none", "none"], schemes["int4", "int8"]
    assert of_both["weight_bytes"] < of_plain["weight_bytes"] / 4
    assert of_both["kv_bytes_per_token"] / of_plain["kv_bytes_per_token"] == pytest.approx(34 / 128)
    assert len({scheme["loss"] for scheme in schemes.values()}) == 4, "each is another model"
    assert abs(of_both["loss"] - of_plain["loss"]) < 0.2
    cli.fails(2, *given, "--quantize", "none,int2", saying=["--quantize int2: choose none, int8, int4, or several"])
    cli.fails(2, *given, *several, "--plot", tmp_path / "a.png", saying=["leave out --sweep, --plot and --report"])
