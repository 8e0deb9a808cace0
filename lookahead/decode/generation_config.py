"""Applies a model's generation config, field by field. In: the config, and what a request asks for. Out: the config to
decode with, and one line for what is not used.

`FIELDS` has every field that transformers 5.0 to 5.23 knows. Each is honoured as `model.generate` honours it, or another option
replaces it, or it belongs to a way of decoding that is not done here, which is reported, or it has no effect on the tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from lookahead.decode.sampling import Sampling
from lookahead.errors import UsageError
from lookahead.forward.target import TargetModel

GENERATING = threading.RLock()  # held while a model decodes by its own `generate`, which uses random state of the process
Use = Literal["honoured", "sampling", "length", "not used", "no effect"]


@dataclasses.dataclass(frozen=True)
class Field:
    """use: honoured   by the logits processors and stopping criteria of transformers
         sampling   how tokens are drawn: used where the job samples with the model's own settings
         length     of answers: the job's own options replace it
         not used   another way of decoding; reset, and reported with `why`
         no effect  on the tokens of greedy decoding and sampling

    off: values that ask for nothing, in addition to None.
    """

    use: Use
    why: str = ""
    off: tuple[Any, ...] = ()


_HONOURED, _SAMPLING, _LENGTH, _NO_EFFECT = Field("honoured"), Field("sampling"), Field("length"), Field("no effect")
_BEAMS = Field("not used", "there is no beam search", off=(1,))
_FORCED = Field("not used", "there is no constrained beam search (see --regex, --grammar)")
_CACHE = Field("not used", "lookahead keeps its own cache", off=("dynamic", "static", "hybrid", "sliding_window"))
_ASSISTED = Field("not used", "drafts come from tries", off=(False, 0))

FIELDS: dict[str, Field] = {
    **dict.fromkeys(
        (
            *("eos_token_id", "stop_strings", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"),
            *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
            *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "guidance_scale"),
            *("exponential_decay_length_penalty", "remove_invalid_values", "renormalize_logits", "watermarking_config"),
        ),
        _HONOURED,
    ),
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), _SAMPLING
    ),
    **dict.fromkeys(("max_length", "max_new_tokens"), _LENGTH),
    "num_return_sequences": Field("not used", "--samples counts", off=(1,)),
    "num_beams": _BEAMS,
    "num_beam_groups": _BEAMS,
    "constraints": _FORCED,
    "force_words_ids": _FORCED,
    "penalty_alpha": Field("not used", "there is no contrastive search", off=(0,)),
    "dola_layers": Field("not used", "there is no DoLa decoding"),
    "token_healing": Field("not used", "prompts are taken as they are", off=(False,)),
    "max_time": Field("not used", "answers are not cut by time"),
    "use_mtp": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "is_assistant": _ASSISTED,
    "cache_implementation": _CACHE,
    **dict.fromkeys(
        (
            # of beam search and contrastive search alone
            *("early_stopping", "length_penalty", "diversity_penalty", "low_memory"),
            # of an assistant model, which is never given
            *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
            "max_matching_ngram_size",
            # how forwards are run and what is returned
            *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile"),
            *("continuous_batching_config", "return_dict_in_generate", "return_legacy_cache"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
            # padding, and the first token of encoder-decoder models or of no prompt
            *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
            # about the file
            *("transformers_version", "_from_model_config", "_commit_hash"),
        ),
        _NO_EFFECT,
    ),
}
RESET = (  # before decoding: what is not used, and what is set for each call
    *(name for name, field in FIELDS.items() if field.use == "not used"),
    *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
)
OF_SAMPLING = ("top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
OF_GENERATE = {"top_k": 50, "top_p": 1.0, "typical_p": 1.0}  # its defaults where the config leaves them open
WITHOUT = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0}  # leaves all tokens to be drawn


def generation_config(target: TargetModel, asked: Sampling, prompt_length: int, room: int, bad_words: Any = ()) -> Any:
    """The model's own generation config with what a request asks for instead, as `generate` prepares it.

    bad_words: sequences of ids that are not emitted, in addition to those of `asked`. stop_strings stay with who has the
    tokenizer.
    """
    config = copy.deepcopy(target.model.generation_config)
    for name in RESET:
        if hasattr(config, name):
            setattr(config, name, None)
    config.stop_strings = None
    config.use_cache = config.use_cache is not False  # guidance asks for it
    for name, value in how_to_draw(config, asked).items():
        setattr(config, name, value)
    config.max_new_tokens, config.max_length = room, prompt_length + room
    for name, kind in (("repetition_penalty", float), ("no_repeat_ngram_size", int), ("min_new_tokens", int)):
        if getattr(asked, name) is not None:
            setattr(config, name, kind(getattr(asked, name)))
    if config.min_new_tokens is not None:
        config.min_length = prompt_length + config.min_new_tokens
    if asked.bad_words_ids or bad_words:
        config.bad_words_ids = [list(words) for words in (*asked.bad_words_ids, *bad_words)]
    if asked.logit_bias:
        bias = config.sequence_bias or {}
        bias = {tuple(ids): value for ids, value in bias} if isinstance(bias, list) else bias  # as JSON has it
        config.sequence_bias = {**bias, **{(token,): float(added) for token, added in asked.logit_bias.items()}}
    config.eos_token_id = sorted(target.eos_token_ids.union(asked.stop_token_ids)) or None
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(config.eos_token_id or ()), 0)
    return config


def how_to_draw(own: Any, asked: Sampling) -> dict[str, Any]:
    """do_sample and what goes with it: as asked, else the model's own with sampling "model", else greedy and nothing."""
    of_model = asked.sampling == "model"
    temperature = asked.temperature
    if temperature is None:
        temperature = 0.0
        if of_model and own.do_sample:
            temperature = 1.0 if own.temperature is None else own.temperature
    if not temperature:
        return {"do_sample": False}
    draws: dict[str, Any] = {"do_sample": True, "temperature": float(temperature)}
    for name in OF_SAMPLING:
        value = getattr(asked, name, None)
        if value is None and of_model:
            value = getattr(own, name, None)
        draws[name] = (OF_GENERATE if of_model else WITHOUT).get(name) if value is None else value
    draws["min_p"] = draws["min_p"] or None
    return draws


def own_stop_strings(target: TargetModel) -> tuple[str, ...]:
    """Texts that end an answer by the model's generation config."""
    texts = getattr(getattr(target.model, "generation_config", None), "stop_strings", None) or ()
    return (texts,) if isinstance(texts, str) else tuple(texts)


def not_used(target: TargetModel, asked: Sampling) -> str:
    """One line on what the model's generation config asks for and these answers are not decoded with; "" if there is nothing.

    asked: what the rows ask for that set nothing of their own.
    """
    own = getattr(target.model, "generation_config", None)
    if own is None:
        return ""
    found = [_sampling_not_used(own, asked)]
    for name, value in vars(own).items():
        field = FIELDS.get(name)
        if value is None or (name.startswith("_") and field is None):
            continue
        if field is None:
            found.append(f"{name} {value!r:.60} is unknown here and not used")
        elif field.use == "not used" and value not in field.off:
            found.append(f"{name} {value!r:.60} is not used: {field.why}")
    of_model = getattr(target.text_config, "eos_token_id", None)  # some classes, such as CpmAntConfig, have none
    if own.eos_token_id is None and of_model is not None:
        found.append(f"it has no eos_token_id, so answers do not end at the {of_model} of config.json (see --stop-token-ids)")
    if "generate" in vars(target.model):
        found.append("the model brings a generate of its own, which is not used")
    listed = "; ".join(filter(None, found))
    return f"{target.name}: of its generation config: {listed}" if listed else ""


def _sampling_not_used(own: Any, asked: Sampling) -> str:
    """Describe which of the model's own sampling settings are not used."""
    draws = how_to_draw(own, asked)
    names = ("temperature", *OF_SAMPLING)
    settings = {name: value for name in names if (value := getattr(own, name, None)) not in (None, WITHOUT.get(name))}
    if own.do_sample and not draws["do_sample"]:
        listed = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        its = f" ({listed})" if listed else ""
        return f'it samples{its}, these answers are greedy: --sampling model (in Python sampling="model") uses its settings'
    if not draws["do_sample"]:
        return ""
    given_way = [f"{name} {value:g}" for name, value in settings.items() if name in OF_SAMPLING and draws[name] != value]
    if not given_way or asked.sampling == "model":  # then it was asked for
        return ""
    return f'{", ".join(given_way)} not used: --sampling model (in Python sampling="model") uses it'


def generate_alone(target: TargetModel, config: Any, **arguments: Any) -> Any:
    """`model.generate` with this config and nothing of the model's own, which would fill in what is None. Nothing is logged."""
    model = target.model
    before = model.generation_config
    model.generation_config = config
    try:
        with quiet_generation(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"transformers\.")
            return type(model).generate(model, generation_config=config, **arguments)
    finally:
        model.generation_config = before


@contextlib.contextmanager
def quiet_generation() -> Iterator[None]:
    """No log lines of transformers about generation configs, errors aside: what is not used is reported once, at load.

    A level instead would apply to each logger that there is, twice a request.
    """

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    handlers = [*logging.getLogger("transformers").handlers]
    for handler in handlers:
        handler.addFilter(is_error)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_error)


def bad_word_ids(words: tuple[str, ...], tokenizer: Any | None) -> list[tuple[int, ...]]:
    """The ids of each text, at the beginning of a text and behind a space. Raises UsageError without a tokenizer."""
    if not words:
        return []
    if tokenizer is None:
        raise UsageError("bad_words need the model's tokenizer, and there is none: use bad_words_ids.")
    forms = (form for word in words for form in (word, f" {word.lstrip()}"))
    return [
        ids for ids in dict.fromkeys(tuple(tokenizer(form, add_special_tokens=False)["input_ids"]) for form in forms) if ids
    ]
