"""lookahead: faster offline LLM generation from tries of seen text, without a draft model and without changing a token."""

from __future__ import annotations

__version__ = "0.1.0"
