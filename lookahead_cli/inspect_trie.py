"""lookahead inspect-trie: what a trie holds and how it would draft."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lookahead_cli.options import Config, Json, Overwrite, effort_of

if TYPE_CHECKING:
    import numpy as np

    from lookahead.draft.explain import Evidence
    from lookahead.draft.tree import DraftTree
    from lookahead.trie.file import Trie
    from lookahead.trie.format import TrieHeader

DECODING_LENGTH = 16  # of a query


def command(
    trie: Annotated[str, typer.Argument(metavar="TRIE", help="Trie file to read.")],
    query: Annotated[
        str | None,
        typer.Option(
            "--query",
            metavar="TEXT",
            help="Draw the draft tree that would be verified after this text. Of a trie built from ids: ids, as 5 6 7.",
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
    ] = DECODING_LENGTH,
    coverage: Annotated[
        str | None, typer.Option("--coverage", metavar="FILE", help="Corpus file: say what EDL to expect on its documents.")
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
    top: Annotated[int, typer.Option("--top", min=0, metavar="N", help="Commonest branches to show.")] = 10,
    overwrite: Overwrite = False,
    json: Json = False,
    config: Config = None,
) -> None:
    """Look into a trie: size, sources, nodes by depth, commonest branches; nothing is written but the --plot.

    Example: lookahead inspect-trie answers.trie --query "The answer is"

    Next: lookahead generate --model org/model --input prompts.jsonl --trie answers.trie -o out.jsonl
    """
    from lookahead.errors import UsageError
    from lookahead.outputs import PICTURE, Input, Output, check_outputs
    from lookahead.trie import format, stats
    from lookahead.trie.file import Trie
    from lookahead_cli import render

    if decoding_length != DECODING_LENGTH and query is None:
        raise UsageError("--decoding-length is the size of the tree of a query: --query TEXT.")
    if plot is not None and coverage is None:
        raise UsageError("--plot needs held-out text to measure on: --coverage FILE.")
    reads = [Input("TRIE", [trie]), Input("--coverage", [coverage]), Input("--config", [config])]
    reads.append(Input("--tokenizer", [tokenizer], hub=True))
    check_outputs([Output("--plot", plot, PICTURE)], reads, overwrite)
    opened = Trie(trie)
    header = opened.header
    effort = effort_of("1GiB", 0)
    if verify:
        render.patiently(lambda: opened.verify(effort.workers), "Checking every byte ...")
    loaded = tokenizer_of(opened, tokenizer, needed=query is not None or coverage is not None)
    asked = ids_of(query, opened, loaded) if query is not None else None
    seen = render.patiently(lambda: stats.overview(opened, most=top, effort=effort), "Reading the trie ...")
    replayed, curve = None, None
    if coverage is not None:
        from lookahead.bench.coverage import coverage as measure

        path = coverage
        replayed = render.patiently(lambda: measure([opened], path, loaded), render.COMPILING)
        if plot is not None:
            from lookahead.bench.coverage import capacity_curve
            from lookahead.bench.plot import draw_capacity

            curve = render.patiently(lambda: capacity_curve(opened, path, loaded, effort), "Pruning to rising sizes ...")
            draw_capacity(curve, f"{trie} on {coverage}", plot)
    drafted = None
    if asked is not None:
        context = asked
        drafted = render.patiently(lambda: draft_after(opened, context, decoding_length), render.COMPILING)

    recycled = stats.recycled(opened, top)
    if json:
        value: dict[str, Any] = {
            "trie": trie,
            "bytes": opened.path.stat().st_size,
            "tokens": header.tokens,
            "documents": header.documents,
            "branches": header.branches,
            "segments": [{"tokens": s.tokens, "documents": s.documents} for s in header.segments],
            "vocab_size": header.vocab_size,
            "tokenizer": {"name": header.tokenizer_name, "fingerprint": header.tokenizer_fingerprint},
            "content_hash": header.content_hash,
            "tool_version": header.tool_version,
            "created": header.created,
            "options": dict(header.options),
            "verified": verify,
            "sources": [
                {"name": s.name, "documents": s.documents, "tokens": s.tokens, "weight": s.weight} for s in header.sources
            ],
            "depths": [vars(row) for row in seen.depths],
            "top": [{"token_ids": ids, "count": count, "text": _text(loaded, ids)} for ids, count in seen.top],
            "recycled": {"keys": header.recycled_keys, "top": recycled},
        }
        if replayed is not None:
            value["coverage"] = {"file": coverage, "tokens": replayed.tokens, **replayed.as_json()}
        if curve is not None:
            value["capacity"] = [vars(c) for c in curve]
        if drafted is not None:
            match, continuations = stats.continuations(opened, drafted.context)
            value["query"] = {
                "text": query,
                "match_length": match.length,
                "count": match.count,
                "continuations": [_continuation_json(c, loaded) for c in continuations],
                "draft": _draft_json(drafted, loaded),
            }
        render.print_json(value)
        return

    import time

    render.facts(
        [
            (
                "trie",
                f"{trie}  ({render.size(opened.path.stat().st_size)}, format {format.VERSION}, content {header.content_hash})",
            ),
            ("tokens", f"{header.tokens:,} in {header.documents:,} documents, {header.branches:,} branches"),
            *([("segments", _segments(trie, header))] if len(header.segments) > 1 else []),
            (
                "tokenizer",
                f"{header.tokenizer_name or 'none (ids)'}  "
                f"(vocab {header.vocab_size:,}, {header.tokenizer_fingerprint or '-'})",
            ),
            ("built", f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(header.created))} by lookahead {header.tool_version}"),
            *([("recycled", f"{header.recycled_keys:,} keys: what a job's model almost said behind them")] if recycled else []),
            *([("integrity", "every checksum and invariant holds")] if verify else []),
        ]
    )
    render.table(
        "Sources", ["source", "documents", "tokens", "weight"],
        [(s.name, s.documents, s.tokens, f"{s.weight:g}") for s in header.sources],
    )  # fmt: skip
    render.table(
        "Nodes by depth", ["depth", "nodes", "branching", "seen once"],
        [(str(d.depth), d.nodes, f"{d.branching:.2f}", f"{d.singletons:.1%}") for d in seen.depths],
    )  # fmt: skip
    if seen.top:
        render.table(
            "Commonest branches of 4 tokens", ["text" if loaded is not None else "token ids", "count"],
            [(_shown(loaded, ids), count) for ids, count in seen.top],
        )  # fmt: skip
    if recycled:
        render.table(
            "What the model almost said, behind the commonest tokens", ["behind", "candidates", "seen"],
            [
                (_shown(loaded, [r["token_id"]]), " ".join(_shown(loaded, [c]) for c in r["candidates"]), r["seen"])
                for r in recycled
            ],
        )  # fmt: skip
    if drafted is not None:
        _print_query(opened, drafted, loaded)
    if replayed is not None:
        render.facts(
            [
                (
                    "coverage",
                    f"{coverage}: EDL {replayed.edl:.2f} at {replayed.as_json()['draft_tokens_per_step']} draft tokens "
                    f"a step, {replayed.tokens:,} tokens",
                )
            ]
        )
    if curve is not None:
        render.table(
            "EDL by size", ["tokens kept", "size", "EDL"],
            [(f"{c.tokens:,}" if c.tokens else "no trie", render.size(c.bytes), f"{c.edl:.2f}") for c in curve],
        )  # fmt: skip
        render.notice(f"drawn to {plot}")


def _segments(trie: str, header: TrieHeader) -> str:
    sizes = ", ".join(f"{s.tokens:,}" for s in header.segments)
    return f"{len(header.segments)} of {sizes} tokens; to join them: lookahead merge-tries {trie} -o {trie}"


def tokenizer_of(trie: Trie, name: str | None, needed: bool) -> Any | None:
    """The tokenizer to show text with; None if the trie came as ids, or its tokenizer is gone and not needed."""
    from lookahead.errors import LookaheadError
    from lookahead.hub import tokenizer_of_trie
    from lookahead.tokenizer import identity, load_tokenizer

    if not (name or trie.header.tokenizer_name):
        return None
    try:
        chosen = name or tokenizer_of_trie(trie.path, trie.header.tokenizer_name)
        loaded = load_tokenizer(chosen)
    except LookaheadError:
        if name or needed:
            raise
        return None
    whose = identity(loaded, chosen)
    trie.check_tokenizer(whose.fingerprint, whose.vocab_size, chosen)
    return loaded


def _text(tokenizer: Any | None, token_ids: list[int]) -> str | None:
    return str(tokenizer.decode(token_ids)) if tokenizer is not None else None


def _shown(tokenizer: Any | None, token_ids: list[int]) -> str:
    """For a table: the text, or the ids where there is no tokenizer."""
    return repr(_text(tokenizer, token_ids)) if tokenizer is not None else str(token_ids)


def ids_of(query: str, trie: Trie, tokenizer: Any | None) -> np.ndarray:
    """int32: token ids of a query, which is text, or ids where there is no tokenizer. Raises UsageError for one of no use."""
    import numpy as np

    from lookahead.errors import UsageError

    if tokenizer is not None:
        ids = tokenizer(query, add_special_tokens=False)["input_ids"]
    elif all(part.isdecimal() and int(part) < trie.header.vocab_size for part in query.split()):
        ids = [int(part) for part in query.split()]
    else:
        raise UsageError(
            f"{trie.path}: was built from ids. Give ids below {trie.header.vocab_size} as --query, such as '5 6 7', or name a "
            "tokenizer: --tokenizer NAME_OR_DIR."
        )
    if not len(ids):
        raise UsageError("--query: is empty. Give the text, or the ids, that drafts are to follow.")
    return np.array(ids, np.int32)


@dataclasses.dataclass(frozen=True)
class Drafted:
    """What would be verified after a context (int32 [length]), and what the trie holds for each node."""

    context: np.ndarray
    tree: DraftTree
    evidence: list[Evidence | None]
    source_names: tuple[str, ...]


def draft_after(trie: Trie, context: np.ndarray, decoding_length: int) -> Drafted:
    """The tree that a request whose prompt is `context` drafts first, in a job that has not said anything yet."""
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.explain import evidence
    from lookahead.draft.options import DraftOptions

    drafter = Drafter([trie], DraftOptions(decoding_length=decoding_length))
    tree = drafter.start(context).draft()
    of_trie = len(drafter.source_names) - 1
    return Drafted(context, tree, evidence(trie, of_trie, context.tolist(), tree), drafter.source_names)


def _draft_json(drafted: Drafted, tokenizer: Any | None) -> list[dict[str, Any]]:
    """Draft tokens, the most probable first; parent: place in this list, -1 for the query itself."""
    tree = drafted.tree
    return [
        {
            "token_id": int(tree.token_ids[node]),
            "text": _text(tokenizer, [int(tree.token_ids[node])]),
            "parent": int(tree.parents[node]) - 1,
            "probability": round(float(tree.probabilities[node]), 6),
            "source": drafted.source_names[tree.sources[node]],
            "match_length": int(tree.matches[node]),
            "count": seen.count if seen else None,
            "match_count": seen.of if seen else None,
        }
        for node, seen in enumerate(drafted.evidence)
        if node
    ]


def _continuation_json(node: Any, tokenizer: Any) -> dict[str, Any]:
    return {
        "token_id": node.token_id,
        "text": _text(tokenizer, [node.token_id]),
        "count": node.count,
        "share": round(node.share, 4),
        "children": [_continuation_json(c, tokenizer) for c in node.children],
    }


def _print_query(trie: Trie, drafted: Drafted, tokenizer: Any | None) -> None:
    from lookahead.draft.explain import Line, outline
    from lookahead_cli import render
    from lookahead_cli.explain import draw, shown

    def seen(line: Line) -> str:
        found = drafted.evidence[line.nodes[0]]
        return f"{found.count:,} of {found.of:,} times" if found else ""

    match = trie.longest_match(drafted.context)
    text = shown(tokenizer, drafted.context.tolist())
    render.out.print(f"Draft tree of {drafted.tree.draft_tokens} tokens", style="bold")
    if match.length:
        render.out.print(f"{text}  last {match.length} tokens seen {match.count:,} times")
    else:
        render.out.print(f"{text}: its last token is not in the corpus.")
    draw(render.out, outline(drafted.tree, drafted.source_names), tokenizer, seen)
