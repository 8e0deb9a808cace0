"""Loading tokenizers and telling whether two of them give ids the same meaning."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lookahead.errors import ModelError, first_line
from lookahead.files.hub import gguf_in, located
from lookahead.model_files import check_folder
from lookahead.token_documents import TokenizerIdentity

_quiet = threading.RLock()  # held while the hub client is quiet


def load_tokenizer(name: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The Hugging Face tokenizer of a folder or hub name. Raises ModelError if there is none.

    trust_remote_code: run code that comes with it. revision: branch, tag or commit of a hub name.
    """
    path, is_gguf = Path(name), bool(gguf_in(name)[1])
    if path.is_file() and not is_gguf:
        raise ModelError(f"{name}: is a file. Give the folder that holds tokenizer.json, a GGUF file, or a hub name.")
    if path.is_dir():
        check_folder(path)
    if path.is_dir() and not any((path / f).exists() for f in TOKENIZER_FILES):
        raise ModelError(f"{name}: no tokenizer in this folder (looked for {', '.join(TOKENIZER_FILES)}).")
    try:
        with quiet_hub():
            source, further = located(name, "a folder with a tokenizer", revision)
            if _is_generic(path):
                from transformers import PreTrainedTokenizerFast

                return without_limits(PreTrainedTokenizerFast.from_pretrained(name))
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(source, **hub_arguments(trust_remote_code, revision), **further)
            return without_limits(loaded)
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds for a missing or damaged tokenizer
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ModelError(f"{name}: its tokenizer is code of its own. {TRUST}") from error
        raise ModelError(f"{name}: tokenizer cannot be loaded ({first_line(error)}).") from error


def without_limits(tokenizer: Any) -> Any:
    """The tokenizer without the truncation and padding that tokenizer.json or an earlier call has switched on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.truncation is not None:
        backend.no_truncation()
    if backend is not None and backend.padding is not None:
        backend.no_padding()
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """True for a folder whose tokenizer.json is all there is to its tokenizer: the class for these imports no torch (1 s)."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    generic = isinstance(config, dict) and config.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return generic and "auto_map" not in config and (folder / "tokenizer.json").exists()


TOKENIZER_FILES = "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json"


def own_tokenizer(model: str, trust_remote_code: bool = False, revision: str | None = None) -> Any | None:
    """The tokenizer of a model's folder or hub name; None for a folder without one. Raises ModelError if it is broken."""
    if Path(model).is_dir() and not any((Path(model) / name).exists() for name in TOKENIZER_FILES):
        return None
    return load_tokenizer(model, trust_remote_code, revision)


TRUST = "Read it first; --trust-remote-code (in Python trust_remote_code=True) runs it."


def hub_arguments(trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """Arguments of `from_pretrained`. False is given as such: where nothing is given, transformers asks on the terminal."""
    return {"trust_remote_code": trust_remote_code, **({"revision": revision} if revision else {})}


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """No log lines of the hub client about retries: what fails in the end is reported once, in our words. One thread at a time,
    as the level is that of the process.
    """
    hub = logging.getLogger("huggingface_hub")
    with _quiet:
        level = hub.level
        hub.setLevel(logging.ERROR)
        try:
            yield
        finally:
            hub.setLevel(level)


# Stands before a chat template that writes the time. The function that it replaces cannot be passed: of what is passed to a
# template, transformers keeps plain data only. The end of the line is trimmed, and the template begins a line as before.
CLOCK = (
    "{% macro strftime_now(format) %}{% set found = namespace(text=format) %}{% for code, value in strftime_codes.items() %}"
    "{% set found.text = found.text.replace(code, value) %}{% endfor %}{{ found.text }}{% endmacro %}\n"
)


def chat_text(tokenizer: Any, messages: Any, now: datetime.datetime, tools: Any = None) -> str:
    """Messages as the chat template writes them, up to the answer. now: the time that it writes (its `strftime_now`).
    tools: as it lists them.

    Raises what the template raises.
    """
    clock = {}
    if "strftime_now" in str(tokenizer.chat_template):
        template = tokenizer.get_chat_template(tools=tools)
        codes = {code: now.replace(tzinfo=None).strftime(code) for code in re.findall(r"%[-_0^#]?[A-Za-z%]", template)}
        clock = {"chat_template": CLOCK + template, "strftime_codes": codes}
    return str(tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True, **clock))


def identity(tokenizer: Any, name: str) -> TokenizerIdentity:
    """Fingerprint over every (id, token) pair, special tokens included: the same from any folder it was loaded.

    A folder or file is named by its absolute path, so that it is found from elsewhere and is never taken for a hub name.
    """
    vocabulary = tokenizer.get_vocab()
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0])):
        digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
    return TokenizerIdentity(
        max(vocabulary.values()) + 1, digest.hexdigest()[:16], os.path.abspath(name) if os.path.exists(name) else name
    )
