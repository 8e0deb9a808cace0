"""Runs command lines in processes of their own, forked from one that has imported what they need and loaded kernels: a job
starts at once.

In: a line of JSON on stdin, [file for stderr, arguments...]. Out: a line "started PID", and at its end "ended STATUS" as of
waitpid. For tests that kill many jobs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - what the demo model needs

import lookahead.job.learned
import lookahead.job.runner
import lookahead.job.setup  # noqa: F401
from lookahead.budget import goodput
from lookahead.draft.drafter import Drafter, DraftOptions
from lookahead.job import engines  # noqa: F401
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import append_trie, build_trie
from lookahead_cli.app import run


def load_kernels() -> None:
    """Those of drafting and of tries; torch must not have computed anything when this process forks."""
    Drafter([], DraftOptions(adaptive=True)).warm_up()
    goodput.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        document, whose = TokenDocument([1, 2, 3] * 100, "x"), TokenizerIdentity(1000)
        build_trie([document], f"{folder}/x.trie", whose)
        append_trie([document], f"{folder}/x.trie", whose)


def serve() -> None:
    """Until stdin ends."""
    torch.set_num_threads(1)
    load_kernels()
    for line in sys.stdin:
        errors, *arguments = json.loads(line)
        pid = os.fork()
        if not pid:
            os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(1, 0)
            os.setpgid(0, 0)
            code = 70
            try:
                code = run(arguments)
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(f"started {pid}", flush=True)
        _, status = os.waitpid(pid, 0)
        print(f"ended {status}", flush=True)


if __name__ == "__main__":
    serve()
