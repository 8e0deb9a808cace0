"""Options that bench and replay have, and what they write."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lookahead.bench.options import COSTS, BenchOptions
from lookahead.files.atomic import replacing
from lookahead_cli.options import Common, Some

if TYPE_CHECKING:
    from lookahead.bench.contenders import ModelBench
    from lookahead.files.outputs import Input
    from lookahead.models.options import ModelOptions

CHECKED_ROWS = 64  # rows whose outputs are compared unless asked otherwise
OF_A_MODEL = (  # options that need one
    *("input", "attn", "dtype", "device", "max_new_tokens", "peers", "check_lossless", "revision", "adapter"),
    *("trust_remote_code", "gguf_file", "exact", "threads", "engine_mode", "quantize", "kv_dtype"),
)


def check_files(bench: BenchOptions, common: Common, reads: Sequence[Input]) -> None:
    """See `check_outputs`."""
    from lookahead.files.outputs import BENCH, PAGE, PICTURE, Output

    drawn = Output("--plot", bench.plot, PICTURE), Output("--report", bench.report, PAGE)
    common.check([Output("--save", bench.save, BENCH), *drawn], reads)


def bench_on(model: ModelOptions, bench: BenchOptions, **compared: Any) -> ModelBench:
    """A bench on a model. compared: `options` or `contenders` of it."""
    from lookahead.bench.contenders import ModelBench, batch_sizes_of

    return ModelBench(
        model,
        tries=bench.trie or (),
        weights=bench.trie_weight,
        batch_sizes=batch_sizes_of(bench.batch_size),
        repeats=bench.repeat,
        lossless_rows=CHECKED_ROWS if bench.check_lossless is None else None if bench.check_lossless else 0,
        **{name: getattr(bench, name) for name in ("max_new_tokens", "rows", "peers", "recycling")},
        **compared,
    )


def write(bench: BenchOptions, value: dict[str, Any], figure: Any = None, page: str = "") -> None:
    """Write the JSON, the page and the figure to their files. One that cannot be written costs none of the others."""
    from lookahead.bench.plot import save_figure

    with contextlib.ExitStack() as stack:
        if bench.plot:
            stack.callback(save_figure, figure, bench.plot)
        if bench.report:
            stack.callback(_write, bench.report, page)
        if bench.save:  # the last is called first
            stack.callback(_write, bench.save, json.dumps(value, indent=2) + "\n")


def _write(path: str, text: str) -> None:
    with replacing(path, "w") as file:
        file.write(text)


BENCHED = Some(
    "input replay trie trie_weight strategy decoding_length branch_length session_tokens price random_weights cost_profile "
    "rows max_new_tokens batch_size peers repeat sweep recycling baselines check_lossless explain save plot report"
)
MODEL_OF_A_BENCH = Some(
    "model gguf_file tokenizer revision adapter trust_remote_code dtype device threads attn engine engine_arg engine_mode "
    "quantize kv_dtype exact",
    tokenizer={"help": "Tokenizer of text rows in --replay and of --explain; with --model, instead of its own."},
    engine={
        "help": "hf: our engine for transformers models. vllm: plain vLLM, its ngram and suffix drafts, and ours in it, of "
        "the strategies auto and single. sglang: plain SGLang, its ngram drafts, and ours in it, of the strategy "
        "hierarchical."
    },
    quantize={
        "help": "Quantize the model, on a CPU: none, int8 or int4 (groups of 64, the output layer int8). Several, such as "
        "none,int8,int4, are measured one after the other: speed, memory, loss on the prompts."
    },
    kv_dtype={"help": "Keep keys and values in 8 or 4 bits, on a CPU: none, int8 or int4, or several."},
)
REPLAYED = Some(
    "pairs prompts chat system prompt_field template tokenizer rows trie trie_weight strategy decoding_length branch_length "
    "session_tokens price sweep baselines cost_profile batch_size repeat explain save plot report",
    cost_profile={"panel": COSTS},
    batch_size={"help": "With --cost-profile: answers decoded at once.", "panel": COSTS},
    repeat={"help": "With --cost-profile: predict N times, see bench.", "panel": COSTS},
)
