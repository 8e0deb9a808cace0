"""Random generation configs and params, decoded by the engine and by `model.generate`, which is the truth.

A case is made of its number alone. The truth knows nothing of lookahead: the config is the model's own, what is asked for are
arguments of `generate`, after `torch.manual_seed`. Fields that are not used are set for the engine only.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import random
import warnings
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig

from lookahead.decode.chooser import check_generation_config
from lookahead.decode.engine import DecodingEngine
from lookahead.decode.generation_config import FIELDS
from lookahead.decode.sampling import Sampling
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.errors import ModelError
from lookahead.models.probe import probed
from tests.architectures import random_prompts, tiny_model
from tests.support.drafts import VOCAB_SIZE, KnownAnswer, always_wrong, perfect, random_trees

ARCHITECTURES = {
    "llama": "packed",
    "gemma3": "packed",
    "gptj": "tree",
    "gpt_neo": "chain",
    "qwen3_next": "replay",
    "mamba": "plain",
}
DRAFTS = ("none", "random", "perfect", "wrong", "own")
PROMPTS = random_prompts((1, 4, 9, 13, 20))
BATCHES = (1, 4)
NEW_TOKENS = 12
END = 2  # of the tiny models
UNLIMITED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
NOT_USED = {
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "token_healing": True,
    "max_time": 1e-9,
    "prompt_lookup_num_tokens": 3,
    "num_return_sequences": 3,
    "cache_implementation": "quantized",
    "is_assistant": True,
    "future_field": 7,
    "max_length": 3,
}


class Wandering(LogitsProcessor):
    """A user's processor that keeps state about a text: favours tokens by how often it was asked and what it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(input_ids[0, -1]))
        favour = torch.zeros_like(scores)
        favour[:, (sum(self.seen) * 7 + len(self.seen)) % VOCAB_SIZE] = 6.0
        return scores + favour


class Counted(LogitsProcessor):
    """Frequency and presence penalty, the long way."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        answer = input_ids[0, self.prompt_length :].tolist()
        for token in set(answer):
            scores[0, token] -= self.frequency * answer.count(token) + self.presence
        return scores


@dataclasses.dataclass
class Case:
    """own: the model's generation config. asked: of all rows. beside: fields that are not used. rows: prompts."""

    number: int
    architecture: str
    draft: str
    own: dict[str, Any]
    asked: dict[str, Any]
    beside: dict[str, Any]
    rows: list[list[int]]
    prefill_chunk: int


@functools.cache
def target_of(architecture: str) -> Any:
    return probed(tiny_model(architecture), architecture)


@functools.cache
def tokenizer() -> Any:
    """Ids from 1 are characters, 0 is the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, **{c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


def stop_texts(draw: random.Random, count: int) -> list[str]:
    """Letters, of no special token and of no part of a character: `generate` searches for stop texts in names of tokens."""
    letters = (tokenizer().decode([token]) for token in range(3, VOCAB_SIZE))
    return draw.sample([letter for letter in letters if letter not in "<eos>\ufffd"], count)


def case(number: int) -> Case:
    draw = random.Random(number)
    architecture = list(ARCHITECTURES)[number % len(ARCHITECTURES)]
    rows = draw.sample(PROMPTS, BATCHES[number // len(ARCHITECTURES) % len(BATCHES)])
    draft, own, asked = draw.choice(DRAFTS), own_config(draw), asked_of_rows(draw)
    beside = {name: NOT_USED[name] for name in draw.sample(sorted(NOT_USED), draw.choice((0, 0, 1, 2)))}
    return Case(number, architecture, draft, own, asked, beside, rows, draw.choice((6, 512)))


def own_config(draw: random.Random) -> dict[str, Any]:
    """Of every field that is honoured or about sampling, some."""
    watermarks = (
        WatermarkingConfig(bias=4.0),
        WatermarkingConfig(bias=3.0, seeding_scheme="selfhash"),
        SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 17, 31], sampling_table_size=256, context_history_size=8),
    )
    fields = {
        "eos_token_id": lambda: draw.choice([None, END, [END, *tokens(draw, 2)], tokens(draw, 20)]),
        "stop_strings": lambda: draw.choice([stop_texts(draw, 1)[0], stop_texts(draw, 2)]),
        "min_length": lambda: draw.randrange(1, 30),
        "min_new_tokens": lambda: draw.randrange(0, NEW_TOKENS + 2),
        "forced_bos_token_id": lambda: draw.randrange(VOCAB_SIZE),
        "forced_eos_token_id": lambda: draw.choice([END, [5, 6]]),
        "repetition_penalty": lambda: draw.choice([0.8, 1.2, 2.5]),
        "encoder_repetition_penalty": lambda: draw.choice([0.7, 1.5]),
        "no_repeat_ngram_size": lambda: draw.choice([0, 1, 2, 3]),
        "encoder_no_repeat_ngram_size": lambda: draw.choice([0, 1, 2]),
        "bad_words_ids": lambda: [tokens(draw, draw.choice((1, 1, 2))) for _ in range(20)],
        "suppress_tokens": lambda: tokens(draw, 30),
        "begin_suppress_tokens": lambda: tokens(draw, 60),
        "sequence_bias": lambda: draw.choice(
            [[[tokens(draw, 2), 5.0], [tokens(draw, 1), -3.0]], {tuple(tokens(draw, 1)): 4.0}]
        ),
        "guidance_scale": lambda: draw.choice([1.0, 1.5]),
        "exponential_decay_length_penalty": lambda: (draw.randrange(1, 6), 1.3),
        "remove_invalid_values": lambda: True,
        "renormalize_logits": lambda: True,
        "watermarking_config": lambda: draw.choice(watermarks),
        "temperature": lambda: draw.choice([0.5, 1.0, 1.7]),
        "top_k": lambda: draw.choice([0, 3, 20, 200]),
        "top_p": lambda: draw.choice([0.5, 0.9, 1.0]),
        "min_p": lambda: draw.choice([0.02, 0.3]),
        "top_h": lambda: draw.choice([0.4, 0.9]),
        "typical_p": lambda: draw.choice([0.6, 0.95]),
        "epsilon_cutoff": lambda: draw.choice([0.0, 0.01]),
        "eta_cutoff": lambda: draw.choice([0.0, 0.02]),
    }
    assert fields.keys() | {"do_sample"} == {name for name, field in FIELDS.items() if field.use in ("honoured", "sampling")}
    share = draw.choice((0.05, 0.15, 0.35))
    own = {name: value() for name, value in fields.items() if draw.random() < share}
    own.setdefault("eos_token_id", draw.choice([END, END, None]))
    if "exponential_decay_length_penalty" in own and own["eos_token_id"] is None:
        own["eos_token_id"] = END  # it makes no sense without
    own["do_sample"] = draw.choice([None, False, True, True])
    return own


def asked_of_rows(draw: random.Random) -> dict[str, Any]:
    """Fields of `Sampling`."""
    fields = {
        "temperature": lambda: draw.choice([0, 0.6, 1.0, 2]),
        "top_k": lambda: draw.choice([0, 2, 30]),
        "top_p": lambda: draw.choice([0.4, 0.95, 1.0]),
        "min_p": lambda: draw.choice([0.0, 0.05]),
        "typical_p": lambda: draw.choice([0.7, 1.0]),
        "repetition_penalty": lambda: draw.choice([1.0, 1.3, 2]),
        "frequency_penalty": lambda: draw.choice([0.5, 2.0, -1.0]),
        "presence_penalty": lambda: draw.choice([1.0, 3.0]),
        "no_repeat_ngram_size": lambda: draw.choice([0, 1, 2]),
        "min_new_tokens": lambda: draw.randrange(0, NEW_TOKENS + 2),
        "bad_words_ids": lambda: [tokens(draw, draw.choice((1, 2))) for _ in range(15)],
        "logit_bias": lambda: dict.fromkeys(tokens(draw, 5), draw.choice([3.0, -4.0])),
        "stop": lambda: stop_texts(draw, 3),
        "stop_token_ids": lambda: tokens(draw, 10),
        "processors": lambda: [Wandering()],
    }
    share = draw.choice((0.0, 0.1, 0.3))
    asked = {name: value() for name, value in fields.items() if draw.random() < share}
    if draw.random() < 0.3:
        asked.setdefault("temperature", 0.9)
    asked["sampling"] = draw.choice(["greedy", "model"])
    return asked


# ---- what `generate` is asked for
def arguments(found: Case, prompt_length: int) -> dict[str, Any]:
    """Of `model.generate`, as a user would write them for what the case asks."""
    asked, own = found.asked, found.own
    wishes: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    if asked["sampling"] == "greedy":
        wishes["do_sample"] = bool(asked.get("temperature"))
        wishes |= UNLIMITED if wishes["do_sample"] else {}
    elif "temperature" in asked:
        wishes["do_sample"] = bool(asked["temperature"])
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    for name in (*names, "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "bad_words_ids"):
        if name in asked and (name != "temperature" or asked[name]):
            wishes[name] = float(asked[name]) if name in ("temperature", "repetition_penalty") else asked[name]
    if "logit_bias" in asked:
        bias = own.get("sequence_bias") or {}
        bias = {tuple(ids): value for ids, value in bias} if isinstance(bias, list) else bias
        wishes["sequence_bias"] = {**bias, **{(token,): value for token, value in asked["logit_bias"].items()}}
    if "stop_token_ids" in asked:
        ends = own["eos_token_id"]
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        wishes["eos_token_id"] = [*ends, *asked["stop_token_ids"]]
    if "stop" in asked:
        wishes["stop_strings"] = asked["stop"]
    own_processors = list(copy.deepcopy(asked.get("processors", [])))
    if "frequency_penalty" in asked or "presence_penalty" in asked:
        own_processors.append(Counted(prompt_length, asked.get("frequency_penalty", 0), asked.get("presence_penalty", 0)))
    return {**wishes, "logits_processor": own_processors}


@contextlib.contextmanager
def configured(model: Any, fields: dict[str, Any]) -> Any:
    """The model with this generation config."""
    before = model.generation_config
    own = GenerationConfig()
    for name, value in fields.items():
        setattr(own, name, copy.deepcopy(value))
    model.generation_config = own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("transformers").setLevel(logging.ERROR)
            yield
    finally:
        model.generation_config = before


def expected_rows(found: Case) -> list[Any]:
    """Row by row: as many ids as were emitted, or "fails", as some configs make no sense."""
    model, rows = target_of(found.architecture).model, list[Any]()
    drop = ("top_h",) if found.asked["sampling"] == "greedy" else ()  # it cannot be switched off by an argument
    with configured(model, {name: value for name, value in found.own.items() if name not in drop}):
        for number, prompt in enumerate(found.rows):
            torch.manual_seed(found.number * 1000 + number)
            text, wishes = torch.tensor([prompt]), arguments(found, len(prompt))
            try:
                output = model.generate(text, attention_mask=torch.ones_like(text), tokenizer=tokenizer(), **wishes)
                rows.append(output[0, len(prompt) :].tolist())
            except Exception:
                rows.append("fails")
    return rows


def rows_of_engine(found: Case, expected: list[Any]) -> list[Any]:
    """The same by our engine."""
    target = dataclasses.replace(target_of(found.architecture))  # a fresh one: ids of the end are read once
    with configured(target.model, {**found.own, **found.beside}):
        engine = DecodingEngine(target, drafter(found, expected), len(found.rows), found.prefill_chunk, tokenizer())
        sampling = Sampling(**found.asked)
        try:
            check_generation_config(target, tokenizer(), Sampling(sampling=sampling.sampling))
        except ModelError:
            return ["fails"] * len(found.rows)
        for _ in range(2 if found.draft == "own" else 1):  # the second time the drafter knows the answers
            requests = [engine.request(ids, NEW_TOKENS, sampling, found.number * 1000 + n) for n, ids in enumerate(found.rows)]
            list(engine.run(requests))
    return ["fails" if request.error else request.token_ids for request in requests]


def drafter(found: Case, expected: list[Any]) -> Any:
    if found.draft == "own":
        return Drafter([], DraftOptions(decoding_length=16, adaptive=False))
    if found.draft == "none":
        return Drafter([], DraftOptions("off"))
    proposals = {"random": random_trees(found.number), "perfect": perfect, "wrong": always_wrong}
    answers = [(prompt, [] if row == "fails" else row) for prompt, row in zip(found.rows, expected, strict=True)]
    return KnownAnswer(answers, proposals[found.draft])


def difference(found: Case) -> str:
    """What differs, in one line; "" if nothing does."""
    plain = expected_rows(found)
    ours = rows_of_engine(found, plain)
    return "" if plain == ours else f"{found}: by generate {plain}, here {ours}"
