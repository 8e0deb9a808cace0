"""What people see of draft trees: `--explain` of generate and bench --replay, and `inspect-trie --query`.

    ✓ ' The robe takes'     92-71%   match 4  trie:answers
    → ├ '*'                                   the model
      ├ ' 2 bolts of blue'  31-12%   match 9  prompt
      │ ├ ' fiber'              8%  match 13  prompt
      │ └ '.'                   2%   match 2  output
      └ ' a total of'         9-4%   match 3  trie:answers

Tokens that follow each other without a fork share a line, so that copied text reads as text; indentation grows at forks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from lookahead.printable import in_one_line
from lookahead_cli.render import abandon_stdout

if TYPE_CHECKING:
    from lookahead.draft.explain import Line, Observer, Outline, Step

LEGEND = (
    "✓ accepted   → the token that the model emits after the accepted ones\n"
    "47-11%: probability that the path is accepted up to the line's first and last token\n"
    "match 6: the 6 tokens before the line also precede the draft in its source"
)
SIGNS = {"accepted": "✓ ", "own": "→ ", "drafted": "  "}
STYLES = {"accepted": "bold green", "own": "bold yellow", "drafted": ""}
PLAIN = str.maketrans("✓→├└│…", "+>|`|~")  # where the output knows no such characters
NARROWEST = 12  # characters that text may always take, however deep its branch
LONGEST_SOURCE = 24  # characters


class Explainer:
    """Draws the steps of rows as they happen."""

    def __init__(self, console: Console, tokenizer: Any | None, rows: int, name: str = ""):
        """rows: the first that many are watched. name: of what is watched, stands before the row's number."""
        self.console, self.tokenizer, self.rows, self.name = console, tokenizer, rows, name
        self._row = 0  # the one that is shown

    def observer_of(self, row: int) -> Observer | None:
        """Who receives the steps of a row."""
        return (lambda step: self.show(row, step)) if row <= self.rows else None

    def show(self, row: int, step: Step) -> None:
        """Print one step. When the reader leaves, that is the end of the explanation, not of the job."""
        try:
            self._print(row, step)
        except BrokenPipeError:
            self.rows = 0
            abandon_stdout()

    def _print(self, row: int, step: Step) -> None:
        """The end of the text so far, the tree, and how much of it was accepted."""
        if not self._row:
            print_text(self.console, Text(LEGEND, "dim"))
        if self._row != row:
            print_text(self.console, Text(f"\n{in_one_line(self.name)}row {row}", "bold"))
        self._row = row
        heading, found = Text(f"\nstep {step.number}  ", "bold"), step.outline()
        room = self.console.width - heading.cell_len
        print_text(self.console, heading.append(end_of(shown(self.tokenizer, step.context), room), "cyan"))
        draw(self.console, found, self.tokenizer)
        left_out = f", {found.left_out} less probable ones not shown" if found.left_out else ""
        counts = f"accepted {len(step.accepted)} of {step.tree.draft_tokens} drafted{left_out}"
        print_text(self.console, Text(counts, "bold"))


def draw(console: Console, found: Outline, tokenizer: Any | None, more: Callable[[Line], str] = lambda line: "") -> None:
    """Print a tree. more(line): what else there is to print about a line."""
    if not found.lines:
        return
    texts = [Text(shown(tokenizer, line.token_ids, line.before), STYLES[line.kind]) for line in found.lines]
    columns = [(*_about(line), more(line)) for line in found.lines]
    widths = [max(map(cell_len, column)) for column in zip(*columns, strict=True)]
    deepest = max(2 * len(line.forks) for line in found.lines)
    needed = max(2 * len(line.forks) + text.cell_len for line, text in zip(found.lines, texts, strict=True))
    left = console.width - sum(width + 2 for width in widths if width) - len(SIGNS["drafted"])
    room = min(needed, max(left, deepest + NARROWEST))
    for line, text, (probability, match, source, rest) in zip(found.lines, texts, columns, strict=True):
        begin, on = guides(line)
        wide = room - len(on)
        about = f"  {probability:>{widths[0]}}  {match:>{widths[1]}}  {source:<{widths[2]}}  {rest}"
        for number, part in enumerate(text.wrap(console, wide, overflow="fold")):
            if number == 0:
                before, behind = (SIGNS[line.kind], STYLES[line.kind]), (" " * (wide - part.cell_len) + about, "dim")
                drawn = Text.assemble(before, (begin, "dim"), part, behind)
            else:
                drawn = Text.assemble((SIGNS["drafted"] + on, "dim"), part)
            drawn.rstrip()
            print_text(console, drawn)


def print_text(console: Console, text: Text) -> None:
    """Print a line, with what the console's encoding does not know replaced character by character."""
    if not console.encoding.startswith("utf"):
        text.plain = text.plain.translate(PLAIN).encode(console.encoding, "replace").decode(console.encoding)
    console.print(text)


def guides(line: Line) -> tuple[str, str]:
    """Return what stands before the first part of a line, and before what does not fit next to it."""
    on = "".join("  " if last else "│ " for last in line.forks)
    return (on[:-2] + ("└ " if line.forks[-1] else "├ ") if line.begins else on), on


def shown(tokenizer: Any | None, token_ids: Sequence[int], before: int | None = None) -> str:
    """Tokens as quoted text, or as ids without a tokenizer. before: the token in front, which may decide about a blank."""
    if tokenizer is None:
        return " ".join(map(str, token_ids))
    if before is None:
        return repr(str(tokenizer.decode(token_ids)))
    front, whole = str(tokenizer.decode([before])), str(tokenizer.decode([before, *token_ids]))
    return repr(whole[len(front) :] if whole.startswith(front) else str(tokenizer.decode(token_ids)))


def end_of(text: str, width: int) -> str:
    """The end of a text that fits into `width` columns."""
    return text if cell_len(text) <= width else "…" + set_cell_size(text[::-1], width - 1)[::-1].lstrip()


def percent(share: float) -> str:
    """A share in as many digits as tell it from nothing."""
    if share >= 0.0095:
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.00095 else "<0.1%"


def _about(line: Line) -> tuple[str, str, str]:
    """Probability, match and source."""
    if line.kind == "own":
        return "", "", "the model"
    first, last, source = percent(line.first), percent(line.last), in_one_line(line.source)
    source = source if len(source) <= LONGEST_SOURCE else source[: LONGEST_SOURCE - 1] + "…"
    return first if first == last else f"{first.rstrip('%')}-{last}", f"match {line.match}", source
