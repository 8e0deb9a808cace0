"""A running job in the Prometheus text format, for a collector that reads files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lookahead.atomic import replacing
from lookahead.job.totals import JobTotals


def write_metrics(path: Path, totals: JobTotals, gauges: Mapping[str, float | None]) -> None:
    """Replace the file at `path`. gauges: further values by name; None is left out."""
    with replacing(path, "w") as file:
        file.write(metrics_text(totals, gauges))


def metrics_text(totals: JobTotals, gauges: Mapping[str, float | None]) -> str:
    """One family after the other, each with its help and type."""
    families: list[tuple[str, str, str, list[tuple[str, float]]]] = [
        ("rows_total", "counter", "Rows written, failed ones included.", [("", totals.rows)]),
        ("rows_failed_total", "counter", "Rows written as errors.", [("", totals.errors)]),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", [("", totals.prompt_tokens)]),
        ("completion_tokens_total", "counter", "Tokens of answers.", [("", totals.tokens)]),
        ("decode_steps_total", "counter", "Decode steps, summed over rows.", [("", totals.steps)]),
        ("draft_tokens_total", "counter", "Tokens drafted.", [("", totals.draft_tokens)]),
        (
            "accepted_tokens_total",
            "counter",
            "Draft tokens accepted, by who guessed them.",
            [(f'{{source="{_escaped(name)}"}}', count) for name, count in sorted(totals.accepted_by_source.items())],
        ),
        ("busy_seconds_total", "counter", "Seconds spent in answering.", [("", round(totals.seconds, 3))]),
        ("edl", "gauge", "Effective decoding length: tokens per decode step.", [("", round(totals.edl, 4))]),
    ]
    for name, value in gauges.items():
        if value is not None:
            families.append((name, "gauge", f"{name.replace('_', ' ').capitalize()}.", [("", round(value, 4))]))
    lines = []
    for name, kind, help_text, samples in families:
        lines += [f"# HELP lookahead_{name} {help_text}", f"# TYPE lookahead_{name} {kind}"]
        lines += [f"lookahead_{name}{labels} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
