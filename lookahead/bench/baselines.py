"""What others draft, to measure ours against. In: a name. Out: its drafter, from benchmarks/baselines.py of a checkout.

The baselines are plain Python and serve comparisons only, so they are not part of the installed package.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

from lookahead.errors import UsageError

BASELINES = ("prompt-lookup", "original-trie")
CHECKOUT = Path(__file__).parents[2]


def baseline_class(name: str) -> Any:
    """The class of a baseline: (tries, options) -> a drafter, see benchmarks/baselines.py.

    Raises UsageError where there is no checkout.
    """
    return _classes(CHECKOUT)[name]


@functools.cache
def _classes(checkout: Path) -> dict[str, Any]:
    file = checkout / "benchmarks" / "baselines.py"
    if not (file.is_file() and (checkout / "pyproject.toml").is_file()):  # another package may have a folder of this name
        raise UsageError(
            "--baselines: they are not part of the installed package. Run it from a checkout: pip install -e . in its folder."
        )
    spec = importlib.util.spec_from_file_location("lookahead_baselines", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: module.BASELINES[name] for name in BASELINES}
