"""GRPO rollouts of TRL: the samples of plain `generate`. Where TRL is installed; docs/rollouts.md has the recipe."""

import functools
import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead import Drafter, lookahead_generate
from tests.support.jobs import MODEL, PROMPTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")


def trained(folder, drafter: Drafter | None) -> tuple[list[str], list[torch.Tensor]]:
    """The samples of two epochs over two prompts, and the weights after them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    samples: list[str] = []

    def different_words(completions, **_):
        samples.extend(completions)
        return [float(len(set(text.split()))) for text in completions]

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    if drafter:
        model.generate = functools.partial(model.generate, custom_generate=lookahead_generate, drafter=drafter)
    lengths = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 12, "num_train_epochs": 2}
    quiet = {"use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    config = GRPOConfig(output_dir=str(folder), temperature=0.8, learning_rate=1e-3, **lengths, **quiet)
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    prompts = Dataset.from_dict({"prompt": PROMPTS[:2]})
    GRPOTrainer(model, different_words, args=config, train_dataset=prompts, processing_class=tokenizer).train()
    return samples, [parameter.detach() for parameter in model.parameters()]


def test_grpo_with_drafts_trains_on_the_samples_of_plain_generate_to_the_same_weights(tmp_path):
    (plain, weights), (drafted, others) = trained(tmp_path, None), trained(tmp_path, Drafter())
    assert len(plain) == 8
    assert drafted == plain
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
