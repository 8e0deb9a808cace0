"""Compiles groups of kernels in its own process. In: their names. Out: files in the cache of kernels, see compile_ahead.py.

Each group is compiled by using what needs it, on a small example, so that kernels get the types that a job gives them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np


def _sorting() -> None:
    from lookahead.token_documents import TokenDocument, TokenizerIdentity
    from lookahead.trie import stats
    from lookahead.trie.build import build_trie
    from lookahead.trie.file import Trie

    with TemporaryDirectory(prefix="lookahead-") as folder:
        path = Path(folder) / "a.trie"
        build_trie([TokenDocument([0, 1, 2, 1, 2, 3], "a")], path, TokenizerIdentity(8, ""))
        stats.overview(Trie(path))
        stats.continuations(Trie(path), np.array([1], np.int32))


def _drafting() -> None:
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions

    Drafter([], DraftOptions()).warm_up()


def _budget() -> None:
    from lookahead.budget.policy import Budget
    from lookahead.budget.shapes import evened

    budget = Budget()
    budget.observe(1, 1, 1.0, 0.0, 1e-3, 1e-3, False)
    budget.seconds(1, 1)
    evened(1)


def _forward() -> None:
    """Compile float32 forwards on a CPU. Needs no torch."""
    from lookahead.backends.cpu import attention_kernel, panel_kernel, program_kernel
    from lookahead.forward import batch_kernel, tree_meta
    from lookahead.native.threads import c_function
    from lookahead.step import best_tokens

    c_function(panel_kernel.product)
    for kind in (panel_kernel.FLOAT32, panel_kernel.BFLOAT16, panel_kernel.FLOAT16):  # float32 may lie in 16 bits
        panel_kernel.multiplier_of(kind)
    c_function(attention_kernel.attention(np.float32, np.float32))
    c_function(program_kernel.prepare)
    c_function(program_kernel.run)
    one, root = np.zeros(1, np.int64), np.full(1, -1, np.int32)
    batch_kernel.move(np.zeros((1, 1, 1, 1, 1), np.int16), one, one, one)
    inputs, meta = np.zeros((4, 1), np.int64), np.zeros((1, 1, tree_meta.FIELDS), np.int32)
    tree_meta.arrange(root, root, one + 1, one, one + 1, one + 1, 0, inputs, meta)
    scores, magnitude = np.zeros((1, 2 * best_tokens.BLOCK), np.int32), np.int32(0x7FFFFFFF)
    best_tokens.find(scores, one, magnitude, np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int32))
    best_tokens.best_token(scores, magnitude, 0)


def _steps() -> None:
    from lookahead.native.threads import c_function
    from lookahead.step import kernels

    c_function(kernels.propose)
    c_function(kernels.accept)


COMPILE = {"sorting": _sorting, "drafting": _drafting, "forward": _forward, "budget": _budget, "steps": _steps}


def main(groups: Sequence[str]) -> None:
    from lookahead.native import cache as kernel_cache
    from lookahead.native import compile_ahead
    from lookahead.native.kernels import SOURCES

    for group in groups:
        with compile_ahead.alone_with(group):
            if not compile_ahead.is_done(group):
                COMPILE[group]()
                kernel_cache.write_mark(group, SOURCES)


def _end_with_parent() -> None:
    """It holds the other end of stdin."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(sys.argv[1:])
