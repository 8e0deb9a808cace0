"""lookahead replay: what drafts bring on logged answers, without a model. Also what `bench --replay` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from lookahead.bench.options import BenchOptions
from lookahead.errors import UsageError
from lookahead_cli.bench_options import REPLAYED, check_files
from lookahead_cli.comparison import show
from lookahead_cli.options import Common, Some, given, with_groups
from lookahead_cli.progress import BenchOnScreen

if TYPE_CHECKING:
    from lookahead.files.outputs import Input


@with_groups
def command(context: typer.Context, bench: Annotated[BenchOptions, REPLAYED], common: Annotated[Common, Some()]) -> None:
    """Replay logged answers: tokens per decode step (EDL) and draft time, without a model.

    Reads logs of prompts and answers of any system, or the output of lookahead generate. Writes nothing unless asked to.

    Example: lookahead replay logged.jsonl --trie answers.trie

    The output of a job: lookahead replay out.jsonl --prompts prompts.jsonl --trie answers.trie

    EDL against decoding and branch length: lookahead replay logged.jsonl --trie answers.trie --sweep --plot sweep.png

    Several workloads: lookahead replay faq.jsonl code.jsonl --trie faq=faq.trie --trie code=code.trie --baselines

    Other hardware: lookahead replay logged.jsonl --trie answers.trie --cost-profile llama-7b-h200

    Next: lookahead bench --model org/model --input prompts.jsonl --trie answers.trie
    """
    from lookahead.bench.logged import files_read

    if not bench.pairs:
        raise UsageError("name a file of logged answers: lookahead replay logged.jsonl. To try without one: lookahead demo")
    if bench.system and bench.chat is False:
        raise UsageError("--system is for chat prompts: leave --no-chat out.")
    run(context, bench, common, files_read(bench, "LOG"))


def run(context: typer.Context, bench: BenchOptions, common: Common, reads: Sequence[Input]) -> None:
    """Replay, print and write what was asked for; with a cost profile also the predicted speed."""
    from lookahead.bench.contenders import batch_sizes_of, options_of
    from lookahead.bench.logged import replay_logs

    costs = bench.cost_profile is not None
    batch_sizes_of(bench.batch_size)  # refuses what is wrong with it before any file is looked at, as the next line does
    options_of(bench, timed=costs)
    check_files(bench, common, reads)
    if not costs and (given(context, "report", "repeat", "batch_size") or (bench.plot is not None and not bench.sweep)):
        raise UsageError(
            "--replay runs no model: --report, --repeat and --batch-size need --cost-profile, or bench with --model and "
            "--random-weights; --plot needs one of these or --sweep."
        )
    if costs and len(bench.pairs or ()) > 1 and (bench.plot or bench.report):
        raise UsageError("--plot and --report with --cost-profile show one workload: give one log.")
    found = replay_logs(bench, BenchOnScreen(common.json))
    show(context, found.value, found.comparisons, bench, common.json, replays=found.replays)
