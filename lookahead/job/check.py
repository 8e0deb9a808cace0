"""Rows checked without a model's weights. In: requests, the model's config and tokenizer. Out: what is wrong with each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lookahead.corpus.read import named_files
from lookahead.decode.engine import room_of
from lookahead.decode.limits import check_samples
from lookahead.decode.sampling import Sampling, check_vocabulary
from lookahead.decode.text import text_of
from lookahead.engines.foreign import FEATURES
from lookahead.errors import LookaheadError
from lookahead.forward.target import longest_text
from lookahead.job.estimate import ID_BYTES, JobEstimate, estimated
from lookahead.job.params import Request
from lookahead.job.plan import plan_of
from lookahead.job.rows import prompts_of, sampling_of
from lookahead.job.run import files_of, requests_left, what_is_done
from lookahead.job.runner import JobOptions
from lookahead.job.spec import JobSpec
from lookahead.models.adapter import check_adapter
from lookahead.models.load import read_config

LISTED = 1000  # problems in JSON
SAMPLED = 100_000  # bytes and tokens of prompts that tell how long text is


@dataclasses.dataclass
class CheckReport:
    """prompt_tokens: of all rows; longest: of one row. problems: the first LISTED, as JSON objects. done: rows
    that are answered already and left out. estimate: what the others will take.
    """

    model: str
    rows: int = 0
    bad_rows: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    problems: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    done: int = 0
    estimate: JobEstimate | None = None

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --dry-run --json` prints."""
        counts = {"rows": self.rows, "bad_rows": self.bad_rows, "prompt_tokens": self.prompt_tokens}
        counts |= {"longest_prompt_tokens": self.longest, "answered_rows": self.done}
        estimate = self.estimate.as_json() if self.estimate else None
        return {"model": self.model, **counts, "estimate": estimate, "problems": self.problems}


def check_job(spec: JobSpec, found: Callable[[str], None] = lambda problem: None) -> CheckReport:
    """Check all rows of a job without loading weights. found: called with FILE:LINE: problem. Raises as `run_job` does."""
    plan = plan_of(spec)
    names = named_files(spec.io.input or ())
    io, done = spec.io, None
    files = files_of(io.out, io.resume, io.retry_errors, io.overwrite)
    if files and io.resume and files.hold_rows():
        done = what_is_done(plan, files, names)
    requests, _ = requests_left(plan, names, done)
    report = CheckReport(plan.model, done=len(done.requests) if done else 0)
    lengths, text = list[tuple[int, int]](), [0, 0]  # of each answer; bytes and tokens of prompts
    settings, options = plan.engine_settings(), plan.row_options()
    config = read_config(*settings.model.source).get_text_config(decoder=True)
    for adapter in settings.model.adapters.values():
        check_adapter(adapter)
    model = int(config.vocab_size), longest_text(config), settings.model.load_tokenizer()
    foreign, drafts = FEATURES.get(spec.model.engine), plan.drafts.strategy != "off"
    for request in requests:
        report.rows += 1
        try:
            prompts, most, sampling = _checked(request, options, *model)
            if foreign:
                foreign.check(sampling, drafts)
        except LookaheadError as error:
            report.bad_rows += 1
            file = request.file or names[0]
            found(f"{file}:{request.line}: {error}")
            if len(report.problems) < LISTED:
                report.problems.append({"file": file, "line": request.line, "id": request.id, "message": str(error)})
        else:
            tokens = sum(map(len, prompts))
            report.prompt_tokens += tokens
            report.longest = max(report.longest, tokens)
            lengths += [(len(prompt), most) for prompt in prompts for _ in range(request.n or options.n)]
            if sum(text) < SAMPLED and model[-1] is not None:
                text = [text[0] + sum(len(text_of(model[-1], prompt).encode()) for prompt in prompts), text[1] + tokens]
    text_bytes = text[0] / text[1] if text[1] else ID_BYTES
    report.estimate = estimated(plan, report.rows - report.bad_rows, lengths, files if done else None, text_bytes)
    return report


def _checked(
    request: Request, options: JobOptions, vocab_size: int, longest: int, tokenizer: Any | None
) -> tuple[list[list[int]], int, Sampling]:
    """(its prompts, the most new tokens of an answer, sampling). Raises LookaheadError where the row could not be answered."""
    if request.problem:
        raise LookaheadError(f"{request.problem}.")
    prompts = prompts_of(request, tokenizer, options.chat, options.system, longest, options.began)
    check_samples(len(prompts) * (request.n or options.n), "the number of answers")
    sampling = sampling_of(request, tokenizer, options.sampling)
    check_vocabulary(sampling, vocab_size)
    most = options.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    rooms = [room_of(prompt_ids, most, vocab_size, longest) for prompt_ids in prompts]
    if tokenizer is None and (sampling.stop or sampling.constraint or request.openai):
        raise LookaheadError("the model has no tokenizer, which stop texts, constraints and OpenAI lines need.")
    if sampling.constraint is not None and sampling.constraint != options.sampling.constraint:
        sampling.constraint.check()
    return prompts, max(rooms), sampling
