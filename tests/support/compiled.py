"""Compiles kernels, or loads them, which tests would otherwise do one by one. None of them needs torch.

As a command, in processes beside each other: `python -m tests.support.compiled drafts`, `forwards`.
"""

import platform
import sys
import tempfile

import numpy as np


def usual() -> None:
    """Kernels of drafting, the budget and tries of most vocabularies."""
    from lookahead.job.compile_groups import COMPILE

    for group in ("drafting", "budget", "steps"):
        COMPILE[group]()
    _edit_tries(1000)


def drafts() -> None:
    """Kernels of drafting and tries. Those of large vocabularies come after the others, with which they share some."""
    usual()
    _edit_tries(70_000)


def forwards() -> None:
    """Kernels of float32 forwards first, then those of halves and quantized models."""
    from lookahead.backends.cpu import attention_kernel, panel_kernel, quantized_cache_kernel
    from lookahead.job import compile_groups
    from lookahead.native.threads import c_function
    from lookahead.step import best_tokens

    compile_groups.main(["forward"])
    of_x86 = (panel_kernel.INT8, panel_kernel.INT4) if platform.machine() == "x86_64" else ()
    for kind in (panel_kernel.BFLOAT16, panel_kernel.FLOAT16, *of_x86):
        panel_kernel.multiplier_of(kind)
    for kind, kept in ((np.uint16,) * 2, (np.int16,) * 2, (np.float32, np.int8), (np.float32, np.uint8)):
        c_function(attention_kernel.attention(kind, kept))
    one, halves = np.zeros(1, np.int64), np.zeros((1, 4), np.int16)
    best_tokens.find(np.zeros((1, 2 * best_tokens.BLOCK), np.int16), one, np.int16(0x7FFF), np.zeros((1, 4), np.int32), halves)
    best_tokens.best_token(halves, np.int16(0x7FFF), 0)
    source, target = np.zeros(64, np.float32), np.zeros(256, np.uint8)
    quantized_cache_kernel.quantize_all(source.ctypes.data, 1, 64, target.ctypes.data, 4, True)


def _edit_tries(vocab_size: int) -> None:
    from lookahead.token_documents import TokenDocument, TokenizerIdentity
    from lookahead.trie.build import append_trie, build_trie
    from lookahead.trie.merge import merge_tries
    from lookahead.trie.prune import prune_trie

    with tempfile.TemporaryDirectory() as folder:
        document, whose = TokenDocument([1, 2, 3] * 100, "x"), TokenizerIdentity(vocab_size)
        build_trie([document], f"{folder}/x.trie", whose)
        append_trie([document], f"{folder}/x.trie", whose)
        merge_tries([f"{folder}/x.trie"], f"{folder}/y.trie")
        prune_trie(f"{folder}/y.trie", f"{folder}/y.trie", 2)


if __name__ == "__main__":
    {"drafts": drafts, "forwards": forwards}[sys.argv[1]]()
