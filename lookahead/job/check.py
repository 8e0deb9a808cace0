"""Rows checked without a model's weights. In: requests, the model's config and tokenizer. Out: what is wrong with each row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Any

from lookahead.corpus.read import named_files
from lookahead.decode.engine import room_of
from lookahead.decode.limits import check_samples
from lookahead.decode.sampling import Sampling, check_vocabulary
from lookahead.engines.foreign import FEATURES
from lookahead.errors import LookaheadError
from lookahead.forward.target import longest_text
from lookahead.job.params import Request
from lookahead.job.plan import plan_of
from lookahead.job.rows import left_to_do, prompts_of, read_requests, sampling_of, without_duplicates
from lookahead.job.runner import JobOptions
from lookahead.job.spec import JobSpec
from lookahead.models.load import read_config

LISTED = 1000  # problems in JSON


@dataclasses.dataclass
class CheckReport:
    """prompt_tokens: of all rows; longest: of one row. problems: the first LISTED, as JSON objects."""

    model: str
    rows: int = 0
    bad_rows: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    problems: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The object that `generate --dry-run --json` prints."""
        counts = {"rows": self.rows, "bad_rows": self.bad_rows, "prompt_tokens": self.prompt_tokens}
        return {"model": self.model, **counts, "longest_prompt_tokens": self.longest, "problems": self.problems}


def check_job(spec: JobSpec, found: Callable[[str], None] = lambda problem: None) -> CheckReport:
    """Check all rows of a job without loading weights. found: called with FILE:LINE: problem. Raises as `run_job` does."""
    plan = plan_of(spec)
    names = named_files(spec.io.input or ())
    wanted = islice(read_requests(*names, fields=plan.fields), spec.io.limit)
    requests = left_to_do(without_duplicates(wanted), plan.shard, {})
    report = CheckReport(plan.model)
    settings, options = plan.engine_settings(), plan.row_options()
    config = read_config(*settings.model.source).get_text_config(decoder=True)
    model = int(config.vocab_size), longest_text(config), settings.model.load_tokenizer()
    foreign, drafts = FEATURES.get(spec.model.engine), plan.drafts.strategy != "off"
    for request in requests:
        report.rows += 1
        try:
            tokens, sampling = _checked(request, options, *model)
            if foreign:
                foreign.check(sampling, drafts)
        except LookaheadError as error:
            report.bad_rows += 1
            file = request.file or names[0]
            found(f"{file}:{request.line}: {error}")
            if len(report.problems) < LISTED:
                report.problems.append({"file": file, "line": request.line, "id": request.id, "message": str(error)})
        else:
            report.prompt_tokens += tokens
            report.longest = max(report.longest, tokens)
    return report


def _checked(
    request: Request, options: JobOptions, vocab_size: int, longest: int, tokenizer: Any | None
) -> tuple[int, Sampling]:
    """(tokens of all its prompts, how they are sampled). Raises LookaheadError where the row could not be answered."""
    if request.problem:
        raise LookaheadError(f"{request.problem}.")
    prompts = prompts_of(request, tokenizer, options.chat, options.system, longest, options.began)
    check_samples(len(prompts) * (request.n or options.n), "the number of answers")
    sampling = sampling_of(request, tokenizer, options.sampling)
    check_vocabulary(sampling, vocab_size)
    most = options.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    for prompt_ids in prompts:
        room_of(prompt_ids, most, vocab_size, longest)
    if tokenizer is None and (sampling.stop or sampling.constraint or request.openai):
        raise LookaheadError("the model has no tokenizer, which stop texts, constraints and OpenAI lines need.")
    if sampling.constraint is not None and sampling.constraint != options.sampling.constraint:
        sampling.constraint.check()
    return sum(map(len, prompts)), sampling
