"""Names that a shell completes. In: what is typed of a value. Out: values that begin so. The shell itself completes files."""

from __future__ import annotations


def strategies(incomplete: str) -> list[str]:
    """Of generate."""
    from lookahead.draft.options import STRATEGIES

    return [name for name in ("auto", *STRATEGIES) if name.startswith(incomplete)]


def compared(incomplete: str) -> list[str]:
    """Of bench and replay, where several names are separated by commas."""
    from lookahead.draft.options import STRATEGIES

    begun, comma, last = incomplete.rpartition(",")
    names = [name for name in ("auto", *STRATEGIES) if name != "off" and name not in begun.split(",")]
    return [begun + comma + name for name in names if name.startswith(last)]


def profiles(incomplete: str) -> list[str]:
    """Cost profiles that ship with the package."""
    from lookahead.budget.profile import shipped_names

    return [name for name in shipped_names() if name.startswith(incomplete)]


def gpus(incomplete: str) -> list[str]:
    """GPUs whose profile can be estimated."""
    from lookahead.budget.estimate import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]
