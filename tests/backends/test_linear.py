"""Weights laid out for a CPU: the same scores, the same tokens for any draft, and nothing kept twice."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from lookahead.backends.cpu import linear, panels
from lookahead.backends.cpu.linear import ROUNDING, LaidOutLinear, OneDnnWeight, laid_out, lay_out
from lookahead.backends.cpu.panels import Panels
from lookahead.decode.engine import DecodingEngine
from lookahead.forward import processor
from lookahead.models.load import load_model
from lookahead.models.probe import kind_of_linear, probed
from tests.architectures import MODES, VOCAB_SIZE, decoded, plain_answers, random_prompts
from tests.support.depth import deep, some_deep
from tests.support.drafts import drafter_of

DEMO = "samples/demo-model"
ARCHITECTURES = ("llama", "mixtral", "gemma4", "gpt2", "gpt_neox", "gpt_oss", "deepseek_v3", "mpt", "bamba", "mamba")
SHAPES = ((1, 0, 24), (1, 24), (7, 24), (1, 5, 24), (2, 3, 24))


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["panels", "panels of single numbers", "onednn"])
def test_laid_out_layer_says_what_the_layer_says(monkeypatch, dtype, bias, layout):
    if layout == "onednn" and not (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("oneDNN takes no bfloat16 here")
    if (layout, dtype) == ("onednn", torch.float16):
        pytest.skip("not by this library")
    monkeypatch.setattr(panels, "multiplies_pairs", lambda: layout == "panels" and processor.multiplies_pairs())
    monkeypatch.setattr(Panels, "takes", staticmethod(lambda weight: "panels" in layout))
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: layout == "onednn")
    torch.manual_seed(0)
    before = nn.Linear(24, 40, bias, dtype=dtype)
    after = lay_out(nn.Sequential(copy.deepcopy(before)))[0]
    assert isinstance(after, LaidOutLinear)
    assert after.laid_out.library == layout.split()[0]
    rounding = 1e-5 if dtype == torch.float32 else ROUNDING[dtype]
    for shape in SHAPES:
        tokens = torch.randn(shape).to(dtype)
        torch.testing.assert_close(after(tokens), before(tokens), rtol=rounding, atol=rounding)
    rows = torch.randn(6, 48).to(dtype)[::2, ::2]  # neighbours that do not lie side by side
    torch.testing.assert_close(after(rows), before(rows), rtol=rounding, atol=rounding)
    assert after.weight.equal(before.weight), "a model that looks into its layer finds the weight"


WAYS = [("random_trees", 3)]


@pytest.mark.parametrize("ways", [WAYS, *deep([[("perfect", 1), ("perfect", 3), ("random_trees", 1)]])], ids=str)
@pytest.mark.parametrize("architecture", some_deep(ARCHITECTURES, ["llama", "gpt2"]))
def test_model_says_the_same_and_any_draft_yields_its_plain_tokens(tiny_model, make_trie, architecture, ways):
    stock = tiny_model(architecture)
    model = lay_out(copy.deepcopy(stock))
    prompts = random_prompts()
    answers = plain_answers(architecture, prompts)
    with torch.inference_mode():
        text = torch.tensor([prompts[4]])
        torch.testing.assert_close(model(text).logits, stock(text).logits, rtol=1e-4, atol=1e-4)
    target = probed(model)
    assert target.mode == MODES[architecture]
    trie = make_trie([[*prompt, *answer] for prompt, answer in answers], VOCAB_SIZE)
    for draft, batch_size in ways:
        done = decoded(DecodingEngine(target, drafter_of(draft, answers, trie), batch_size), prompts)
        assert [g.token_ids for g in done] == [answer for _, answer in answers], (draft, batch_size)


def test_weights_are_let_go_but_for_those_that_others_share():
    torch.manual_seed(0)
    table, head, first = nn.Embedding(40, 24), nn.Linear(24, 40, False), nn.Linear(24, 24)
    second = nn.Linear(24, 24)
    head.weight, second.weight = table.weight, first.weight
    gone, stays = weakref.ref(first.weight), weakref.ref(table.weight)
    model = lay_out(nn.ModuleDict({"table": table, "first": first, "second": second, "head": head}))
    del first, second, head
    gc.collect()
    assert gone() is None
    assert stays() is model["table"].weight
    assert model["first"].laid_out is model["second"].laid_out, "one copy of what two layers share"
    assert {name for name, _ in model.named_parameters()} == {"table.weight", "first.bias", "second.bias"}
    assert not any(each.requires_grad for each in model.parameters()), "outside of inference mode it would crawl"


def test_layers_of_other_kinds_are_left_alone():
    class Own(nn.Linear):
        pass

    changed = nn.Linear(8, 8)
    changed.forward = lambda tokens: tokens
    model = nn.ModuleList([Own(8, 8), changed, nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, device="meta")])
    before = list(model)
    assert list(lay_out(model)) == before
    assert kind_of_linear(model) == "torch"


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("inner", "outputs"), [(24, 40), (33, 100), (2100, 64), (128, 333)])
def test_token_gets_the_same_bits_in_any_company_and_by_any_threads(dtype, inner, outputs):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inner).to(dtype)
    layout, tokens = Panels(weight), torch.randn(261, inner).to(dtype)
    assert layout.to_dense().equal(weight)
    together, before = layout.product(tokens, None), torch.get_num_threads()
    torch.testing.assert_close(
        together.double(), tokens.double() @ weight.double().T, rtol=1e-2, atol=inner * ROUNDING[dtype] / 20
    )
    for size in (1, 2, 3, 4, 5, 8, 17, 64):
        assert layout.product(tokens[:size], None).equal(together[:size]), size
    torch.set_num_threads(3)
    try:
        assert layout.product(tokens, None).equal(together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_float32_weights_that_16_bits_hold_are_read_as_such_without_changing_a_bit(half, monkeypatch):
    torch.manual_seed(0)
    weight, tokens = torch.randn(100, 333).to(half).float(), torch.randn(37, 333)
    weight[0, :3] = torch.tensor([-0.0, 2**-14, 2**-20])  # zero with a sign, and what float16 holds with fewer bits
    halved = Panels(weight)
    assert halved.weight.dtype == half
    assert halved.to_dense().equal(weight)
    finer = weight.clone()
    finer[99, 332] += 2**-20
    assert Panels(finer).weight.dtype == torch.float32
    monkeypatch.setattr(panels, "_in_16_bits", lambda weight: weight)
    whole = Panels(weight)
    assert whole.weight.dtype == torch.float32
    for count in (1, 5, 37):
        assert halved.product(tokens[:count], None).equal(whole.product(tokens[:count], None))


def test_a_torch_without_such_products_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(Panels, "takes", staticmethod(lambda weight: False))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert laid_out(torch.zeros(8, 8)) is None
    model = nn.Sequential(nn.Linear(8, 8))
    assert type(lay_out(model)[0]) is nn.Linear


def test_products_that_go_wrong_or_fail_are_not_used(monkeypatch):
    torch.manual_seed(0)
    for kind in (Panels, OneDnnWeight):
        for other in (Panels, OneDnnWeight):
            monkeypatch.setattr(other, "takes", staticmethod(lambda weight, other=other, kind=kind: other is kind))
        right = kind.product
        for factor in (1.01, float("nan")):
            monkeypatch.setattr(kind, "product", lambda *given, right=right, factor=factor: right(*given) * factor)
            assert type(lay_out(nn.Sequential(nn.Linear(24, 40)))[0]) is nn.Linear
        monkeypatch.setattr(kind, "product", fails)
        assert type(lay_out(nn.Sequential(nn.Linear(24, 40)))[0]) is nn.Linear


@pytest.mark.parametrize(
    ("capability", "tiles", "dtypes"),
    [
        ("AVX512", False, {torch.float32, torch.bfloat16, torch.float16}),
        ("AVX512", True, {torch.float32, torch.float16}),
        ("AVX2", False, {torch.float32, torch.bfloat16, torch.float16}),
        ("DEFAULT", False, set()),
    ],
)
def test_panels_take_what_they_multiply_fastest(monkeypatch, capability, tiles, dtypes):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert {dtype for dtype in ROUNDING if Panels.takes(torch.zeros(8, 8, dtype=dtype))} == dtypes


@pytest.mark.parametrize(("avx512", "native", "taken"), [(True, True, True), (True, False, False), (False, False, True)])
def test_bfloat16_that_onednn_would_convert_is_not_its_own(monkeypatch, avx512, native, taken):
    """The last: a CPU of another kind than x86, of which torch knows whether it multiplies bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert OneDnnWeight.takes(torch.zeros(8, 8, dtype=torch.bfloat16)) == taken


def fails(*given: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not implemented")


def test_models_loaded_by_name_are_laid_out_and_their_costs_kept_apart():
    target = load_model(DEMO, device="cpu")
    assert target.setting.linear == kind_of_linear(target.model) == "panels"
    assert torch.backends.cpu.get_cpu_capability() in target.setting.device
    from transformers import AutoModelForCausalLM

    stock = probed(AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval(), DEMO)
    assert stock.setting.linear == "torch"
    assert stock.setting.file_name != target.setting.file_name
