"""What a job will take. In: tokens of its rows; what rows of it took that are answered, or costs of forwards measured earlier.
Out: seconds of answering, bytes of memory and of disk, and what they are based on.

Seconds per row are those of the rows that this job has answered: after `--limit 40` the others are estimated from 40. Where
none is answered, they are those of plain decoding by the cost profile of this model on this machine, each answer as long as
it may be: an upper bound, as nothing is known of how long answers are and how many drafts are accepted. Without a profile
there are none. A job that is resumed compares the first of these with what it took.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lookahead.budget.profile import CostProfile, Forward, cached_for
from lookahead.budget.speedup import PlainRun
from lookahead.files.outputs import model_folder
from lookahead.forward.memory import peak_memory
from lookahead.forward.processor import processor_name
from lookahead.forward.target import setting_of
from lookahead.job.lock import JobFiles
from lookahead.job.plan import JobPlan
from lookahead.job.record import RowRecord, read_record
from lookahead.job.setup import rows_at_once
from lookahead.models.load import device_and_dtype, empty_model, read_config, sizes_of
from lookahead.native.cores import usable_cores

FEW = 5  # rows: fewer that are answered tell little
ROW_BYTES, JOURNAL_BYTES, MANIFEST_BYTES = 230, 340, 5000  # of a row of text, but for its text; as jobs of the samples wrote
ID_BYTES = 6  # of a token id in a row
WIDTHS = {"int8": 1.0, "int4": 0.5}  # bytes of a number, where it is quantized


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


@dataclasses.dataclass(frozen=True)
class RowsBefore:
    """What earlier runs of a job took. start: seconds in addition to `of_row` of each row. held: bytes of the job's files."""

    rows: int
    tokens: int
    start: float
    of_row: float
    held: int

    def estimate(self, rows: int, memory_bytes: int | None = None) -> JobEstimate:
        """What `rows` others will take."""
        seconds = self.start + self.of_row * rows if rows else 0.0
        basis = f"as the {self.rows:,} rows before: {self.tokens / self.rows:,.0f} tokens, {self.of_row:.2f} s each"
        disk = round(self.held / self.rows * (self.rows + rows) + MANIFEST_BYTES)
        return JobEstimate(rows, seconds, memory_bytes, disk, False, basis)


def rows_before(files: JobFiles) -> RowsBefore | None:
    """None where too few are answered."""
    record = read_record(str(files.out))
    used = record.latest.get("used", {})
    rows = [row for row in record.rows if row.seconds]
    if len(rows) < FEW:
        return None
    start, of_row = start_and_pace(rows, used.get("batch_size", 1) * used.get("workers", 1))
    return RowsBefore(len(rows), sum(row.counts.tokens for row in rows), start, of_row, files.size())


def start_and_pace(rows: Sequence[RowRecord], at_once: int) -> tuple[float, float]:
    """(seconds of a run apart from those per row, seconds per row). at_once: answers that are decoded at once.

    While all slots are taken, rows end at the pace of Little's law: slots / (seconds that a row holds one). Not all are when
    a run begins or ends.
    """
    took, answers = rows[-1].ended or 0.0, [row.counts.first_tokens for row in rows]
    held = sum((row.seconds or 0.0) * count for row, count in zip(rows, answers, strict=True))
    pace = min(took, held / min(at_once, sum(answers))) / len(rows)
    return took - pace * len(rows), pace


def estimated(
    plan: JobPlan, rows: int, lengths: Sequence[tuple[int, int]], files: JobFiles | None, text_bytes: float
) -> JobEstimate:
    """rows: that are left. lengths: of each of their answers, tokens of its prompt and of the longest answer. files: of a job
    that is resumed. text_bytes: of a token of text.
    """
    io, model = plan.spec.io, plan.spec.model
    seconds, memory, basis = None, None, f"not measured: run lookahead calibrate --model {model.name}"
    if model.engine != "hf" or model.device_map or model.tp_plan:
        basis = "not measured: costs are known of one device and --engine hf only"
    else:
        memory, profile = _memory(plan, lengths), _profile(plan)
        if profile:
            seconds = _plain_seconds(plan, lengths, profile)
            basis = "plain decoding by the cost profile of this machine, idle but for the job, each answer as long as it may be"
    if files and (before := rows_before(files)):
        return before.estimate(rows, memory)
    tokens = sum(most for _, most in lengths)
    echoed = sum(prompt for prompt, _ in lengths) if io.echo else 0
    held = files.size() if files else 0
    disk = held + rows * (ROW_BYTES + JOURNAL_BYTES) + MANIFEST_BYTES + (tokens + echoed) * text_bytes
    return JobEstimate(rows, seconds, memory, round(disk + tokens * ID_BYTES * io.token_ids), True, basis)


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
