"""Folder or hub name. In: a name as typed, or as a trie file keeps it. Out: how to load it, or an error at once.

A name that can be a folder never goes to the hub, which is asked once, with a timeout: the client retries for most of a minute.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from pathlib import Path
from typing import Any

from lookahead.errors import ModelError, UsageError, first_line
from lookahead.extras import require

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
GGUF = ".gguf"  # the ending of such files
PATIENCE = 5.0  # seconds for the hub to answer
FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json")  # one is in each repository


def with_gguf_file(model: str | None, file: str | None) -> str | None:
    """The name of a GGUF file in a folder or hub repository, as one string: FOLDER/FILE.gguf, org/model/FILE.gguf."""
    if file is None or model is None:
        return model
    if not file.endswith(GGUF) or os.path.isabs(file):
        raise UsageError(f"--gguf-file {file}: name a file that ends in {GGUF}, as it is called in {model}.")
    if os.path.isfile(model):
        raise UsageError(f"--gguf-file {file}: {model} is a file. Give the folder or hub name that holds the GGUF file.")
    return os.path.join(model, file)


def gguf_in(name: str) -> tuple[str, str]:
    """(folder or hub name, file in it) of a name of a GGUF file; (the name, "") of any other."""
    name = os.fspath(name)
    if not name.endswith(GGUF) or os.path.isdir(name):
        return name, ""
    folder, file = os.path.split(name)
    in_hub = HUB_FILE.fullmatch(name)
    return (in_hub[1], in_hub[2]) if in_hub and not os.path.isdir(folder) else (folder or ".", file)


def located(name: str, wanted: str, revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """Arguments of `from_pretrained` for a name: (folder or hub name, further ones by name). Raises as `check_name`."""
    (repository, file), further = gguf_in(name), check_name(name, wanted, revision)
    if not file:
        return name, further
    require("gguf", name)
    require("accelerate", name)
    return repository, {**further, "gguf_file": file}


def check_name(name: str, wanted: str, revision: str | None = None) -> dict[str, Any]:
    """Further arguments of `from_pretrained`: none for a folder. Raises ModelError for what is neither there nor in the hub."""
    repository, file = gguf_in(name)
    if file and os.path.isdir(repository):
        if not os.path.isfile(name):
            found = sorted(entry for entry in os.listdir(repository) if entry.endswith(GGUF))
            raise ModelError(f"{name}: no such file. GGUF files in this folder: {', '.join(found) or 'none'}.")
        return {}
    if file:
        return check_name(repository, wanted, revision)
    if os.path.isdir(name):
        return {}
    if os.path.isfile(name):
        raise ModelError(f"{name}: is a file. Give {wanted}, or a hub name such as org/model.")
    is_path = name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name
    if is_path or not HUB_NAME.fullmatch(name):
        raise ModelError(f"{name}: no such folder.{_meant(name)} Give {wanted}, or a hub name such as org/model.")
    if is_cached(name):
        return {} if _offline() or not _problem(name, revision) else {"local_files_only": True}
    parent = os.path.dirname(name)
    if parent and os.path.isdir(parent):  # then it was most likely meant as a folder
        raise ModelError(f"{name}: no such folder in {parent}.{_meant(name)} Give {wanted}, or download it from the hub first.")
    if problem := "it is not asked: HF_HUB_OFFLINE is set" if _offline() else _problem(name, revision):
        raise ModelError(f"{name}: no such folder, and not from the hub ({problem}).{_meant(name)} Give {wanted}.")
    return {}


def is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in FILES)
    except ValueError:  # what the hub's client does not take for a name
        return False


def tokenizer_of_trie(path: Path, name: str) -> str:
    """Return the name of the tokenizer that the trie was built with. Raises ModelError if it cannot be found."""
    if os.path.exists(name) or not name:
        return name
    try:
        check_name(name, "its new location")
    except ModelError as error:
        raise ModelError(
            f"{path}: its tokenizer {name} cannot be found: {str(error).removeprefix(f'{name}: ').split('. ')[0].rstrip('.')}. "
            "Name it with --tokenizer NAME_OR_DIR."
        ) from error
    return name


def _meant(name: str) -> str:
    """A similar name in the same folder."""
    parent, last = os.path.split(name.rstrip("/"))
    try:
        found = [entry.name for entry in os.scandir(parent or ".") if entry.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(last, found, 1, 0.75)
    return f" Did you mean {os.path.join(parent, near[0])}?" if near else ""


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


@functools.lru_cache(maxsize=64)
def _problem(name: str, revision: str | None) -> str:
    """Why nothing can be loaded from the hub under this name; "" where it answers. What it refuses, loading reports better."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except RevisionNotFoundError:
        return f"it has no revision {revision} of it"
    except RepositoryNotFoundError:
        return "it has no such model, or keeps it private"
    except HFValidationError:
        return "it is not a hub name"
    except HfHubHTTPError:
        return ""
    except Exception as error:  # of any library that makes the request
        return f"it does not answer: {first_line(error)}"
    return ""
