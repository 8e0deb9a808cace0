"""Deep tests: what takes minutes. `pytest -m deep` runs them; the ordinary suite does not."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is a deep one."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.deep)
            item.add_marker(pytest.mark.timeout(0))
