"""Names of the files of a job. In: the output that it is written to. Out: what lies next to it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lookahead.files.outputs import PACKED


@dataclasses.dataclass(frozen=True)
class JobFiles:
    """Names of the files of a job that is written to `out`."""

    out: Path

    @property
    def is_made_at_the_end(self) -> bool:
        """A table or packed file, to which no rows can be added."""
        return self.out.suffix.lower() in (".parquet", *PACKED)

    @property
    def rows(self) -> Path:
        """JSON lines, one a row."""
        return self._beside(".partial.jsonl") if self.is_made_at_the_end else self.out

    @property
    def journal(self) -> Path:
        return self._beside(".journal")

    @property
    def manifest(self) -> Path:
        return self._beside(".manifest.json")

    @property
    def learned(self) -> Path:
        return self._beside(".learned.jsonl")

    def existing(self) -> Path | None:
        """The output, or what is there of it."""
        return next((path for path in (self.out, self.rows) if path.exists()), None)

    def hold_rows(self) -> bool:
        """A job has written here."""
        return any(path.exists() and path.stat().st_size for path in (self.out, self.rows))

    def _beside(self, ending: str) -> Path:
        return self.out.with_name(self.out.name + ending)
