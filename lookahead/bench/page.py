"""Pages that a person sends to a colleague. In: a job's record, or a bench. Out: one HTML page, for narrow and wide screens, in
light and dark, that needs no network and no scripts.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from lookahead.bench.plot import as_svg
from lookahead.bench.report import comparison_parts, figures_of, panel_figure, panels
from lookahead.job.progress import why_no_drafts
from lookahead.job.record import JobRecord, Table, shown_edl, tables
from lookahead.job.spec import OPTIONS
from lookahead.options import typed
from lookahead.printable import duration, in_one_line

if TYPE_CHECKING:
    from lookahead.bench.compare import Comparison

STYLE = """
:root { color-scheme: light dark; --line: light-dark(#d8d8de, #3a3a42); --soft: light-dark(#5c5c66, #a5a5b0) }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; font-family: system-ui, sans-serif; line-height: 1.45 }
h1 { margin: 0; font-size: 1.5rem; overflow-wrap: anywhere } h2 { margin: 2.5rem 0 .5rem; font-size: 1.2rem }
h3 { margin: 1.2rem 0 .3rem; font-size: .95rem } p { max-width: 46rem; margin: .4rem 0 } .soft, dt { color: var(--soft) }
.wide { overflow-x: auto } svg { max-width: 100%; height: auto } figure svg { width: 100% }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: .8rem; margin: 1.2rem 0 }
@media (max-width: 66rem) { .tiles { grid-template-columns: repeat(3, 1fr) } }
@media (max-width: 34rem) { .tiles { grid-template-columns: repeat(2, 1fr) } }
.tiles div { padding: .7rem .9rem; border: 1px solid var(--line); border-radius: .6rem }
.tiles b { display: block; font-size: 1.2rem; line-height: 1.3 }
.tiles span { display: block; font-size: .85rem; color: var(--soft) }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: .5rem 2.5rem }
.grid.rows { grid-template-columns: minmax(0, 1fr) }
.grid > * { min-width: 0; margin: 0 } figure { max-width: 36rem }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--line) }
td { max-width: 20rem; overflow-wrap: break-word } .n { text-align: right } td.n { white-space: nowrap }
th { font-weight: 600; vertical-align: bottom }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; font-size: .9rem }
dd { margin: 0; overflow-wrap: anywhere }
"""
SECTIONS = {  # by what panels are about: title, tables
    "time": ("Speed over time", ()),
    "sources": ("Whose drafts were accepted", ("sources",)),
    "drafts": ("How drafts fared", ("drafts", "edl")),
    "lengths": ("By row length", ("prompts", "answers")),
    "rows": ("Rows to look at", ("slowest", "extremes", "failed")),
}
ABOUT = """<p>EDL, the effective decoding length, is the number of tokens emitted per decode step; plain decoding emits one.
Speedup is that over plain decoding, as a clock would give it for the same job with --strategy off: it is measured on plain
steps that the job takes now and then, and given as an interval of two standard deviations. Seconds of a row are those from its
first step to its last, with the other rows of its batch alongside.</p>"""


def _html_page(title: str, body: Sequence[str]) -> str:
    """A whole page. body: HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>"
    )
    lines = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{lines}</body></html>\n'


def job_page(record: JobRecord) -> str:
    """A page about a job, finished or running."""
    found, drawn = tables(record), panels(record)
    body = [f"<h1>{_text(record.name)}</h1>", f'<p class="soft">{_text(_of_run(record))}</p>', _tiles(record), ABOUT]
    for about, (title, names) in SECTIONS.items():
        figures = [_figure(record, f"{about}{n}", *panel) for n, panel in enumerate(drawn.get(about, ()))]
        parts = [*figures, *(_table(found[name]) for name in names if name in found)]
        if about == "drafts" and (why := why_no_drafts(record.latest.get("used", {}))):
            parts.insert(0, f"<p>No drafts {_text(why)}.</p>")
        if parts:
            body += [f"<h2>{title}</h2>", f'<div class="grid {about}">{"".join(parts)}</div>']
    if record.latest:
        runs = _table(found["runs"]) if "runs" in found else ""
        body += ["<h2>How it was run</h2>", _listed(_facts(record.latest)), runs]
    return _html_page(f"lookahead report: {record.name}", body)


def bench_page(comparisons: Sequence[Comparison], command_line: str, problems: Sequence[str], sweep: bool) -> str:
    """A page about a bench: all that a terminal shows, and figures. problems: rows that were left out."""
    body = []
    for each in comparisons:
        run = each.auto or each.best
        body.append(f"<h1>{run.speedup:.2f}x plain decoding ({_text(run.name)}, batch {each.batch_size})</h1>")
        parts = comparison_parts(each, sweep, whole=True)
        body += [_table(part) if isinstance(part, Table) else f"<p>{_text(part)}</p>" for part in parts]
    body.append(_listed([("command", command_line), *comparisons[0].environment.items()]))
    body += [f"<p>left out {_text(problem)}</p>" for problem in problems]
    figures = (figure for each in comparisons for figure in figures_of(each, sweep))
    body += [f"<h2>{_text(name)}</h2>\n{as_svg(figure, f'f{n}')}" for n, (name, figure) in enumerate(figures)]
    return _html_page(f"lookahead bench: {comparisons[0].model}", body)


def _listed(facts: Iterable[tuple[str, Any]]) -> str:
    return f"<dl>{''.join(f'<dt>{_text(name)}</dt><dd>{_text(value)}</dd>' for name, value in facts)}</dl>"


def _of_run(record: JobRecord) -> str:
    """Model, settings and state in a line."""
    run, state = record.latest, record.state
    options, used = run.get("options", {}), run.get("used", {})
    parts = [record.model, used.get("path") or options.get("dtype"), "plain decoding" if _is_plain(record) else ""]
    parts += [f"{name.replace('_', ' ')} {used[name]}" for name in ("workers", "batch_size") if name in used]
    if record.updated:
        zone = datetime.timezone(datetime.timedelta(seconds=run.get("utc_offset", 0)))
        as_of = f"{datetime.datetime.fromtimestamp(record.updated, zone):%Y-%m-%d %H:%M:%S %Z}"
        parts.append(f"{state}, {'as of ' if state == 'running' else ''}{as_of}")
    return ", ".join(filter(None, parts))


def _is_plain(record: JobRecord) -> bool:
    return bool(record.latest.get("options", {}).get("strategy") == "off")


def _tiles(record: JobRecord) -> str:
    """The figures that a reader looks for first."""
    totals, speedup, runs = record.totals, record.speedup, record.runs
    seconds, loading = (sum(run.get(name, 0.0) for run in runs) for name in ("run_seconds", "loading_seconds"))
    seconds = max(seconds, totals.seconds)  # a journal knows of rows that a manifest does not know yet
    why = next((run["speedup_not_measured"] for run in reversed(runs) if "speedup_not_measured" in run), "")
    why = "" if speedup else "this is plain decoding" if _is_plain(record) else why
    tiles = [
        (str(speedup).removesuffix(" plain") if speedup else "not measured", "speedup over plain", why),
        (f"{totals.tokens / seconds:,.0f}" if seconds else "-", "tokens/s", "prefill included"),
        (shown_edl(totals.edl), "EDL", "tokens per decode step"),
        (f"{totals.rows:,}", "rows", f"{totals.errors:,} failed"),
        (f"{totals.tokens:,}", "tokens", f"to prompts of {totals.prompt_tokens:,}"),
        (duration(seconds), "of answering", f"after {duration(loading)} of loading" if loading else ""),
    ]
    shown = (f"<div><b>{_text(value)}</b>{name}<span>{_text(note)}</span></div>" for value, name, note in tiles)
    return f'<div class="tiles">{"".join(shown)}</div>'


def _figure(record: JobRecord, name: str, title: str, draw: Callable[[Any, JobRecord], None]) -> str:
    svg = as_svg(panel_figure(record, draw), name).replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
    return f"<figure><h3>{title}</h3>{svg}</figure>"


def _table(table: Table) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        kinds = ("" if number < table.left else ' class="n"' for number in range(len(cells)))
        return f"<tr>{''.join(f'<{tag}{kind}>{_text(cell)}</{tag}>' for kind, cell in zip(kinds, cells, strict=True))}</tr>"

    lines = line("th", table.columns), *(line("td", row) for row in table.rows)
    return f'<div><h3>{_text(table.title)}</h3><div class="wide"><table>{"".join(lines)}</table></div></div>'


def _facts(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options of a run that differ from their defaults, versions, machine."""
    for name, value in run.get("options", {}).items():
        if name not in OPTIONS or value != OPTIONS[name].field.default:
            shown = " ".join(map(str, value)) if isinstance(value, list) else "yes" if value is True else str(value)
            yield typed(name), shown
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    yield from (("versions", versions), ("machine", str(run.get("machine", ""))))


def _text(value: Any) -> str:
    return escape(in_one_line(str(value)))
