"""A copy of the files that compile and cache kernels, as a package of its own."""

import shutil
from pathlib import Path

from lookahead.files import folders
from lookahead.native import kernels


def copy_of_native(package: Path) -> None:
    """Put lookahead/native and the file that it imports into this package, an empty folder but for `__init__.py`."""
    shutil.copytree(Path(kernels.__file__).parent, package / "native", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "files").mkdir()
    (package / "files" / "__init__.py").touch()
    shutil.copy(folders.__file__, package / "files")
