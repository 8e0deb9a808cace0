"""Tiny models of many architectures, with random weights, and a table of how each is decoded.

python -m tests.architectures [--write FILE.md] [NAME ...] decodes with every kind of draft, at several batch sizes and sizes of
prefill, and compares each row with what `model.generate` says in float32. It exits with 1 if any token differs.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lookahead.decode.engine import DecodingEngine, Generation
from lookahead.forward.target import TargetModel
from lookahead.models.probe import probed
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from tests.support.drafts import DRAFTS, VOCAB_SIZE, drafter_of

SETTINGS = ((1, 512), (3, 6), (8, 6), (8, 512))  # slots; maximum prompt tokens per step
NEW_TOKENS = 24
LENGTHS = (1, 9, 20, 3, 30, 14, 5, 2)  # of prompts: with and without room in windows of 8, and more than slots
SAYS_ENOUGH = 8  # different tokens: a model that says always the same proves nothing

MODES = {  # how the probe finds that these verify, the ones of the suite; python -m tests.architectures knows more
    "llama": "packed",
    "llama4": "packed",  # chunks, and queries that are scaled by their position
    "mistral": "packed",  # a window
    "mixtral": "packed",
    "qwen3": "packed",
    "afmoe": "packed",  # takes views of what attention gives
    "gemma2": "packed",  # eager attention with a soft-cap
    "gemma3": "packed",
    "gemma4": "packed",  # layers that share keys, heads of two sizes
    "gpt2": "packed",
    "gpt_neox": "packed",
    "gpt_oss": "packed",  # sinks
    "deepseek_v3": "packed",  # values narrower than keys
    "phi3_longrope": "packed",  # rows beyond 40 tokens are left to generate
    "gptj": "tree",
    "gpt_neo": "chain",
    "mpt": "chain",
    "qwen3_next": "replay",
    "bamba": "replay",
    "mamba": "plain",
}

WINDOW = 8  # tokens; windows and chunks are shorter than the texts of the tests
MHA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GQA = {**MHA, "num_key_value_heads": 2}
HEAD = {**GQA, "head_dim": 8}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {**MHA, "num_key_value_heads": 4, **LATENT, **EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 |= {"mamba_chunk_size": 8, "chunk_size": 8, "shared_intermediate_size": 32}
DELTA = {f"linear_{part}": size for part, size in [("num_key_heads", 2), ("num_value_heads", 4)]}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
TUNED = {"no_rope_layers": [1, 0, 1], "floor_scale": 4, "attn_scale": 0.1}
SHARED = {"num_kv_shared_layers": 1, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
ALTUP = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 3}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
LONGROPE |= {"original_max_position_embeddings": 40}

# Not here: recurrent_gemma, whose `generate` says after a prompt of one token what hangs on the texts before.
# What sets each apart from its class's defaults. "model_type": of the config, where it is not the name.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GQA,
    "arcee": GQA,
    "afmoe": {**HEAD, **SLIDING, **EXPERTS},
    "laguna": {**HEAD, **SLIDING, **EXPERTS},
    "mimo_v2_flash": {**HEAD, **SLIDING, **EXPERTS},
    "minimax_m2": {**HEAD, **EXPERTS},
    "jetmoe": {**HEAD, **EXPERTS, "kv_channels": 8},
    "llama4": {
        "model_type": "llama4_text",
        **HEAD,
        **EXPERTS,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": WINDOW,
        **TUNED,
    },
    "mistral": {**GQA, "sliding_window": WINDOW},
    "ministral": {**HEAD, **SLIDING},
    "ministral3": {**HEAD, "sliding_window": WINDOW},
    "mixtral": {**GQA, **EXPERTS},
    "qwen2": GQA,
    "qwen2_window": {"model_type": "qwen2", **GQA, **SLIDING, "use_sliding_window": True},
    "qwen2_moe": {**GQA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, **EXPERTS},
    "qwen3_next": {**HEAD, **EXPERTS, **DELTA, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5": {"model_type": "qwen3_5_text", **HEAD, **DELTA, "num_hidden_layers": 4},
    "gemma": HEAD,
    "gemma2": {**HEAD, "sliding_window": WINDOW},
    "gemma3": {"model_type": "gemma3_text", **HEAD, **SLIDING},
    "gemma3n": {"model_type": "gemma3n_text", **HEAD, **SLIDING, **SHARED, **ALTUP, "intermediate_size": [64] * 3},
    "gemma4": {"model_type": "gemma4_text", **HEAD, **SLIDING, **SHARED, "global_head_dim": 16},
    "vaultgemma": {**HEAD, "sliding_window": WINDOW},
    "phi": GQA,
    "phi3": GQA,
    "phi3_longrope": {"model_type": "phi3", **GQA, "original_max_position_embeddings": 40, "rope_parameters": LONGROPE},
    "phimoe": {**GQA, **EXPERTS},
    "gpt2": GPT2,
    "gpt2_short": {"model_type": "gpt2", **GPT2, "n_positions": 32},
    "gpt_neo": {**MHA, "attention_types": [[["global", "local", "global"], 1]], "window_size": WINDOW},
    "gpt_neox": MHA,
    "gptj": {**GPT2, "rotary_dim": 4},
    "codegen": {**GPT2, "rotary_dim": 4},
    "gpt_bigcode": GPT2,
    "opt": {**MHA, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {**MHA},
    "falcon_alibi": {"model_type": "falcon", **MHA, "alibi": True},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "starcoder2": {**GQA, "sliding_window": WINDOW},
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": {**HEAD, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "cohere": GQA,
    "cohere2": {**GQA, **SLIDING},
    "olmo": GQA,
    "olmo2": GQA,
    "olmo3": {**GQA, **SLIDING},
    "olmoe": {**GQA, **EXPERTS},
    "deepseek_v2": {**DEEPSEEK, "first_k_dense_replace": 1},
    "deepseek_v3": {**DEEPSEEK, "first_k_dense_replace": 1},
    "deepseek_v32": {**DEEPSEEK, "index_topk": 40, "index_n_heads": 4, "index_head_dim": 16, "first_k_dense_replace": 1},
    "minicpm3": DEEPSEEK,
    "gpt_oss": {**HEAD, **SLIDING, **EXPERTS},
    "granite": GQA,
    "granitemoe": {**GQA, **EXPERTS},
    "granitemoehybrid": {**GQA, **EXPERTS, **MAMBA2, "layer_types": ["mamba", "attention", "mamba"]},
    "stablelm": GQA,
    "nemotron": HEAD,
    "ernie4_5": HEAD,
    "ernie4_5_moe": {**HEAD, **EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "smollm3": {**GQA, "no_rope_layer_interval": 2},
    "exaone4": {**GQA, **SLIDING},
    "exaone_moe": {**HEAD, **SLIDING, **EXPERTS},
    "seed_oss": HEAD,
    "hunyuan_v1_dense": HEAD,
    "apertus": GQA,
    "helium": HEAD,
    "minimax": {**HEAD, **EXPERTS, "layer_types": ["full_attention", "linear_attention", "full_attention"], "block_size": 4},
    "lfm2": {**GQA, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "persimmon": MHA,
    "xglm": {"d_model": 32, "ffn_dim": 64, "num_layers": 3, "attention_heads": 4, "max_position_embeddings": 256},
    "biogpt": MHA,
    "bamba": {**GQA, **MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**GQA, **MAMBA2, "mamba_d_ssm": 64},
    "zamba2": {**MHA, **MAMBA2, "n_mamba_heads": 8, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "jamba": {**GQA, **EXPERTS, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "intermediate_size": 64},
}


def tiny_config(architecture: str) -> Any:
    """A config of a few thousand weights, float32, ids below VOCAB_SIZE, 2 as end of sequence."""
    from transformers import AutoConfig

    ids = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    settings = copy.deepcopy(CONFIGS[architecture])  # some change lists that they are given
    return AutoConfig.for_model(**{"model_type": architecture, **ids, **settings})


@functools.cache
def tiny_model(architecture: str, device: str = "cpu") -> Any:
    """A model with random weights, the same in each run; made once."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture)).float().eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.data.mul_(4)  # else random models say one token for ever
    return model.to(device)


def random_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """One of each length, and the last one again with another end."""
    prompts = [np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    longest = max(prompts, key=len)
    return [*prompts, [*longest[: len(longest) // 2], 5, 6]]


def plainly(model: Any, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """What `generate` says after `prompt`."""
    text = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(text)
    output = model.generate(text, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


def plain_answers(
    architecture: str, prompts: Sequence[Sequence[int]], device: str = "cpu"
) -> list[tuple[Sequence[int], list[int]]]:
    """(prompt, what `generate` says after it) of a tiny model as it was made; asked once."""
    return [(prompt, list(_plain_answer(architecture, tuple(prompt), device))) for prompt in prompts]


@functools.cache
def _plain_answer(architecture: str, prompt: tuple[int, ...], device: str) -> tuple[int, ...]:
    return tuple(plainly(tiny_model(architecture, device), prompt))


def decoded(engine: DecodingEngine, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[Generation]:
    """Decode all prompts at once, as many as the engine has slots."""
    generations = [engine.request(prompt, new_tokens) for prompt in prompts]
    assert Counter(map(id, engine.run(generations))) == Counter(map(id, generations))
    return generations


@dataclasses.dataclass
class Checked:
    """What came of one architecture. said: different tokens in the answers. wrong: where rows differed."""

    name: str
    target: TargetModel
    said: int
    rows: int = 0
    wrong: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not self.wrong and self.said >= SAYS_ENOUGH

    @property
    def cells(self) -> list[str]:
        remark = f"DIFFERS: {dict(self.wrong)}" if self.wrong else self.target.reason.split("; no ")[0]
        if self.said < SAYS_ENOUGH:
            remark = f"SAYS ONLY {self.said} TOKENS"
        identical = self.rows - sum(self.wrong.values())
        return [self.name, self.target.mode, attention_of(self.target), str(self.rows), str(identical), remark]


COLUMNS = ["architecture", "verifies", "attention", "rows", "identical", "why not packed"]


def attention_of(target: TargetModel) -> str:
    own = str(target.text_config._attn_implementation)
    if target.program is not None:
        return "program"
    if target.attends_by_op:  # lookahead::tree_attention
        return "op"
    return target.packed_attention.base if target.mode == "packed" else own


def checked(name: str) -> Checked:
    """Decode in all ways, by a model that is laid out, and compare with `generate` of one that is not."""
    from lookahead.backends.cpu.linear import lay_out

    stock = tiny_model(name)
    target = probed(lay_out(copy.deepcopy(stock)), name)
    prompts = [prompt for prompt in random_prompts() if len(prompt) + NEW_TOKENS <= target.longest_text]
    answers = [(prompt, plainly(stock, prompt)) for prompt in prompts]
    result = Checked(name, target, said=len({token for _, answer in answers for token in answer}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.trie"
        whole = [TokenDocument([*prompt, *answer], "answers") for prompt, answer in answers]
        build_trie(whole, path, TokenizerIdentity(VOCAB_SIZE, "0123456789abcdef", "tiny"))
        for draft, (batch_size, prefill_chunk) in itertools.product(DRAFTS, SETTINGS):
            engine = DecodingEngine(target, drafter_of(draft, answers, Trie(path)), batch_size, prefill_chunk)
            for generation, (_, answer) in zip(decoded(engine, prompts), answers, strict=True):
                result.rows += 1
                if generation.token_ids != answer:
                    result.wrong[f"{draft} x{batch_size}, {prefill_chunk}"] += 1
    return result


def main() -> int:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from transformers.utils import logging

    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all {len(CONFIGS)}")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as Markdown too")
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = options.names or list(CONFIGS)
    table = Table(*COLUMNS)
    results = []
    for name in track(names, "decoding", console=Console(stderr=True), transient=True):
        results.append(checked(name))
        table.add_row(*results[-1].cells, style="" if results[-1].good else "red")
    Console().print(table)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(markdown(results), encoding="utf-8")
    return 0 if all(result.good for result in results) else 1


def markdown(results: Sequence[Checked]) -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS), *([cell.replace("|", "/") for cell in result.cells] for result in results)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    modes = ", ".join(f"{count} {mode}" for mode, count in Counter(result.target.mode for result in results).items())
    return f"""# Architectures

Made by `python -m tests.architectures --write docs/architectures.md`: tiny models with random weights, float32 on a CPU.
Each row is one answer of up to {NEW_TOKENS} tokens, to be identical to that of `model.generate`, for every draft of
{", ".join(DRAFTS)} and every pair of (slots, maximum prompt tokens per step) of {", ".join(map(str, SETTINGS))}.

{len(results)} architectures: {modes}. Attention by `program`: the whole forward is one native call; by `op`: of
`lookahead::tree_attention`, the model's own modules around it; else the model's own function.

{table}
"""


if __name__ == "__main__":
    raise SystemExit(main())
