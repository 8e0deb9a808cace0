"""Whether the files of a model folder can be used. In: a folder, a config. Out: nothing, or an error that names file and field.

transformers drops some files that it cannot read, and with them their end tokens and stop strings. Needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lookahead.errors import ModelError, first_line


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_int(value) and value >= -1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _or_list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: fits(value) or _list_of(fits)(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


Kind = tuple[Callable[[Any], bool], str]
IDS: Kind = (_or_list_of(_is_id), "a token id or a list of them")
NUMBER: Kind = (_is_number, "a number")
OBJECT: Kind = (lambda value: isinstance(value, dict), "an object")
FIELDS: dict[str, dict[str, Kind]] = {
    "config.json": {
        "architectures": (_list_of(_is_text), "a list of names"),
        "eos_token_id": IDS,
        "bos_token_id": IDS,
        "pad_token_id": IDS,
        "quantization_config": OBJECT,
        **dict.fromkeys(("rope_scaling", "rope_parameters"), OBJECT),
        "text_config": (lambda value: isinstance(value, dict) and len(value) > 0, "an object with the text model's fields"),
    },
    "generation_config.json": {
        **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), IDS),
        "stop_strings": (_or_list_of(_is_text), "a text or a list of texts"),
        **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "top_k", "repetition_penalty"), NUMBER),
        **dict.fromkeys(("guidance_scale", "epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty"), NUMBER),
        **dict.fromkeys(("max_new_tokens", "max_length", "min_length", "min_new_tokens", "no_repeat_ngram_size"), NUMBER),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), (_list_of(_is_id), "a list of token ids")),
        "bad_words_ids": (_list_of(_list_of(_is_id)), "a list of lists of token ids"),
    },
    "tokenizer_config.json": {
        "model_max_length": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    },
    "model.safetensors.index.json": {"weight_map": OBJECT},
    "pytorch_model.bin.index.json": {"weight_map": OBJECT},
}
FILES = (*FIELDS, "special_tokens_map.json", "added_tokens.json", "adapter_config.json", "chat_template.json")
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "intermediate_size")


def check_folder(folder: Path) -> None:
    """Raises ModelError for a file that is damaged or holds a value of the wrong kind."""
    for file in FILES:
        if os.path.lexists(folder / file):
            found = _read(folder / file)
            for key, (fits, wanted) in (FIELDS.get(file) or {}).items():
                if found.get(key) is not None and not fits(found[key]):
                    raise ModelError(f"{folder / file}: {key} is {json.dumps(found[key])[:60]}: it must be {wanted}.")
    for template in folder.glob("*.jinja"):
        try:
            template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{template}: cannot be read as UTF-8 text. Download or save it again.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is damaged: not JSON in UTF-8 ({first_line(error)}). Download or save it again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: is damaged: a JSON {type(found).__name__}, not an object. Download or save it again.")
    return found


def check_sizes(name: str, config: Any) -> None:
    """Raises ModelError for a config whose text model has sizes that no model has."""
    try:
        text = config.get_text_config(decoder=True)
        int(text.vocab_size)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{name}: config.json has no text model's fields ({first_line(error)}).") from error
    for field in SIZES:
        value = getattr(text, field, None)
        if value is not None and _is_number(value) and value < 1:
            raise ModelError(f"{name}: config.json: {field} is {value}: it must be a whole number above 0.")
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and (not _is_int(positions) or positions == 0 or positions < -1):
        raise ModelError(
            f"{name}: config.json: max_position_embeddings is {positions!r}: it must be a whole number above 0; -1: no limit."
        )
