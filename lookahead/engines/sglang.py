"""Draft trees inside SGLang, which verifies them. In: its plugin call. Out: a speculative algorithm of the name LOOKAHEAD.

    LOOKAHEAD_SETTINGS='{"tries": ["answers.trie"]}' python -m sglang.launch_server --model-path MODEL \
        --speculative-algorithm LOOKAHEAD --speculative-num-draft-tokens 16

`register` is an entry point of the group sglang.srt.plugins, which SGLang calls in each of its processes. It uses SGLang's own
registry and patches nothing. An unknown version of SGLang is left as it is, with one warning. As it runs in servers of others,
importing this file loads nothing that drafting needs.
"""

from __future__ import annotations

import importlib.metadata
import logging
import multiprocessing

from lookahead.errors import UsageError

log = logging.getLogger(__name__)

ALGORITHM = "LOOKAHEAD"  # as --speculative-algorithm names it
KNOWN = ("0.5.23",)


def register() -> None:
    """Register the algorithm, as the entry point. Raises nothing."""
    try:
        if unknown := unknown_version():
            if multiprocessing.parent_process() is None:  # once, not in each of SGLang's processes
                log.warning("lookahead: %s. The speculative algorithm %s is left out.", unknown, ALGORITHM)
            return
        from lookahead.engines.sglang_algorithm import register_algorithm

        register_algorithm(ALGORITHM)
    except Exception as error:  # a server of others
        log.warning("lookahead: %s is left out of SGLang (%s: %s)", ALGORITHM, type(error).__name__, error)
        log.debug("registering has failed", exc_info=True)


def unknown_version() -> str:
    """Return why this SGLang is not known; "" if it is. Raises UsageError where there is none."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError("--engine sglang: needs pip install 'lookahead[sglang]'.") from None
    if version in KNOWN:
        return ""
    return f"SGLang {version} is not one of the versions that are known ({', '.join(KNOWN)})"
