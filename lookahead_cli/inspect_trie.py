"""lookahead inspect-trie: what a trie holds and how it would draft."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.bench.options import InspectOptions
from lookahead.errors import UsageError
from lookahead_cli import render
from lookahead_cli.options import Common, Resources, Some, given, with_groups

if TYPE_CHECKING:
    from lookahead.bench.trie_report import Drafted, TrieReport

SHOWN = 40  # characters of a document


@with_groups
def command(
    context: typer.Context, options: Annotated[InspectOptions, Some()], common: Annotated[Common, Some("overwrite json config")]
) -> None:
    """Inspect a trie: size, sources, nodes by depth, most frequent branches. Writes nothing except --plot and --export.

    Example: lookahead inspect-trie answers.trie --query "The answer is"

    Next: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl
    """
    from lookahead.files.outputs import DOCUMENTS, PICTURE, Input, Output

    query, documents, coverage = options.query, options.documents, options.coverage
    if (query is None or documents) and given(context, "decoding_length"):
        raise UsageError("--decoding-length is the size of the tree of a query: --query TEXT.")
    if documents and coverage is not None:
        raise UsageError("--documents lists what the trie holds: leave --coverage out.")
    if options.export is not None and not documents:
        raise UsageError("--export writes what --documents lists: give both.")
    if options.plot is not None and coverage is None:
        raise UsageError("--plot needs held-out text to measure on: --coverage FILE.")
    outputs = [Output("--plot", options.plot, PICTURE), Output("--export", options.export, DOCUMENTS)]
    tokenizer = Input("--tokenizer", [options.tokenizer], hub=True)
    common.check(outputs, [Input("TRIE", [options.trie]), Input("--coverage", [coverage]), tokenizer])
    if documents:
        show_documents(options, common.json)
        return
    found = inspect(options)
    if common.json:
        render.print_json(found.as_json())
    else:
        show(found, tables=query is None or bool(given(context, "top")))


def show_documents(options: InspectOptions, json: bool) -> None:
    """List the documents that contain the query's text, and write all of them to the file of --export."""
    from lookahead.bench.trie_report import held_documents, load_tokenizer_of
    from lookahead.files.atomic import replacing
    from lookahead.printable import json_text
    from lookahead.trie.file import Trie

    opened, query, export = Trie(options.trie), options.query, options.export
    if options.verify:
        opened.verify()
    loaded = load_tokenizer_of(opened, options.tokenizer, needed=query is not None)
    listed, matching, held_in_all = [], 0, opened.header.documents
    with replacing(export, "w") if export is not None else contextlib.nullcontext() as file:
        for matching, held in enumerate(held_documents(opened, loaded, query or ""), 1):
            if matching <= options.top:
                listed.append(held)
            if file is not None:
                row = {"number": held.number, "source": held.source, "ids": held.ids}
                file.write(json_text({**row, **({} if held.text is None else {"text": held.text})}, "utf-8") + "\n")
    if json:
        rows = [{"number": d.number, "source": d.source, "tokens": len(d.ids), "text": d.text} for d in listed]
        counts = {"documents": held_in_all, "matching": matching}
        render.print_json({"trie": options.trie, **counts, "exported": export, "listed": rows})
        return
    which = f"{matching:,} of {held_in_all:,} documents" + (f" contain {query!r}" if query else "")
    render.table(
        which, ["number", "source", "tokens", "begins with"],
        [(d.number, d.source, len(d.ids), repr(d.shown[:SHOWN]) if d.text is not None else d.shown[:SHOWN]) for d in listed],
    )  # fmt: skip
    if matching > len(listed) and export is None:
        render.notice(f"--top {matching} lists them all, --export FILE writes them")
    if export is not None:
        render.notice(f"documents written to {export}: {matching:,}")


def inspect(options: InspectOptions) -> TrieReport:
    """Look into a trie, and draw EDL by size to the file of --plot."""
    from lookahead.bench.trie_report import report_on
    from lookahead.trie.file import Trie

    found = report_on(Trie(options.trie), options, Resources().resources(), render.with_spinner)
    if options.plot is not None and found.curve is not None:
        from lookahead.bench.plot import draw_capacity

        draw_capacity(list(found.curve), f"{options.trie} on {options.coverage}", options.plot)
    return found


def show(found: TrieReport, tables: bool = True) -> None:
    """The draft tree of a query, facts, EDL. tables: also what the trie holds."""
    if found.drafted is not None:
        _show_query(found, found.drafted)
    facts = _facts(found)
    render.facts(facts if tables else [fact for fact in facts if fact[0] in ("trie", "integrity")])
    if tables:
        render.sources("Sources", found.trie.header)
        render.table(
            "Nodes by depth", ["depth", "nodes", "branching", "seen once"],
            [(str(d.depth), d.nodes, f"{d.branching:.2f}", f"{d.singletons:.1%}") for d in found.seen.depths],
        )  # fmt: skip
        if found.seen.top:
            texts = ((str(ids) if (text := found.text(ids)) is None else repr(text), count) for ids, count in found.seen.top)
            what = "text" if found.tokenizer is not None else "token ids"
            render.table("Most frequent branches of 4 tokens", [what, "count"], list(texts))
    if found.replayed is not None:
        edl, drafted = found.replayed.edl, found.replayed.as_json()["draft_tokens_per_step"]
        line = f"{found.asked.coverage}: EDL {edl:.2f} at {drafted} draft tokens a step, {found.replayed.tokens:,} tokens"
        render.facts([("coverage", line)])
    if found.curve is not None:
        render.table(
            "EDL by size", ["tokens kept", "size", "EDL"],
            [(f"{c.tokens:,}" if c.tokens else "no trie", render.size(c.bytes), f"{c.edl:.2f}") for c in found.curve],
        )  # fmt: skip
        render.notice(f"drawn to {found.asked.plot}")


def _facts(found: TrieReport) -> list[tuple[str, str]]:
    path, header, size = found.asked.trie, found.trie.header, render.size(found.trie.path.stat().st_size)
    built = time.strftime("%Y-%m-%d %H:%M", time.localtime(header.created))
    vocabulary = f"vocab {header.vocab_size:,}, {header.tokenizer_fingerprint or '-'}"
    facts = [
        ("trie", f"{path}  ({size}, format {header.version}, content {header.content_hash})"),
        ("tokens", f"{header.tokens:,} in {header.documents:,} documents, {header.branches:,} branches"),
    ]
    if len(header.segments) > 1:
        sizes = ", ".join(f"{segment.tokens:,}" for segment in header.segments)
        joining = f"to join them: lookahead merge-tries {path} -o {path}"
        facts.append(("segments", f"{len(header.segments)} of {sizes} tokens; {joining}"))
    facts.append(("tokenizer", f"{header.tokenizer_name or 'none (ids)'}  ({vocabulary})"))
    facts.append(("built", f"{built} by lookahead {header.tool_version}"))
    if found.asked.verify:
        facts.append(("integrity", "every checksum and invariant holds"))
    return facts


def _show_query(found: TrieReport, drafted: Drafted) -> None:
    from lookahead.draft.explain import Line, outline
    from lookahead_cli.explain import draw, shown

    def seen(line: Line) -> str:
        of_node = drafted.evidence[line.nodes[0]]
        return f"{of_node.count:,} of {of_node.of:,} times" if of_node else ""

    match = drafted.match
    text = shown(found.tokenizer, drafted.context.tolist())
    render.out.print(f"Draft tree of {drafted.tree.draft_tokens} tokens", style="bold")
    if match.length:
        render.out.print(f"{text}  last {match.length} tokens seen {match.count:,} times")
    else:
        render.out.print(f"{text}: its last token is not in the corpus.")
    draw(render.out, outline(drafted.tree, drafted.source_names), found.tokenizer, seen)
