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
    from lookahead.api import GenerationParams as GenerationParams
    from lookahead.api import GenerationResult as GenerationResult
    from lookahead.api import LookaheadEngine as LookaheadEngine
    from lookahead.decode.constraint import Constraint as Constraint
    from lookahead.decode.engine import DecodingEngine as DecodingEngine
    from lookahead.decode.engine import Generation as Generation
    from lookahead.decode.logprobs import TokenLogprobs as TokenLogprobs
    from lookahead.draft.drafter import Drafter as Drafter
    from lookahead.draft.options import DraftOptions as DraftOptions
    from lookahead.draft.sources import DraftSource as DraftSource
    from lookahead.errors import LookaheadError as LookaheadError
    from lookahead.hf import lookahead_generate as lookahead_generate
    from lookahead.job.events import JobEvents as JobEvents
    from lookahead.job.progress import JobReport as JobReport
    from lookahead.job.run import run_job as run_job
    from lookahead.job.spec import JobSpec as JobSpec
    from lookahead.models.load import load_model as load_model
    from lookahead.token_documents import TokenDocument as TokenDocument
    from lookahead.token_documents import TokenizerIdentity as TokenizerIdentity
    from lookahead.trie.build import append_trie as append_trie
    from lookahead.trie.build import build_trie as build_trie
    from lookahead.trie.file import Trie as Trie
    from lookahead.trie.merge import merge_tries as merge_tries
    from lookahead.trie.prune import prune_trie as prune_trie

# Names of each file of the package
_NAMES: dict[str, tuple[str, ...]] = {
    "api": ("GenerationParams", "GenerationResult", "LookaheadEngine"),
    "decode.constraint": ("Constraint",),
    "decode.engine": ("DecodingEngine", "Generation"),
    "decode.logprobs": ("TokenLogprobs",),
    "draft.drafter": ("Drafter",),
    "draft.options": ("DraftOptions",),
    "draft.sources": ("DraftSource",),
    "errors": ("LookaheadError",),
    "hf": ("lookahead_generate",),
    "job.events": ("JobEvents",),
    "job.progress": ("JobReport",),
    "job.run": ("run_job",),
    "job.spec": ("JobSpec",),
    "models.load": ("load_model",),
    "token_documents": ("TokenDocument", "TokenizerIdentity"),
    "trie.build": ("append_trie", "build_trie"),
    "trie.file": ("Trie",),
    "trie.merge": ("merge_tries",),
    "trie.prune": ("prune_trie",),
}
_HOMES = {name: f"lookahead.{home}" for home, names in _NAMES.items() for name in names}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lookahead' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
