"""Packages that only some uses need. In: a package that is about to be imported. Out: an error that names how to install it."""

from __future__ import annotations

import importlib.util

from lookahead.errors import UsageError

EXTRAS = {
    "matplotlib": "plot",
    "pyarrow": "parquet",
    "llguidance": "constraints",
    "gguf": "gguf",
    "accelerate": "gguf",
    "lm_eval": "harness",
}


def require(package: str, use: str) -> None:
    """Raise UsageError if `package` is not installed. use: what needs it, such as "--plot"."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{use}: needs {package}, which is not installed: pip install 'lookahead[{EXTRAS[package]}]'.")
