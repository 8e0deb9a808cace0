"""What `lookahead_generate` keeps of a model, which models it decodes plainly, and what it refuses."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import DynamicCache, EosTokenCriteria, LogitsProcessor, T5Config, T5ForConditionalGeneration

from lookahead import hf
from lookahead.draft.drafter import Drafter
from lookahead.errors import LookaheadError
from tests.architectures import plainly
from tests.hf.test_custom_generate import ALL, NEW_TOKENS, OURS, PROMPTS, assert_equal, both, ends, guessing, padded
from tests.support.depth import deep
from tests.support.drafts import VOCAB_SIZE


@pytest.fixture(scope="module")
def llama(tiny_model, device):
    return tiny_model("llama", device)


def test_model_is_probed_once_and_again_when_it_changed(llama, monkeypatch):
    probes, model = [], copy.deepcopy(llama)
    monkeypatch.setattr(hf, "probed", lambda model, name, probed=hf.probed: probes.append(name) or probed(model, name))

    def ask():
        ids = model.generate(**padded(PROMPTS[:1], model.device), max_new_tokens=4, **OURS)
        assert ids[0, -4:].tolist() == plainly(model, PROMPTS[0], 4)

    ask()
    ask()
    assert len(probes) == 1
    for change in (model.train, model.eval, model.double, model.float, lambda: model.set_attn_implementation("eager")):
        before = len(probes)
        change()
        ask()
        assert len(probes) == before + 1
    with torch.no_grad():
        model.lm_head.weight.neg_()  # other weights say other tokens: no key or value of earlier calls is used
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.neg_()
    ask()


def test_nothing_keeps_a_model_alive_or_travels_with_its_copies(llama):
    model = copy.deepcopy(llama)
    model.generate(**padded(PROMPTS[:1], model.device), max_new_tokens=4, **OURS)
    kept = vars(model)[hf.KEPT]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other)[hf.KEPT] is not kept
        assert vars(other)[hf.KEPT]._target is None
    assert hf.KEPT not in model.state_dict()
    gone = weakref.ref(model)
    del model, kept, other
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("rows", [4, *deep([1])])
@pytest.mark.parametrize(("architecture", "mode"), [("gptj", "tree"), ("falcon_h1", "replay"), ("mamba", "plain")])
def test_models_that_are_not_packed(tiny_model, device, architecture, mode, rows):
    model = tiny_model(architecture, device)
    drafter = guessing(model, PROMPTS)
    wishes = {"eos_token_id": ends(model), **ALL}
    assert_equal(*both(model, PROMPTS[:1] * rows, drafter, **wishes))
    assert vars(model)[hf.KEPT]._target.mode == mode


def test_text_that_grows_beyond_where_positions_change_is_left_to_generate(tiny_model, device):
    model = tiny_model("phi3_longrope", device)  # changes at 40
    for new_tokens in (8, 40):
        assert_equal(*both(model, PROMPTS[:1], max_new_tokens=new_tokens, eos_token_id=[]))


def refused(model, **wishes):
    with pytest.raises(LookaheadError) as error:
        model.generate(**{**padded(PROMPTS[:2], model.device), "max_new_tokens": 4, **OURS, **wishes})
    return str(error.value)


REFUSED = {
    "beam_search": {"num_beams": 2},
    "contrastive_search": {"penalty_alpha": 0.5, "top_k": 4, "do_sample": False},
    "assisted_generation": {"prompt_lookup_num_tokens": 3},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "keeps its own cache: leave out": {"past_key_values": DynamicCache()},  # transformers calls it cache since 5.24
    "cache_implementation": {"cache_implementation": "offloaded"},
    "synced_gpus": {"synced_gpus": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(2, 14, 32)},
    "drafter is a str": {"drafter": "answers.trie"},
    "pad on the left": {"attention_mask": torch.tensor([[1] * 9 + [0] * 5, [1] * 14])},
    "row 1 of attention_mask": {"attention_mask": torch.tensor([[1] * 14, [0] * 14])},
    "outside the model's vocabulary of 97": {"input_ids": torch.tensor([[97], [3]]), "attention_mask": torch.ones(2, 1)},
    "row 0 of position_ids": {"position_ids": torch.arange(14).repeat(2, 1)},
    "needs the model's tokenizer": {"stop_strings": "x"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_reason(llama, reason):
    wishes = {k: v.to(llama.device) if isinstance(v, torch.Tensor) else v for k, v in REFUSED[reason].items()}
    assert reason in refused(llama, **wishes)


def test_models_and_tries_that_do_not_fit_are_refused(llama, make_trie):
    assert "assisted_generation" in refused(llama, assistant_model=copy.deepcopy(llama))
    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    assert "decoder-only" in refused(T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)))
    drafter = Drafter([make_trie([[3, 4, 120]], vocab_size=200)])
    assert "built for a vocabulary of 200 tokens" in refused(llama, drafter=drafter)
    model = copy.deepcopy(llama)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    assert "set pad_token_id" in refused(model, stopping_criteria=[EosTokenCriteria(5)])


def test_processor_that_fails_fails_the_call_and_the_next_one_works(llama):
    class Failing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 18:
                raise ValueError("too long for me")
            return scores

    drafter = guessing(llama, PROMPTS)
    with pytest.raises(ValueError, match="too long for me"):
        llama.generate(**padded(PROMPTS, llama.device), logits_processor=[Failing()], max_new_tokens=9, drafter=drafter, **OURS)
    assert drafter.running == 0
    assert_equal(*both(llama, PROMPTS, drafter))


@pytest.mark.parametrize(
    "adapter",
    [
        PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[PROMPTS[0][4]], task_type="CAUSAL_LM"),
        LoraConfig(target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"], task_type="CAUSAL_LM"),
    ],
    ids=["prompt", "p-tuning", "prefix", "alora", "lora"],
)
def test_what_an_adapter_adds_to_the_text_of_a_call_is_not_lost(tiny_model, adapter, caplog):
    base = copy.deepcopy(tiny_model("llama"))
    asked = {**padded(PROMPTS[:1], "cpu"), "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    before = base.generate(**asked, **OURS)  # what is kept of it does not count below
    torch.manual_seed(0)
    wrapped = get_peft_model(base, copy.deepcopy(adapter)).eval()
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.5)
    expected = wrapped.generate(**asked)
    assert expected.tolist() != before.tolist()
    assert wrapped.generate(**asked, **OURS).tolist() == expected.tolist()
    adds = not isinstance(adapter, LoraConfig) or adapter.alora_invocation_tokens
    assert ("decoded without drafts" in caplog.text) == bool(adds)
