"""One row of a job, read: what is asked, or what is wrong with it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from lookahead.printable import in_one_line

LONGEST_PROBLEM = 1000  # characters: a row may hold keys of any length


class RowError(ValueError):
    """What is wrong with a row. param: the key that it is about, where it is one."""

    def __init__(self, problem: str, param: str | None = None):
        line = in_one_line(problem)
        super().__init__(line if len(line) <= LONGEST_PROBLEM else f"{line[:LONGEST_PROBLEM]}...")
        self.param = param


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of a job. Exactly one of prompt, messages, prompt_ids, prompts and problem is set.

    prompts: several, each text or token ids; each gets n answers. param: the key that a problem is about.
    echo: the prompt's text stands before the answer's. number: of the row, from 0 through all files. file: its name where there
    are several, else "". fingerprint: of id and content. kept: fields that the output row keeps.
    """

    id: Any
    line: int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    prompts: list[str | list[int]] | None = None
    problem: str = ""
    param: str | None = None
    max_new_tokens: int | None = None
    n: int | None = None  # samples
    seed: int | None = None
    logprobs: int | Literal[False] | None = None  # False: none, regardless of the job
    prompt_logprobs: int | Literal[False] | None = None
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the fields of sampling.Sampling
    openai: bool = False
    echo: bool = False
    number: int = 0
    file: str = ""
    fingerprint: bytes = b""
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"
