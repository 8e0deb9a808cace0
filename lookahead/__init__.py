"""lookahead: faster offline LLM generation from tries of seen text, without a draft model and without changing a token.

    from lookahead import DecodingEngine, Drafter, DraftOptions, Trie, load_model

    engine = DecodingEngine(load_model("org/model"), Drafter([Trie("answers.trie")], DraftOptions(adaptive=True)))
    generation = engine.generate(prompt_ids, max_new_tokens=256)   # generation.token_ids, .edl, ...

    model.generate(**inputs, custom_generate=lookahead_generate)   # a model of transformers, see lookahead/hf.py

    build_trie([TokenDocument(ids, "faq") for ids in corpus], "faq.trie", TokenizerIdentity(vocab_size))
    append_trie(more_documents, "faq.trie", TokenizerIdentity(vocab_size))

Names are imported when they are first used: `import lookahead` alone loads neither numpy nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lookahead.decode.engine import DecodingEngine, Generation
    from lookahead.decode.model import load_model
    from lookahead.draft.drafter import Drafter, DraftOptions
    from lookahead.errors import LookaheadError
    from lookahead.hf import lookahead_generate
    from lookahead.trie.build import TokenDocument, TokenizerIdentity, append_trie, build_trie
    from lookahead.trie.edit import merge_tries, prune_trie
    from lookahead.trie.file import Trie

_HOMES = {
    "build_trie": "lookahead.trie.build",
    "append_trie": "lookahead.trie.build",
    "TokenDocument": "lookahead.trie.build",
    "TokenizerIdentity": "lookahead.trie.build",
    "merge_tries": "lookahead.trie.edit",
    "prune_trie": "lookahead.trie.edit",
    "Trie": "lookahead.trie.file",
    "Drafter": "lookahead.draft.drafter",
    "DraftOptions": "lookahead.draft.drafter",
    "DecodingEngine": "lookahead.decode.engine",
    "Generation": "lookahead.decode.engine",
    "load_model": "lookahead.decode.model",
    "LookaheadError": "lookahead.errors",
    "lookahead_generate": "lookahead.hf",
}

__all__ = [
    "DecodingEngine",
    "DraftOptions",
    "Drafter",
    "Generation",
    "LookaheadError",
    "TokenDocument",
    "TokenizerIdentity",
    "Trie",
    "append_trie",
    "build_trie",
    "load_model",
    "lookahead_generate",
    "merge_tries",
    "prune_trie",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lookahead' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
