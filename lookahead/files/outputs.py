"""What a command may write. In: the files that it was asked to write and to read. Out: an error before any work is done.

An output must not be a file that the command reads, nor another output, by any link. A file of another kind is replaced only if
the user asks for it. Each output is tried; nothing that exists is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import glob
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from lookahead.errors import LookaheadError, UsageError
from lookahead.extras import require
from lookahead.files.atomic import followed, scratch_sibling

LINES, PACKED = (".jsonl", ".ndjson"), (".gz", ".zst")
PICTURES = (".png", ".pdf", ".svg")  # endings of what can be drawn
JSON_LINES = (*LINES, ".json")
ENDINGS = (  # that name a kind of file, which is then what must be in it
    *("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "pq", "arrow", "feather", "orc", "avro", "xls", "xlsx"),
    *("ods", "sqlite", "h5", "hdf5", "npy", "npz", "pkl", "gz", "gzip", "tgz", "zst", "zstd", "bz2", "xz", "lzma"),
    *("lz4", "br", "zip", "7z", "rar", "tar", "sz", "snappy", "htm", "html", "xml", "md", "markdown", "tex", "yaml"),
    *("yml", "toml", "pdf", "png", "svg", "eps", "ps", "jpg", "jpeg", "gif", "webp", "trie", "safetensors", "gguf"),
)
NAMED = {f".{each}" for each in ENDINGS}
TRIED_BYTES = 4096  # written to a temporary sibling: a full disk refuses them
HEAD_BYTES = 4096  # of an existing file, from which its kind is seen
MOST_JSON_BYTES = 256 << 20  # a larger file is not one of ours
MOST_FILES = 10_000  # of a model's folder

GET_FLAGS, IMMUTABLE_OR_APPEND_ONLY = 0x80086601, 0x30  # FS_IOC_GETFLAGS and FS_IMMUTABLE_FL | FS_APPEND_FL of linux/fs.h

FileId = tuple[int, int]  # device and inode, the same for all names of a file


def kind_of(name: str) -> str:
    """Suffix that tells the format, without the compression: "a/b.JSONL.gz" -> ".jsonl"."""
    path = Path(name.lower())
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file. matches: a file that is not empty is one. endings: of those in NAMED the ones that it may have."""

    name: str
    matches: Callable[[Path], bool]
    endings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """A file to be written. kind: may be replaced; None: the command has its own rule. updates: inputs that it may be."""

    option: str
    path: str | Path | None
    kind: Kind | None = None
    updates: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Input:
    """Files that a command reads under one option. names: files, globs, folders, "-". hub: a name may be one of the hub's."""

    option: str
    names: Sequence[str | Path | None]
    hub: bool = False


def check_outputs(outputs: Iterable[Output], inputs: Iterable[Input], overwrite: bool | None = None) -> None:
    """Check what is to be written, then try it. overwrite: None: no such option. Raises UsageError or LookaheadError."""
    given = [(output, Path(output.path)) for output in outputs if output.path is not None]
    for output, path in given:
        if output.kind in (PICTURE, PAGE):
            require("matplotlib", output.option)
        if path.is_dir():
            raise LookaheadError(f"{output.option} {path}: is a folder. Name a file to write.")
        if not followed(path).parent.is_dir():
            raise LookaheadError(f"{output.option} {path}: its folder does not exist. Create it or choose another folder.")
    for (output, path), (other, other_path) in itertools.combinations(given, 2):
        if _same(path, other_path):
            raise UsageError(f"{output.option} and {other.option} name the same file ({path}): each needs a file of its own.")
    by_id = {file_id: (output, path) for output, path in given if (file_id := _id_of(path))}
    for each in inputs if by_id else ():
        for name in _files_of(each):
            found = by_id.get(_id_of(name) or (0, 0))
            if found and each.option not in found[0].updates:
                output, path = found
                same = "" if str(name) == str(path) else f" ({name})"
                raise UsageError(f"{output.option} {path}: is read by {each.option}{same}. Choose another file to write.")
    for output, path in given:
        try:
            kind, exists = output.kind, path.is_file() and not overwrite and path.stat().st_size
            foreign = kind is not None and exists and not kind.matches(path)
        except OSError as error:  # it may be anything
            raise LookaheadError(f"{path}: cannot be read ({error.strerror}), so it is not replaced.") from error
        if output.kind and foreign:
            instead = " or give --overwrite to replace it" if overwrite is not None else ""
            raise UsageError(f"{output.option} {path}: exists and is not {output.kind.name}. Choose another file{instead}.")
    for output, path in given:
        _check_ending(output, path)
        try_output(output, path)
        if output.kind is PICTURE and path.suffix.lower() not in PICTURES:
            raise UsageError(f"{output.option} {path}: its ending names no kind of figure. Use one of {', '.join(PICTURES)}.")


def try_output(output: Output, path: Path) -> None:
    """Raise LookaheadError if a file could not be written at `path`, or what exists there not be replaced."""
    target = followed(path)
    if target.exists() and not target.is_file():  # a device or pipe: whether the command writes to such is its own rule
        return
    try:
        with scratch_sibling(target) as scratch:
            scratch.write(bytes(TRIED_BYTES))
            scratch.flush()
    except LookaheadError as error:
        raise LookaheadError(f"{output.option} {error}") from error
    if problem := _why_not_replaceable(target):
        raise LookaheadError(f"{output.option} {path}: cannot be replaced ({problem}). Choose another folder.")


def _check_ending(output: Output, path: Path) -> None:
    """Raises UsageError for an ending that names another kind of file. What a pipe or device is named does not matter."""
    endings, ending, inner = output.kind.endings if output.kind else (), path.suffix.lower(), kind_of(path.name)
    if path.exists() and not path.is_file():
        return
    if (ending in NAMED and ending not in endings) or (inner != ending and inner in NAMED and inner not in JSON_LINES):
        instead = ", ".join(endings) or "another ending"
        raise UsageError(f"{output.option} {path}: its ending names another kind of file than is written. Use {instead}.")
    if ending in (".parquet", ".zst"):
        require("pyarrow", f"{output.option} {path}")


def _same(a: Path, b: Path) -> bool:
    if (file_id := _id_of(a)) and file_id == _id_of(b):
        return a.is_file()  # a device such as /dev/null may be named twice
    return os.path.realpath(a) == os.path.realpath(b) and not a.exists()


def _id_of(path: str | Path) -> FileId | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _files_of(read: Input) -> Iterator[str | Path]:
    for name in read.names:
        if name is None or name == "-":
            continue
        found: list[str | Path] = [name] if os.path.exists(name) else [*glob.glob(str(name), recursive=True)]
        if not found and read.hub and (folder := model_folder(str(name))):
            found = [folder]
        for each in found:
            inside = (Path(parent, file) for parent, _, files in os.walk(each) for file in files)
            yield from itertools.islice(inside, MOST_FILES) if os.path.isdir(each) else [each]


def model_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model, tokenizer or adapter that is on this machine: its own, or a snapshot in the cache of the hub."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "tokenizer_config.json", "adapter_config.json"):
        with contextlib.suppress(ValueError):  # not a name that the hub takes: loading it reports it
            if isinstance(cached := try_to_load_from_cache(name, file, revision=revision), str):
                return Path(cached).parent
    return None


def _why_not_replaceable(path: Path) -> str:
    """Why a file cannot be renamed to `path` although its folder can be written; "" if it can, as far as one can know."""
    try:
        found, folder = path.stat(), path.parent.stat()
    except OSError:
        return ""
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, found.st_uid, folder.st_uid):
        return "it belongs to another user, in a folder with the sticky bit"
    if _is_mount_point(path):
        return os.strerror(errno.EBUSY) + ": it is mounted by itself, mount its folder instead"
    if _flags_of(path) & IMMUTABLE_OR_APPEND_ONLY:
        return "it is immutable or append-only, see lsattr"
    return ""


def _is_mount_point(path: Path) -> bool:
    """A file that is mounted by itself, as into a container; no rename replaces it."""
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes()
    except OSError:
        return False
    wanted = os.fsencode(os.path.realpath(path))
    return any(
        re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split(b" ")[4]) == wanted
        for line in mounts.splitlines()
        if line.count(b" ") > 4
    )


def _flags_of(path: Path) -> int:
    """Attributes of a Linux file system; 0 where there are none."""
    flags = bytearray(8)
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.ioctl(file.fileno(), GET_FLAGS, flags)
    return flags[0]


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _has_keys(*any_of: set[str]) -> Callable[[Path], bool]:
    def matches(path: Path) -> bool:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(path.read_bytes()) if path.stat().st_size <= MOST_JSON_BYTES else None
            return isinstance(value, dict) and any(keys <= value.keys() for keys in any_of)
        return False

    return matches


TRIE = Kind("a trie file", lambda path: _head(path).startswith(b"\x89LKT"), (".trie",))
ANY_TRIE = Kind("", lambda path: True, TRIE.endings)  # any other file is refused when it is opened
ROWS = Kind("", lambda path: True, (*JSON_LINES, ".parquet", *PACKED))  # a job has rules of its own for what exists
METRICS = Kind("a metrics file of this tool", lambda path: re.match(rb"# (HELP|TYPE) lookahead_", _head(path)) is not None)
PICTURE_HEADS = re.compile(rb"\x89PNG\r\n\x1a\n|%PDF-|<svg|<\?xml(?=.*<svg)", re.DOTALL)
PICTURE = Kind("a PNG, PDF or SVG", lambda path: PICTURE_HEADS.match(_head(path)) is not None, PICTURES)
PAGE = Kind("a page of this tool", lambda path: b"<title>lookahead" in _head(path), (".html", ".htm"))
PROFILE = Kind("a cost profile", _has_keys({"format", "setting", "seconds"}), (".json",))
BENCH = Kind(
    "the JSON of a bench",
    _has_keys({"runs", "environment"}, {"batches"}, {"rows", "tokens", "strategies"}, {"workloads", "geometric_mean"}),
    (".json",),
)


def lines_with(name: str, *keys: str) -> Kind:
    """JSON lines whose first has these keys."""

    def matches(path: Path) -> bool:
        with path.open("rb") as file:
            line = file.readline(MOST_JSON_BYTES)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            return isinstance(value, dict) and set(keys) <= value.keys()
        return not line.endswith(b"\n") and line.startswith(b'{"' + keys[0].encode())  # a first line that was cut short

    return Kind(name, matches, JSON_LINES)


DOCUMENTS = lines_with("a list of documents", "number", "source", "ids")
JOURNAL = lines_with("the journal of a job", "row", "input", "output")
LEARNED = lines_with("answers that a job kept", "row", "prompt_ids", "response_ids")
MANIFEST = Kind("the manifest of a job", _has_keys({"answering", "runs", "state"}), (".json",))
