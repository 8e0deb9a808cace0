"""lookahead inspect-trie: what a trie holds and how it would draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lookahead_cli.options import Config, Context, Json, Overwrite, effort_of
from lookahead_cli.parameters import given

if TYPE_CHECKING:
    from lookahead.bench.trie_report import Drafted, TrieQuestions, TrieReport


SHOWN = 40  # characters of a document


def command(
    trie: Annotated[str, typer.Argument(metavar="TRIE", help="Trie file to read.")],
    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            metavar="TEXT",
            help="Draw only the draft tree that would be verified after this text. For a trie of ids: ids, such as 5 6 7.",
        ),
    ] = None,
    decoding_length: Annotated[
        int,
        typer.Option(
            "--decoding-length",
            min=2,
            max=1024,
            metavar="N",
            help="Size of the tree of --query: its last token + draft tokens.",
        ),
    ] = 16,
    coverage: Annotated[
        str | None, typer.Option("--coverage", metavar="FILE", help="Corpus file: report the EDL to expect on its documents.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Draw EDL on the --coverage file by size: .png, .pdf or .svg."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte: checksums, order, tables.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer to show text with. Default: the one it was built with."
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Most frequent branches, or documents, to show.")] = 10,
    documents: Annotated[
        bool, typer.Option("--documents", help="List the documents instead; with --query those that contain its text.")
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="With --documents: write them as JSON lines, which build-trie and prune-trie --drop-documents read.",
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
    context: Context = None,  # type: ignore[assignment]
) -> None:
    """Inspect a trie: size, sources, nodes by depth, most frequent branches. Writes nothing except --plot and --export.

    Example: lookahead inspect-trie answers.trie --query "The answer is"

    Next: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl
    """
    from lookahead.bench.trie_report import TrieQuestions
    from lookahead.errors import UsageError
    from lookahead.files.outputs import DOCUMENTS, PICTURE, Input, Output, check_outputs
    from lookahead_cli import render

    if (query is None or documents) and given(context, "decoding_length"):
        raise UsageError("--decoding-length is the size of the tree of a query: --query TEXT.")
    if documents and coverage is not None:
        raise UsageError("--documents lists what the trie holds: leave --coverage out.")
    if export is not None and not documents:
        raise UsageError("--export writes what --documents lists: give both.")
    if plot is not None and coverage is None:
        raise UsageError("--plot needs held-out text to measure on: --coverage FILE.")
    reads = [Input("TRIE", [trie]), Input("--coverage", [coverage]), Input("--config", [config])]
    reads.append(Input("--tokenizer", [tokenizer], hub=True))
    check_outputs([Output("--plot", plot, PICTURE), Output("--export", export, DOCUMENTS)], reads, overwrite)
    if documents:
        show_documents(trie, query, top, export, verify, tokenizer, json)
        return
    asked = TrieQuestions(query, decoding_length, coverage, plot is not None, verify, tokenizer, top)
    found = inspect(trie, asked, plot)
    if json:
        render.print_json(found.as_json(trie))
    else:
        show(trie, found, plot, tables=query is None or bool(given(context, "top")))


def show_documents(
    path: str, query: str | None, top: int, export: str | None, verify: bool, tokenizer: str | None, json: bool
) -> None:
    """List the documents that contain the query's text, and write all of them to `export`."""
    import contextlib

    from lookahead.bench.trie_report import held_documents, load_tokenizer_of
    from lookahead.files.atomic import replacing
    from lookahead.json_text import json_text
    from lookahead.trie.file import Trie
    from lookahead_cli import render

    opened = Trie(path)
    if verify:
        opened.verify()
    loaded = load_tokenizer_of(opened, tokenizer, needed=query is not None)
    listed, matching = [], 0
    with replacing(export, "w") if export is not None else contextlib.nullcontext() as file:
        for held in held_documents(opened, loaded, query or ""):
            matching += 1
            if matching <= top:
                listed.append(held)
            if file is not None:
                row = {"number": held.number, "source": held.source, "ids": held.ids}
                file.write(json_text({**row, **({} if held.text is None else {"text": held.text})}, "utf-8") + "\n")
    if json:
        rows = [{"number": d.number, "source": d.source, "tokens": len(d.ids), "text": d.text} for d in listed]
        render.print_json(
            {"trie": path, "documents": opened.header.documents, "matching": matching, "exported": export, "listed": rows}
        )
        return
    which = f"{matching:,} of {opened.header.documents:,} documents" + (f" contain {query!r}" if query else "")
    render.table(
        which, ["number", "source", "tokens", "begins with"],
        [(d.number, d.source, len(d.ids), repr(d.shown[:SHOWN]) if d.text is not None else d.shown[:SHOWN]) for d in listed],
    )  # fmt: skip
    if matching > len(listed) and export is None:
        render.notice(f"--top {matching} lists them all, --export FILE writes them")
    if export is not None:
        render.notice(f"documents written to {export}: {matching:,}")


def inspect(path: str, asked: TrieQuestions, plot: str | None = None) -> TrieReport:
    """Look into a trie, and draw EDL by size to `plot`."""
    from lookahead.bench.trie_report import report_on
    from lookahead.trie.file import Trie
    from lookahead_cli import render

    found = report_on(Trie(path), asked, effort_of("1GiB", 0), render.with_spinner)
    if plot is not None and found.curve is not None:
        from lookahead.bench.plot import draw_capacity

        draw_capacity(list(found.curve), f"{path} on {asked.coverage}", plot)
    return found


def show(path: str, found: TrieReport, plot: str | None = None, tables: bool = True) -> None:
    """The draft tree of a query, facts, EDL. tables: also what the trie holds."""
    from lookahead_cli import render

    if found.drafted is not None:
        _show_query(found, found.drafted)
    facts = _facts(path, found)
    render.facts(facts if tables else [fact for fact in facts if fact[0] in ("trie", "integrity")])
    if tables:
        _show_tables(found)
    if found.replayed is not None:
        edl, drafted = found.replayed.edl, found.replayed.as_json()["draft_tokens_per_step"]
        line = f"{found.asked.coverage}: EDL {edl:.2f} at {drafted} draft tokens a step, {found.replayed.tokens:,} tokens"
        render.facts([("coverage", line)])
    if found.curve is not None:
        render.table(
            "EDL by size", ["tokens kept", "size", "EDL"],
            [(f"{c.tokens:,}" if c.tokens else "no trie", render.size(c.bytes), f"{c.edl:.2f}") for c in found.curve],
        )  # fmt: skip
        render.notice(f"drawn to {plot}")


def _facts(path: str, found: TrieReport) -> list[tuple[str, str]]:
    import time

    from lookahead_cli import render

    header, size = found.trie.header, render.size(found.trie.path.stat().st_size)
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
    if header.recycled_keys:
        facts.append(("recycled", f"{header.recycled_keys:,} keys of an earlier version, not used"))
    if found.asked.verify:
        facts.append(("integrity", "every checksum and invariant holds"))
    return facts


def _show_tables(found: TrieReport) -> None:
    from lookahead_cli import render

    render.table(
        "Sources", ["source", "documents", "tokens", "weight"],
        [(s.name, s.documents, s.tokens, f"{s.weight:g}") for s in found.trie.header.sources],
    )  # fmt: skip
    render.table(
        "Nodes by depth", ["depth", "nodes", "branching", "seen once"],
        [(str(d.depth), d.nodes, f"{d.branching:.2f}", f"{d.singletons:.1%}") for d in found.seen.depths],
    )  # fmt: skip
    if found.seen.top:
        render.table(
            "Most frequent branches of 4 tokens", ["text" if found.tokenizer is not None else "token ids", "count"],
            [(_shown(found, ids), count) for ids, count in found.seen.top],
        )  # fmt: skip


def _shown(found: TrieReport, token_ids: list[int]) -> str:
    """For a table: the text, or the ids where there is no tokenizer."""
    text = found.text(token_ids)
    return str(token_ids) if text is None else repr(text)


def _show_query(found: TrieReport, drafted: Drafted) -> None:
    from lookahead.draft.explain import Line, outline
    from lookahead_cli import render
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
