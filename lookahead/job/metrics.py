"""A running job in the Prometheus text format, for a collector that reads files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lookahead.errors import UsageError
from lookahead.files.atomic import replacing
from lookahead.job.totals import JobTotals

LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def labels_of(pairs: Iterable[str], job: str, model: str) -> dict[str, str]:
    """The labels of a job's metrics: its output, its model, and pairs such as "team=search", which win.

    Raises UsageError for what is not NAME=VALUE with a name that Prometheus takes, and for a name that is given twice.
    """
    given: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not LABEL.fullmatch(name):
            raise UsageError(
                f"--metrics-label {pair}: give NAME=VALUE, with a NAME of letters, digits and _, such as team=search."
            )
        if name == "source":
            raise UsageError(f"--metrics-label {pair}: source is the label of the draft source. Choose another name.")
        if name in given:
            raise UsageError(f"--metrics-label {pair}: {name} is given twice.")
        given[name] = value
    return {"job": job, "model": model, **given}


def write_metrics(path: Path, totals: JobTotals, gauges: Mapping[str, float | None], labels: Mapping[str, str]) -> None:
    """Replace the file at `path`. gauges: further values by name; None is left out. labels: of every value."""
    with replacing(path, "w") as file:
        file.write(metrics_text(totals, gauges, labels))


def metrics_text(totals: JobTotals, gauges: Mapping[str, float | None], labels: Mapping[str, str] | None = None) -> str:
    """One family after the other, each with its help and type."""
    edl = totals.rounded_edl
    of_all = ",".join(f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items())
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
            "Draft tokens accepted, by draft source.",
            [(f'source="{_escaped(name)}"', count) for name, count in sorted(totals.accepted_by_source.items())],
        ),
        ("busy_seconds_total", "counter", "Seconds spent in answering.", [("", round(totals.seconds, 3))]),
        *([] if edl is None else [("edl", "gauge", "Effective decoding length: tokens per decode step.", [("", edl)])]),
    ]
    for name, value in gauges.items():
        if value is not None:
            families.append((name, "gauge", f"{name.replace('_', ' ').capitalize()}.", [("", round(value, 4))]))
    lines = []
    for name, kind, help_text, samples in families:
        lines += [f"# HELP lookahead_{name} {help_text}", f"# TYPE lookahead_{name} {kind}"]
        for own, value in samples:
            both = ",".join(filter(None, (of_all, own)))
            lines.append(f"lookahead_{name}{{{both}}} {value}" if both else f"lookahead_{name} {value}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    label = label.encode("utf-8", "replace").decode("utf-8")  # a name's bytes may be no UTF-8
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
