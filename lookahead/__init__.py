"""lookahead: faster offline LLM generation from tries of seen text, without a draft model and without changing a token.

    from lookahead import GenerationParams, LookaheadEngine

    engine = LookaheadEngine("samples/demo-model")  # or a Hugging Face model and its tokenizer; tries=["answers.trie"], ...
    results = engine.generate(["Question: How many legs do 3 cats have?\\nAnswer:"], GenerationParams(max_new_tokens=40))
    print(results[0].text, results[0].edl)
    for text in engine.stream("Question: How many legs do 5 cats have?\\nAnswer:"):
        print(text, end="", flush=True)

A job, resumable, as `lookahead generate` runs it: run_job(JobSpec.of(model=..., input=..., out=...)), see lookahead/job/run.py.

Inside transformers: model.generate(**inputs, custom_generate=lookahead_generate), see lookahead/hf.py.

Names are imported when they are first used: `import lookahead` alone loads neither numpy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lookahead.version import __version__ as __version__

if TYPE_CHECKING:
    from lookahead.api import GenerationParams, GenerationResult, LookaheadEngine
    from lookahead.decode.constraint import Constraint
    from lookahead.decode.engine import DecodingEngine, Generation
    from lookahead.decode.logprobs import TokenLogprobs
    from lookahead.draft.drafter import Drafter
    from lookahead.draft.options import DraftOptions
    from lookahead.draft.sources import DraftSource
    from lookahead.errors import LookaheadError
    from lookahead.hf import lookahead_generate
    from lookahead.job.events import JobEvents
    from lookahead.job.progress import JobReport
    from lookahead.job.run import run_job
    from lookahead.job.spec import JobSpec
    from lookahead.models.load import load_model
    from lookahead.token_documents import TokenDocument, TokenizerIdentity
    from lookahead.trie.build import append_trie, build_trie
    from lookahead.trie.file import Trie
    from lookahead.trie.merge import merge_tries
    from lookahead.trie.prune import prune_trie

_HOMES = {
    "LookaheadEngine": "lookahead.api",
    "GenerationParams": "lookahead.api",
    "GenerationResult": "lookahead.api",
    "build_trie": "lookahead.trie.build",
    "append_trie": "lookahead.trie.build",
    "TokenDocument": "lookahead.token_documents",
    "TokenizerIdentity": "lookahead.token_documents",
    "merge_tries": "lookahead.trie.merge",
    "prune_trie": "lookahead.trie.prune",
    "Trie": "lookahead.trie.file",
    "Drafter": "lookahead.draft.drafter",
    "DraftOptions": "lookahead.draft.options",
    "DraftSource": "lookahead.draft.sources",
    "Constraint": "lookahead.decode.constraint",
    "DecodingEngine": "lookahead.decode.engine",
    "Generation": "lookahead.decode.engine",
    "TokenLogprobs": "lookahead.decode.logprobs",
    "load_model": "lookahead.models.load",
    "LookaheadError": "lookahead.errors",
    "lookahead_generate": "lookahead.hf",
    "JobSpec": "lookahead.job.spec",
    "JobEvents": "lookahead.job.events",
    "JobReport": "lookahead.job.progress",
    "run_job": "lookahead.job.run",
}

__all__ = [
    "Constraint",
    "DecodingEngine",
    "DraftOptions",
    "DraftSource",
    "Drafter",
    "Generation",
    "GenerationParams",
    "GenerationResult",
    "JobEvents",
    "JobReport",
    "JobSpec",
    "LookaheadEngine",
    "LookaheadError",
    "TokenDocument",
    "TokenLogprobs",
    "TokenizerIdentity",
    "Trie",
    "append_trie",
    "build_trie",
    "load_model",
    "lookahead_generate",
    "merge_tries",
    "prune_trie",
    "run_job",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lookahead' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
