"""Compiles the kernels that most commands use while a wheel is built, for the processor that builds it, and puts them into it.

So whoever installs from a checkout or an sdist need not wait for the compiler at the first run. A wheel for other machines is
built without: HATCH_BUILD_NO_HOOKS=true. A kernel is found by its version of the sources, of Python and of numba, and by the
processor (lookahead/native/cache.py); where one of them differs, it is compiled at first use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LONGEST = 600  # seconds
COMPILE = "from lookahead.native import compile_ahead; compile_ahead.compile_all()"


class CompileKernels(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # runs from its checkout, where kernels are kept as they are compiled
            return
        self._folder = TemporaryDirectory(prefix="lookahead-")
        try:
            kernels = compiled(Path(self.root), Path(self._folder.name))
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            self.app.display_warning(f"kernels were not compiled, so the first run compiles them ({said.splitlines()[-1]})")
            return
        build_data["force_include"] |= {str(kernel): f"lookahead/__pycache__/{kernel.name}" for kernel in kernels}
        build_data |= {"pure_python": False, "infer_tag": True}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def compiled(root: Path, folder: Path) -> list[Path]:
    """Files of kernels, and of marks of groups that are whole, below this empty folder: those of a copy of the package, so
    that kernels which lie with the original, or are the user's, are not taken for them.
    """
    shutil.copytree(root / "lookahead", folder / "lookahead", ignore=shutil.ignore_patterns("__pycache__"))
    names = {"NUMBA_CACHE_DIR": "kernels", "LOOKAHEAD_CACHE": "cache", "TMPDIR": "tmp"}
    (folder / "tmp").mkdir()
    environment = os.environ | {name: str(folder / there) for name, there in names.items()}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, "-c", COMPILE]
    subprocess.run(command, env=environment, cwd=folder, check=True, timeout=LONGEST, capture_output=True, encoding="utf-8")
    return sorted(path for path in (folder / "kernels" / "lookahead").iterdir() if path.suffix in (".kernel", ".done"))
