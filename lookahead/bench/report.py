"""A bench as one HTML page: no network, readable in light and dark. In: measured runs. Out: the page's text.

Everything from outside (names of models, sources and files, the command line) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lookahead.bench.plot import BLUE, GREY, as_svg, bare, comparison_figure, drawing, shades, title_of
from lookahead.bench.sweep import in_words, sweep_figure
from lookahead.printable import in_one_line

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison
    from lookahead.bench.lossless import Divergence
    from lookahead.bench.run import Run

PARTS = {"draft": "#e08a1e", "forward": BLUE, "verify": "#2fa36b", "rest": GREY}  # of a run's time
MOST_SHOWN = 12  # runs in such a figure
DEEPEST = 32  # depth that the figure goes to

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --ground: #ffffff; --soft: #66666f; --line: #d9d9de; --blue: #2a6fdb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ec; --ground: #17171a; --soft: #a0a0aa; --line: #3a3a40; --blue: #7aa9f7; }
}
body { color: var(--ink); background: var(--ground); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
.headline { font-size: 2rem; font-weight: 650; color: var(--blue); margin: .6rem 0 0; }
.soft { color: var(--soft); margin: .2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: right; padding: .2rem .8rem .2rem 0; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.ours td:first-child { color: var(--blue); font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 4px; padding: .6rem .8rem; }
svg { color: var(--ink); max-width: 100%; height: auto; }
"""


def report_page(comparisons: Sequence[Comparison], command_line: str, problems: Sequence[str] = (), swept: bool = False) -> str:
    """The page. command_line: that made it. problems: rows that were left out. swept: the runs are those of a sweep."""
    first = comparisons[0]
    body = [f"<h1>{escape(title_of(first))}</h1>", *(_headline(each) for each in comparisons)]
    for number, comparison in enumerate(comparisons):
        body += _section(comparison, number, swept)
    body += ["<h2>How it was measured</h2>", f"<pre>{escape(command_line)}</pre>", _method(first)]
    body += [f'<p class="soft">left out {escape(problem)}</p>' for problem in problems]
    body.append(table(["", ""], [(name, str(value)) for name, value in first.environment.items()]))
    return html_page(f"lookahead bench: {first.model}", body)


def html_page(title: str, body: Sequence[str]) -> str:
    """A page of these elements; the title is escaped."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _headline(comparison: Comparison) -> str:
    """Speedup of auto where it ran, else of the fastest; the verdict."""
    run, plain = comparison.auto or comparison.best, comparison.runs[0]
    low, high = run.speedup_spread
    return (
        f'<p class="headline">{run.speedup:.2f}x plain decoding</p>\n'
        f'<p class="soft">{escape(run.name)}, batch {comparison.batch_size}; quartiles of the turns {low:.2f} to {high:.2f}; '
        f"{run.tokens_per_second:,.1f} against {plain.tokens_per_second:,.1f} tokens/s; EDL {run.edl:.2f}</p>"
    )


def _section(comparison: Comparison, number: int, swept: bool) -> list[str]:
    """All of one batch size."""
    body = [f"<h2>Batch {comparison.batch_size}</h2>", _runs(comparison)]
    if swept:
        body += [f"<p>{escape(in_words(comparison))}</p>", "<h3>Decoding and branch length</h3>"]
        body.append(as_svg(sweep_figure([comparison]), f"sweep{number}"))
    body += ["<h3>Speed and EDL</h3>", as_svg(comparison_figure([comparison], titled=False), f"speed{number}")]
    if any(run.time_split for run in _shown(comparison)):
        body += ["<h3>Where the time went</h3>", as_svg(_time_figure(comparison), f"time{number}")]
    if any(run.counts.accepted_by_source for run in _shown(comparison)):
        body += ["<h3>Whose drafts were accepted, and how deep</h3>", as_svg(_accepted_figure(comparison), f"accepted{number}")]
    return [*body, "<h3>Lossless</h3>", *_verdict(comparison)]


def _runs(comparison: Comparison) -> str:
    rows = []
    for run in comparison.runs:
        low, high = run.speedup_spread
        forward_ms = run.forward_ms()
        rows.append(
            (
                run.name,
                f"{run.tokens_per_second:,.1f}",
                f"{run.speedup:.2f}x",
                f"{low:.2f} to {high:.2f}",
                f"{run.edl:.2f}",
                f"{run.counts.draft_tokens_per_step:.1f}",
                f"{run.draft_tokens_wasted / max(1, run.steps):.1f}",
                f"{forward_ms:.2f}" if forward_ms else "-",
                f"{run.peak_memory_bytes / 2**20:,.0f}" if run.peak_memory_bytes else "-",
            )
        )
    columns = ["decoding", "tokens/s", "speedup", "quartiles", "EDL", "drafted", "wasted", "forward ms", "peak MiB"]
    return table(columns, rows, ours=[run.drafts for run in comparison.runs])


def _time_figure(comparison: Comparison) -> Any:
    """Bars of the shares of time."""
    pyplot = drawing()

    known = [(run, run.time_split) for run in _shown(comparison)[::-1] if run.time_split]
    figure, axis = pyplot.subplots(figsize=(10, 0.34 * len(known) + 1.1), layout="constrained")
    begin = [0.0] * len(known)
    for part, colour in PARTS.items():
        shares = [100 * getattr(split, part) / run.seconds for run, split in known]
        axis.barh([run.name for run, _ in known], shares, left=begin, color=colour, label=part)
        begin = [left + share for left, share in zip(begin, shares, strict=True)]
    axis.set_xlabel("share of the time (%)")
    axis.set_xlim(0, 100)
    axis.margins(y=0.02)
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    bare(axis)
    return figure


def _accepted_figure(comparison: Comparison) -> Any:
    """Bars of accepted tokens by source; of the steps that drafted so deep, the share in which that was accepted."""
    pyplot = drawing()

    runs = [run for run in _shown(comparison) if run.counts.accepted_by_source]
    sources = list(dict.fromkeys(source for run in runs for source, _ in run.counts.accepted_by_source.most_common()))
    figure, (by_source, by_depth) = pyplot.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    begin = [0.0] * len(runs)
    for source, colour in zip(sources, shades(len(sources)), strict=True):
        shares = [100 * run.counts.accepted_by_source[source] / sum(run.counts.accepted_by_source.values()) for run in runs]
        by_source.barh([run.name for run in runs], shares, left=begin, color=colour, label=in_one_line(source))
        begin = [left + share for left, share in zip(begin, shares, strict=True)]
    by_source.invert_yaxis()
    by_source.set_xlim(0, 100)
    by_source.set_xlabel("share of accepted tokens by source (%)")
    by_source.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=8)
    for run, colour in zip(runs, shades(len(runs), second=True), strict=True):
        found = [(depth, 100 * accepted / offered) for depth, offered, accepted in run.accepted_by_depth if depth <= DEEPEST]
        by_depth.plot([depth for depth, _ in found], [share for _, share in found], "-", color=colour, label=run.name)
    by_depth.set_xlabel("depth (draft tokens below the root)")
    by_depth.set_ylabel("accepted (% of steps that deep)")
    by_depth.set_ylim(0, 100)
    by_depth.legend(frameon=False, fontsize=8)
    for axis in (by_source, by_depth):
        bare(axis)
    return figure


def _shown(comparison: Comparison) -> list[Run]:
    """Runs in the figures that show how each of them worked: where there are many, plain, auto and the fastest."""
    chosen = (comparison.runs[0], comparison.auto, comparison.best)
    return [run for run in comparison.runs if len(comparison.runs) <= MOST_SHOWN or run in chosen]


def _verdict(comparison: Comparison) -> list[str]:
    if comparison.forced:
        return [
            "<p>The logged answers were taken as the model's choices: all runs emit them, and there is nothing to compare.</p>"
        ]
    found = comparison.lossless
    if found is None:
        return ["<p>Not checked.</p>"]
    of_first = f" (of the first {comparison.lossless_rows} prompts)" if comparison.lossless_rows < comparison.rows else ""
    others = f"scores too, bit for bit; {found.different}" if found.exact else f"{found.near_tie} near-ties, {found.different}"
    body = [
        f"<p>{found.identical} of {found.checked} outputs{of_first} are identical to plain decoding, token id for token id; "
        f"{others} different.</p>"
    ]
    if found.shown:
        columns = ["kind", "prompt", "run", "after tokens", "expected", "got", "scores", "within rounding up to"]
        body.append(table(columns, map(_divergence, found.shown)))
        if len(found.divergences) > len(found.shown):
            body.append(f'<p class="soft">The first {len(found.shown)} of {len(found.divergences)}.</p>')
    return body


def _divergence(found: Divergence) -> tuple[str, ...]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.6g}"

    scores = f"{shown(found.expected_score)}, {shown(found.got_score)}"
    tokens = ("the end" if token is None else str(token) for token in (found.expected, found.got))
    return found.kind, str(found.row), found.run, str(found.place), *tokens, scores, shown(found.tolerance)


def _method(comparison: Comparison) -> str:
    repeats = f", {comparison.repeats} times; a turn counts as its repeat of median time did" if comparison.repeats > 1 else ""
    asked = f"{comparison.rows} {'logged answers' if comparison.forced else 'prompts'}"
    return (
        f"<p>All contenders answered the same {asked} in turn{repeats}. The first ones were run once beforehand and are not "
        "counted. Speedup is tokens/s over those of plain decoding in the same run; its quartiles are over the turns. EDL is "
        "tokens gained per decode step; drafted and wasted are tokens per decode step of a row; forward ms is the median of "
        "decode steps.</p>"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], ours: Sequence[bool] | None = None) -> str:
    """ours: rows that stand out."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f'<tr class="ours">{cells}</tr>' if ours and ours[number] else f"<tr>{cells}</tr>")
    head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="wide"><table>{head}<tbody>\n' + "\n".join(lines) + "\n</tbody></table></div>"
