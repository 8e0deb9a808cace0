"""Shared fixtures: tries from token ids, tiny models with random weights, a tiny tokenizer, the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead.trie.build import TokenDocument, TokenizerIdentity, build_trie
from lookahead.trie.file import Trie

torch.set_num_threads(1)

VOCAB_SIZE = 97  # of the tiny models


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return request.param


@pytest.fixture
def make_trie(tmp_path: Path) -> Callable[..., Trie]:
    """make_trie(documents, vocab_size=10, name="corpus.trie", sources="a") -> Trie; one source each, or one for all."""

    def make(
        documents: Sequence[Sequence[int]],
        vocab_size: int = 10,
        name: str = "corpus.trie",
        sources: Sequence[str] | str = "a",
        **options: Any,
    ) -> Trie:
        of_each = [sources] * len(documents) if isinstance(sources, str) else sources
        rows = [TokenDocument(ids, source) for ids, source in zip(documents, of_each, strict=True)]
        build_trie(rows, tmp_path / name, TokenizerIdentity(vocab_size, "0123456789abcdef", "tiny"), **options)
        return Trie(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved byte-level BPE tokenizer with an end-of-sequence token and a chat template that refuses system turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    from lookahead.tokenizer import load_tokenizer

    return load_tokenizer(str(tokenizer_folder))


def tiny_config(architecture: str) -> Any:
    """A config of a few thousand weights, float32, ids below VOCAB_SIZE, 2 as end of sequence."""
    import transformers

    ids = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    gpt_neox = {
        **ids,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    llama = {**gpt_neox, "num_key_value_heads": 2}
    match architecture:
        case "llama":
            return transformers.LlamaConfig(**llama)
        case "qwen3":
            return transformers.Qwen3Config(**llama, head_dim=8)
        case "mistral":
            return transformers.MistralConfig(**llama, sliding_window=8)
        case "gemma3":
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            return transformers.Gemma3TextConfig(**llama, head_dim=8, sliding_window=8, layer_types=kinds)
        case "gpt2":
            return transformers.GPT2Config(**ids, n_embd=32, n_layer=3, n_head=4, n_positions=256)
        case "gpt2_short":
            return transformers.GPT2Config(**ids, n_embd=32, n_layer=3, n_head=4, n_positions=32)
        case "gpt_neox":
            return transformers.GPTNeoXConfig(**gpt_neox)
        case "mixtral":
            return transformers.MixtralConfig(**llama, num_local_experts=4)
        case "deepseek_v3":
            experts = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
            latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
            rest = {"num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
            return transformers.DeepseekV3Config(**{**llama, **experts, **latent, **rest})
        case "gpt_neo":
            kinds = [[["global", "local"], 1]]
            sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256}
            return transformers.GPTNeoConfig(**ids, **sizes, attention_types=kinds, window_size=8)
        case "mpt":
            return transformers.MptConfig(**ids, d_model=32, n_heads=4, n_layers=2, max_seq_len=256)
        case "mamba":
            return transformers.MambaConfig(**ids, hidden_size=32, num_hidden_layers=2, state_size=4)
    raise ValueError(architecture)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """tiny_model(architecture, device="cpu") -> a model with random weights, the same in each run; made once."""

    @functools.cache
    def make(architecture: str, device: str = "cpu") -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(architecture)).float().eval()
        for weights in model.parameters():
            if weights.ndim > 1:
                weights.data.mul_(4)  # else random models say one token for ever
        return model.to(device)

    return make
