"""A bench on a model that a test has made."""

from collections.abc import Callable, Sequence
from typing import Any

from lookahead.bench.compare import Comparison, Texts, compare
from lookahead.bench.contenders import ModelBench
from lookahead.draft.options import DraftOptions
from lookahead.forward.target import TargetModel
from lookahead.models.options import ModelOptions


def compared_on(
    target: TargetModel,
    prompts: Texts,
    options: Sequence[DraftOptions],
    max_new_tokens: int = 256,
    batch_size: int = 1,
    answers: Texts | None = None,
    progress: Callable[[int], None] = lambda done: None,
    warm_up: int = 2,
    **others: Any,
) -> Comparison:
    """Compare without tries. others: of `ModelBench`."""
    bench = ModelBench(ModelOptions(), options, max_new_tokens=max_new_tokens, **others)
    return compare(target, prompts, bench, batch_size, answers=answers, progress=progress, warm_up=warm_up)
