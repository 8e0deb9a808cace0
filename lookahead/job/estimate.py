"""What a job will take. In: tokens of its rows; what rows of it took that are answered, or costs of forwards measured earlier.
Out: seconds of answering, bytes of memory and of disk, and what they are based on.

Seconds per row are those of the rows that this job has answered: after `--limit 40` the others are estimated from 40. Where
none is answered, they are those of plain decoding by the cost profile of this model on this machine, each answer as long as
it may be: an upper bound, as nothing is known of how long answers are and how many drafts are accepted. Without a profile
there are none. What a dry run estimates is kept for the job of the same options and inputs, which compares it with what it
took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lookahead.budget.profile import CostProfile, Forward, cached_for
from lookahead.budget.speedup import PlainRun
from lookahead.errors import LookaheadError
from lookahead.files.atomic import replacing
from lookahead.files.folders import cache_folder
from lookahead.files.outputs import model_folder
from lookahead.forward.memory import peak_memory
from lookahead.forward.processor import processor_name
from lookahead.forward.target import setting_of
from lookahead.job.journal import Done
from lookahead.job.plan import JobPlan
from lookahead.job.record import read_record
from lookahead.job.setup import rows_at_once
from lookahead.models.load import device_and_dtype, empty_model, read_config, sizes_of
from lookahead.native.cores import usable_cores

FEW = 5  # rows: fewer that are answered tell little
ROW_BYTES, JOURNAL_BYTES, MANIFEST_BYTES = 230, 340, 5000  # of a row of text, but for its text; as jobs of the samples wrote
ID_BYTES = 6  # of a token id in a row
WIDTHS = {"int8": 1.0, "int4": 0.5}  # bytes of a number, where it is quantized
NOT_THE_SAME = (
    "dry_run",
    "overwrite",
    "source_name",
    "json",
    "quiet",
    "verbose",
    "log_file",
    "metrics",
    "metrics_label",
)  # dry run and job


@dataclasses.dataclass(frozen=True)
class JobEstimate:
    """Of `rows` rows, those that are not answered yet. None: not known. at_most: an upper bound. basis: what it is based on."""

    rows: int
    seconds: float | None
    memory_bytes: int | None
    disk_bytes: int
    at_most: bool
    basis: str

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def estimated(
    plan: JobPlan, rows: int, lengths: Sequence[tuple[int, int]], done: Done | None, held: int, text_bytes: float
) -> JobEstimate:
    """rows: that are left. lengths: of each of their answers, tokens of its prompt and of the longest answer. held: bytes of
    the job's files. text_bytes: of a token of text.
    """
    io, model = plan.spec.io, plan.spec.model
    before = done.totals if done and done.totals.rows >= FEW else None
    seconds, memory, basis = None, None, f"not measured: run lookahead calibrate --model {model.name}"
    if model.engine != "hf" or model.device_map or model.tp_plan:
        basis = "not measured: costs are known of one device and --engine hf only"
    else:
        memory, profile = _memory(plan, lengths), _profile(plan)
        if profile:
            seconds = _plain_seconds(plan, lengths, profile)
            basis = "plain decoding by the cost profile of this machine, idle but for the job, each answer as long as it may be"
    if before and io.out:
        first = _batch(plan) * (plan.spec.scale_out.workers or 1)
        start, of_row = start_and_pace([row.ended or 0.0 for row in read_record(io.out).rows], first)
        seconds = start + of_row * rows if rows else 0.0
        basis = f"as the {before.rows:,} rows before: {before.tokens / before.rows:,.0f} tokens, {of_row:.2f} s each"
        return JobEstimate(rows, seconds, memory, round(held + held / before.rows * rows + MANIFEST_BYTES), False, basis)
    tokens = sum(most for _, most in lengths)
    echoed = sum(prompt for prompt, _ in lengths) if io.echo else 0
    disk = held + rows * (ROW_BYTES + JOURNAL_BYTES) + MANIFEST_BYTES + (tokens + echoed) * text_bytes
    return JobEstimate(rows, seconds, memory, round(disk + tokens * ID_BYTES * io.token_ids), True, basis)


def start_and_pace(ended: Sequence[float], first: int) -> tuple[float, float]:
    """(seconds that a run takes longer for its first rows, seconds of a row then). ended: seconds after which each row had.
    first: rows that begin at once. Costs are measured and sources of drafts are learned alongside these.
    """
    if len(ended) < 2 * first:
        return 0.0, ended[-1] / len(ended)
    pace = (ended[-1] - ended[first - 1]) / (len(ended) - first)
    return max(0.0, ended[first - 1] - first * pace), pace


def _profile(plan: JobPlan) -> CostProfile | None:
    """The costs that were measured for this model on this machine, threads of a worker included."""
    model, workers = plan.spec.model, plan.spec.scale_out.workers or 1
    config, (device, dtype) = read_config(*model.source), device_and_dtype(model)
    threads = max(1, (model.threads or min(torch.get_num_threads(), usable_cores())) // workers) if device.type == "cpu" else 0
    setting = setting_of(config, model.name, processor_name(device), dtype, threads=threads, kv_dtype=model.kv_dtype)
    return cached_for(setting, model.quantize)


def _plain_seconds(plan: JobPlan, lengths: Sequence[tuple[int, int]], profile: CostProfile) -> float:
    """Seconds of plain decoding: prefill in chunks, and decode steps of as many rows as are decoded at once then."""
    chunk, workers = plan.spec.scale_out.prefill_chunk, plan.spec.scale_out.workers or 1
    batch, run, seconds = _batch(plan), PlainRun(chunk), 0.0
    context = sum(prompt + most / 2 for prompt, most in lengths) / max(1, len(lengths))
    for prompt, most in lengths[::workers]:
        run.add(prompt, max(1, most), batch)
        tokens = min(prompt, chunk)
        of_chunk = profile.forward_seconds(Forward(tokens, 1, prompt / 2), tokens - 1)
        seconds += of_chunk * max(1, prompt / chunk)
    run.finish()
    return seconds + sum(n * profile.forward_seconds(Forward(rows, rows, rows * context)) for rows, n in run.steps.items())


def _batch(plan: JobPlan) -> int:
    return plan.batch_size or rows_at_once(device_and_dtype(plan.spec.model)[0])


def _memory(plan: JobPlan, lengths: Sequence[tuple[int, int]]) -> int | None:
    """Bytes of a process: weights, keys and values. On a CPU also this process as it is, the files that weights are read from,
    and weights once more, as they are laid out for its kernels. None for a checkpoint or file in other bits than its dtype.
    """
    model = plan.spec.model
    config, (device, dtype) = read_config(*model.source), device_and_dtype(model)
    if Path(model.name).is_file() or getattr(config, "quantization_config", None):
        return None
    try:
        made = empty_model(config, model.trust_remote_code)
        values = sizes_of(made, config.get_text_config(decoder=True)).key_values
    except Exception:  # transformers raises many kinds: such a model has other layers
        return None
    weights = sum(each.numel() for each in made.parameters()) * WIDTHS.get(model.quantize, dtype.itemsize)
    longest = max((prompt + most for prompt, most in lengths), default=0)
    kept = min(_batch(plan), len(lengths)) * longest * values * WIDTHS.get(model.kv_dtype, dtype.itemsize)
    if device.type != "cpu":
        return round(weights + kept)
    folder = model_folder(model.name, model.revision)
    read = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder else 0
    stored = getattr(config, "dtype", None)  # what 16 bits hold stays in 16 bits
    laid_out = weights * min(1.0, stored.itemsize / dtype.itemsize if isinstance(stored, torch.dtype) else 1.0)
    return round(weights + laid_out + kept + read + peak_memory(device))


def keep(found: JobEstimate, options: Mapping[str, Any], inputs: Sequence[str]) -> None:
    """For the job of these options and inputs, where that can be done."""
    path = _path_of(options, inputs)
    with contextlib.suppress(OSError, LookaheadError):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, "w") as file:
                json.dump(found.as_json(), file)


def take(options: Mapping[str, Any], inputs: Sequence[str]) -> JobEstimate | None:
    """Take what `keep` has kept: a job that is begun again has other rows left."""
    try:
        path = _path_of(options, inputs)
        if path is None or not path.is_file():
            return None
        found = JobEstimate(**json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
        return found
    except (OSError, ValueError, TypeError):
        return None


def _path_of(options: Mapping[str, Any], inputs: Sequence[str]) -> Path | None:
    folder, about = cache_folder("estimates"), {name: value for name, value in options.items() if name not in NOT_THE_SAME}
    files = [Path(name).resolve() for name in (*inputs, str(about["out"]))]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in files[:-1]]
    key = hashlib.blake2b(json.dumps([about, [*map(str, files)], sizes]).encode(), digest_size=16).hexdigest()
    return folder / f"{key}.json" if folder else None
