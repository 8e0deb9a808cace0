"""What a job was run with. In: its options and files. Out: OUT.manifest.json, and what about it has changed since.

Options that change no answer (see spec.py) may differ between the runs of a job; each run's are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lookahead.errors import LookaheadError, UsageError
from lookahead.files.atomic import replacing
from lookahead.files.outputs import model_folder
from lookahead.job.fields import is_template_file
from lookahead.job.progress import JobTotals
from lookahead.job.spec import OPTIONS, JobSpec
from lookahead.options import typed
from lookahead.tokenizer import TOKENIZER_FILES
from lookahead.trie.file import Trie
from lookahead.version import __version__

GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}  # what --sampling greedy stands for
WEIGHTS = ("*.safetensors", "*.bin")
CONFIGS = ("config.json", "generation_config.json", "chat_template.jinja", *TOKENIZER_FILES)
SAMPLES, SAMPLE_BYTES, HEAD_BYTES = 64, 4096, 1 << 20


@dataclasses.dataclass
class Manifest:
    """answering: the options that must not change. runs: options and clock of each. output: fingerprint of a file made last."""

    answering: dict[str, Any]
    model_files: dict[str, str]
    runs: list[dict[str, Any]]
    inputs: list[dict[str, Any]]
    state: str = "running"
    error: str = ""
    counts: dict[str, Any] = dataclasses.field(default_factory=dict)
    updated: float = 0.0
    output: str = ""

    def write(self, path: Path, totals: JobTotals) -> None:
        self.counts, self.updated = totals.as_json(), round(time.time(), 3)
        with replacing(path, "w") as file:
            json.dump(dataclasses.asdict(self), file, ensure_ascii=False, indent=1)
            file.write("\n")

    def end(self, path: Path, totals: JobTotals) -> None:
        self.runs[-1]["ended"] = round(time.time(), 3)
        self.write(path, totals)


def describe(spec: JobSpec, tries: Sequence[Trie], inputs: Sequence[str]) -> Manifest:
    """The manifest of a job that begins. tries, inputs: as they are now."""
    engine, installed = spec.model.engine, "not installed"
    for name in (engine, f"{engine}-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed = metadata.version(name)
            break
    run = {
        "began": round(time.time(), 3),
        "utc_offset": time.localtime().tm_gmtoff,
        "options": spec.options(),
        "tries": [{"path": str(trie.path), "content_hash": trie.header.content_hash} for trie in tries],
        "versions": {
            "lookahead": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
            **({engine: installed} if engine != "hf" else {}),
        },
        "machine": f"{platform.machine()} {platform.system()}",
    }
    model = spec.model
    files = fingerprint_model(model.name, model.revision, model.adapters, model.tokenizer)
    read = [dict[str, Any](path=name) for name in inputs]
    for each, path in zip(read, map(Path, inputs), strict=True):
        if path.is_file():
            each |= {"bytes": path.stat().st_size, "modified": round(path.stat().st_mtime, 3)}
    return Manifest(answering(spec), files, [run], read)


def began(run: dict[str, Any]) -> datetime.datetime:
    """When a run did, in the time zone of its machine; of one that does not state it (an earlier version) of this machine."""
    offset = datetime.timedelta(seconds=run.get("utc_offset", time.localtime(run["began"]).tm_gmtoff))
    return datetime.datetime.fromtimestamp(run["began"], datetime.timezone(offset))


def answering(spec: JobSpec) -> dict[str, Any]:
    """The options that change answers, as two runs of a job must agree in them: files by content, defaults spelled out."""
    options = spec.options()
    found = {name: options[name] for name, each in OPTIONS.items() if each.about.changes_answers}
    found["device"] = (found["device"] or "auto").partition(":")[0]  # which of several of a kind does not matter
    if found["device"] == "auto":
        import torch

        found["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    if found["sampling"] == "greedy":
        found.update({name: value for name, value in GREEDY.items() if found[name] is None})
    for name, value in found.items():
        if value and OPTIONS[name].about.is_file and is_template_file(value):
            found[name] = f"of content {sampled(Path(value))}"
    return dict(json.loads(json.dumps(found)))


def read_manifest(path: Path) -> Manifest:
    """Raises LookaheadError if it is missing or none."""
    try:
        found = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        began(found.runs[0])
        if not all(isinstance(each, dict) for each in (found.answering, found.model_files, *found.runs)):
            raise TypeError
        return found
    except (OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise LookaheadError(
            f"{path}: cannot be read, so what the job was begun with is unknown. Start again with --overwrite."
        ) from error


def resumed(before: Manifest, now: Manifest, out: Path) -> Manifest:
    """The manifest of a job that is continued. Raises UsageError naming each option and model file that has changed."""
    files_known = bool(before.model_files and now.model_files)  # then it does not matter in which folder they lie
    by_files = {"model": "", "revision": "", "adapter": "adapter/", "tokenizer": "tokenizer/"}
    then_too = now.answering.keys() <= before.answering.keys()
    known_then = before.answering if then_too else {**answering(JobSpec()), **before.answering}  # a later option: its default
    changed = []
    for name, value in now.answering.items():
        then = None if known_then[name] == [] else known_then[name]
        prefix, both = by_files.get(name), (before.model_files, now.model_files)
        known = prefix is not None and all(any(file.startswith(prefix) for file in files) for files in both)
        if then != value and not (known and files_known):
            changed.append(f"{_flag(name, then)} then, {_flag(name, value)} now")
    if files_known:
        differing = before.model_files.items() ^ now.model_files.items()
        changed += [f"{name} of the model has changed" for name in sorted({name for name, _ in differing})]
    if changed:
        raise UsageError(
            f"{out}: --resume: this is another job: {'; '.join(changed)}. Give what it was begun with, choose another -o, or "
            "start again with --overwrite."
        )
    files = now.model_files or before.model_files
    return dataclasses.replace(now, runs=[*before.runs, *now.runs], model_files=files, output=before.output)


def fingerprint_model(
    name: str, revision: str | None, adapters: Mapping[str | None, str], tokenizer: str | None
) -> dict[str, str]:
    """Fingerprints of a model's files on this machine, of its adapters (adapter/[NAME/]...) and tokenizer (tokenizer/...)."""
    found: dict[str, Path] = {}

    def add(prefix: str, folder: Path | None, names: Sequence[str], patterns: Sequence[str]) -> None:
        if folder is not None:
            found.update({prefix + file: folder / file for file in names if (folder / file).is_file()})
            found.update({prefix + path.name: path for pattern in patterns for path in sorted(folder.glob(pattern))})

    if Path(name).is_file():
        found[Path(name).name] = Path(name)
    else:
        add("", model_folder(name, revision), CONFIGS, (*WEIGHTS, "*.py"))
    for named, adapter in adapters.items():
        add(f"adapter/{named}/" if named else "adapter/", model_folder(adapter), ("adapter_config.json",), ("adapter_model.*",))
    if tokenizer:
        add("tokenizer/", model_folder(tokenizer), ("chat_template.jinja", *TOKENIZER_FILES), ("*.py",))
    return {file: sampled(path) for file, path in found.items()}


def sampled(path: Path) -> str:
    """A fingerprint of a file's size, its beginning and pages all over it: one that was trained on differs in nearly all."""
    size = path.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for sample in range(SAMPLES if size > HEAD_BYTES else 0):
            file.seek(HEAD_BYTES + (size - HEAD_BYTES) * sample // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _flag(name: str, value: Any) -> str:
    if value is None or value is False:
        return f"no {typed(name)}"
    values = value if isinstance(value, list) else [value]
    return typed(name) if value is True else f"{typed(name)} {' '.join(map(str, values))}"
