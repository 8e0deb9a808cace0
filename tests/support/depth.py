"""Values of a parametrisation that only `pytest -m deep` takes."""

from collections.abc import Iterable
from typing import Any

import pytest


def deep(values: Iterable[Any], **options: Any) -> list[Any]:
    """Each as a parameter of a deep test. options: of `pytest.param`. Several parameters at once: a tuple each."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.deep, **options) for value in values
    ]


def some_deep(values: Iterable[Any], shallow: Iterable[Any]) -> list[Any]:
    """All values, those that are not among `shallow` as parameters of deep tests."""
    shallow = list(shallow)
    return [value if value in shallow else deep([value])[0] for value in values]
