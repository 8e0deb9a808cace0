"""Cost profiles: what a forward of one model costs on one machine. In: a small JSON file. Out: seconds of any forward.

A forward over `tokens` tokens of `rows` rows, with `keys` keys in the cache that attention goes through, takes

    f(tokens) + per_row rows + per_key keys + per_query_key keys width + per_padding (rows width - tokens) + per_call (calls-1)

seconds (see `Forward`), where width is the tokens of a row, of the one with the most where they differ, as attention pads the
others; of several rows an odd width counts as one more, as it takes as long on CPUs. Keys are padded, too. Rows that differ
much go in several calls of attention, where nothing is padded (forward/batch.py). lookahead::tree_attention pads nothing, as
if each row had a call of its own: per_call is then what one more row costs. f, the part that does not depend on what lies in
the cache, is given at some sizes and interpolated between them; beyond the largest it continues as between the last two. Tokens
whose scores nobody wants (all but the last of a prompt) take per_score less. Models that take one row at a time pay for each
row as for a forward of its own.

Behind the forward, asking what the model emits after a node takes per_said (the first time is part of the forward). Where nodes
that are accepted do not stand side by side, moving their keys and values takes per_move, and per_moved_row for each row.

`lookahead calibrate` measures profiles (bench/calibrate.py); those of devices that one does not have are estimated from their
data sheets (estimate.py). Some of each kind ship with the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead.errors import LookaheadError
from lookahead.files import folders
from lookahead.files.atomic import replacing
from lookahead.files.outputs import TRIED_BYTES
from lookahead.native.kernels import kernel

FORMAT = 1
SHIPPED = Path(__file__).parent / "profiles"
NEVER = 1e9  # seconds of a further call of attention, where all rows share one
CDL_FACTOR = 1.2  # a critical decoding length's forward costs at most that many times that of one token
MOST_KNOTS = 1000
PER = ("per_row", "per_key", "per_query_key", "per_padding", "per_call", "per_score", "per_said", "per_move", "per_moved_row")


class Forward(NamedTuple):
    """The size of a forward, on which its cost depends. Kernels take it, too.

    tokens: of all rows, padding included. rows: that have any. keys: in the cache, that attention goes through for these rows,
    all together and padded. width: tokens of the row with the most, to which attention pads the others; 0: all have as many.
    calls: of attention, if all rows had as many tokens; where they have not, there are more, up to one of each row.
    Whole numbers, but for tokens and keys of the average row, where rows go one at a time.
    """

    tokens: float
    rows: int = 1
    keys: float = 0
    width: int = 0
    calls: int = 1


class Work(NamedTuple):
    """Work of attention in a forward. keys: in the cache, padding included. products: of queries with them, an odd number of
    queries counting as one more where slots share a call. padding: queries that are. calls: in addition to the first.
    """

    keys: int
    products: int
    padding: int
    calls: int


@dataclasses.dataclass(frozen=True)
class Setting:
    """Setting that a profile holds for.

    device: the processor's name. mode: how drafts are verified (forward/target.py). threads: of the CPU; 0 for others.
    shape: fingerprint of the model's config. linear: by whom or in which bits linear layers are (cpu/linear.py). kv_dtype:
    int8 or int4 of keys and values that are quantized, else none.
    """

    model: str
    shape: str
    device: str
    dtype: str
    attention: str
    mode: str
    threads: int
    linear: str = "torch"
    kv_dtype: str = "none"

    @property
    def file_name(self) -> str:
        """File name of this setting's profile in the cache folder."""
        device = re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-")
        linear = "" if self.linear == "torch" else f"-{self.linear}"
        linear += "" if self.kv_dtype == "none" else f"-kv-{self.kv_dtype}"
        return f"{self.shape}-{device}-{self.threads}-{self.dtype}-{self.attention}-{self.mode}{linear}.json"


@dataclasses.dataclass(frozen=True)
class CostProfile:
    """See the module's docstring.

    tokens, seconds: the sizes at which f is given, and f there. kind: "measured" or "estimate". bucketed: forwards take one of
    a few shapes, so that a size costs what its bucket costs. separate: rows go one at a time.
    vocab_size, longest_text: of the model.
    about: how it came to be (versions, errors of the fit, sources), for people.
    """

    setting: Setting
    kind: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    per_row: float = 0.0
    per_key: float = 0.0
    per_query_key: float = 0.0
    per_padding: float = 0.0
    per_call: float = 0.0
    per_score: float = 0.0
    per_said: float = 0.0
    per_move: float = 0.0
    per_moved_row: float = 0.0
    bucketed: bool = False
    separate: bool = False
    vocab_size: int = 1 << 31
    longest_text: int = 1 << 30
    about: dict[str, Any] = dataclasses.field(default_factory=dict)

    def forward_seconds(self, forward: Forward, unscored: int = 0) -> float:
        """Seconds of a forward of this size. unscored: tokens among them whose scores are not wanted."""
        if self.separate:
            rows = forward.rows
            return rows * self._seconds(Forward(forward.tokens / rows, 1, forward.keys / rows)) - self.per_score * unscored
        return self._seconds(forward) - self.per_score * unscored

    def _seconds(self, forward: Forward) -> float:
        per = self.per_key, self.per_query_key, self.per_padding, NEVER if self.bucketed else self.per_call
        sized = forward._replace(tokens=float(forward.tokens), keys=float(forward.keys))  # one type, so compiled once
        return self.at(forward.tokens) + self.per_row * forward.rows + float(in_attention(sized, *per))

    def seconds_of(self, tokens: int, rows: int, work: Work) -> float:
        """Seconds of a forward whose calls of attention are known, all scores being wanted."""
        in_attention = self.per_key * work.keys + self.per_query_key * work.products
        in_attention += self.per_padding * work.padding + self.per_call * work.calls
        return self.at(tokens) + self.per_row * rows + in_attention

    def at(self, tokens: float) -> float:
        """f: seconds that do not depend on rows and keys."""
        sizes, seconds = self.tokens, self.seconds
        if tokens <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(tokens, sizes, seconds))
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return seconds[-1] + slope * (tokens - sizes[-1])

    def cdl(self, rows: int = 1, context: int = 512, factor: float = CDL_FACTOR) -> int:
        """Critical decoding length: tokens of each row up to which a forward costs at most `factor` of a plain one."""
        keys = rows * context
        allowed = factor * self.forward_seconds(Forward(rows, rows, keys))
        largest = 1
        for length in range(1, 1025):
            if self.forward_seconds(Forward(rows * length, rows, keys)) <= allowed:
                largest = length
        return largest

    def as_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the file; it appears whole. Raises LookaheadError if it cannot be written."""
        with replacing(path, "w") as file:
            file.write(json.dumps(self.as_json(), indent=1) + "\n")


@kernel
def in_attention(forward, per_key, per_query_key, per_padding, per_call):
    """Seconds of a `Forward` that depend on what lies in the cache: rows are padded to the widest, or each goes alone."""
    tokens, rows, keys, width, calls = forward
    own = tokens / rows
    widest = max(own, float(width + width % 2 if width > 1 and rows > 1 else width))
    padded = keys * per_query_key * widest + per_padding * (rows * widest - tokens)
    alone = keys * per_query_key * own + per_call * (rows - calls)
    return keys * per_key + per_call * (calls - 1) + min(padded, alone)


def read_profile(name: str) -> CostProfile:
    """Read a profile from a file, or the shipped one of this name. Raises LookaheadError saying what is wrong with it."""
    path = Path(name)
    if not path.exists():
        path = SHIPPED / f"{name}.json"
        if not path.exists():
            known = ", ".join(shipped_names())
            raise LookaheadError(f"{name}: no such cost profile. Name a file of `lookahead calibrate`, or one of {known}.")
    try:
        return _parsed(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise LookaheadError(f"{path}: not a cost profile ({cause}). Write one with `lookahead calibrate`.") from error


def shipped_names() -> list[str]:
    """Profiles that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def cache_folder() -> Path | None:
    """Folder of this user's profiles; None where there is neither $LOOKAHEAD_CACHE nor a home."""
    own = os.environ.get("LOOKAHEAD_CACHE")
    return Path(own) if own else folders.cache_folder("profiles")


def cached_profile(setting: Setting) -> CostProfile | None:
    """The one that was measured for this setting, if there is one that can be read."""
    folder = cache_folder()
    try:
        path = folder / setting.file_name if folder else None
        return read_profile(str(path)) if path and path.is_file() else None
    except (LookaheadError, OSError):
        return None


def cached_for(setting: Setting, quantize: str = "none") -> CostProfile | None:
    """The latest one of this model, device, threads and dtypes: attention and mode are not known before a model is loaded."""
    folder, found = cache_folder(), list[tuple[float, CostProfile]]()
    begin = setting.file_name[: setting.file_name.index(f"-{setting.attention}-{setting.mode}")]
    for path in folder.glob(f"{begin}-*.json") if folder else ():
        with contextlib.suppress(LookaheadError, OSError):
            profile = read_profile(str(path))
            kind = profile.setting.linear if profile.setting.linear in ("int8", "int4") else "none"
            if (profile.setting.kv_dtype, kind) == (setting.kv_dtype, quantize):
                found.append((path.stat().st_mtime, profile))
    return max(found, key=lambda pair: pair[0], default=(0.0, None))[1]


def save_to_cache(profile: CostProfile) -> Path:
    """Keep a profile for later jobs of its setting. Raises LookaheadError if the folder cannot be written."""
    path = _made_folder() / profile.setting.file_name
    profile.save(path)
    return path


def why_not_cached() -> str:
    """Why no profile could be kept in the cache folder, by trying it; "" if one can."""
    try:
        folder = _made_folder()
    except LookaheadError as error:
        return str(error)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(TRIED_BYTES))
    except OSError as error:
        return f"{folder}: cannot be written ({error.strerror}). Set LOOKAHEAD_CACHE to a folder."
    return ""


def _made_folder() -> Path:
    """The cache folder, made if it is missing. Raises LookaheadError if that cannot be done."""
    folder = cache_folder()
    if folder is None:
        raise LookaheadError("there is no home folder to keep the profile in. Set LOOKAHEAD_CACHE to a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LookaheadError(f"{folder}: cannot be made ({error.strerror}). Set LOOKAHEAD_CACHE to a folder.") from error
    return folder


def _parsed(value: dict[str, Any]) -> CostProfile:
    """Raises ValueError, TypeError or KeyError for anything but a profile."""
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']}, this version reads {FORMAT}")
    value = {**dict.fromkeys(PER, 0.0), **value}  # files of earlier versions have fewer terms
    fields = {field.name: value[field.name] for field in dataclasses.fields(CostProfile)}
    setting = Setting(**fields.pop("setting"))
    tokens, seconds = fields["tokens"], fields["seconds"]
    if not 1 <= len(tokens) == len(seconds) <= MOST_KNOTS:
        raise ValueError('"tokens" and "seconds" are not lists of one length')
    if not all(type(t) is int and t > 0 for t in tokens) or sorted(set(tokens)) != tokens:
        raise ValueError('"tokens" are not rising whole numbers')
    _check_numbers("seconds", seconds)
    _check_numbers(", ".join(PER), [fields[name] for name in PER])
    if not max(seconds) > 0:
        raise ValueError('all "seconds" are 0')
    fields.update(tokens=tuple(tokens), seconds=tuple(map(float, seconds)))
    return CostProfile(setting, **fields)


def _check_numbers(name: str, values: Sequence[Any]) -> None:
    if not all(type(v) in (int, float) and math.isfinite(v) and v >= 0 for v in values):
        raise ValueError(f"{name}: not all numbers of 0 or more")
