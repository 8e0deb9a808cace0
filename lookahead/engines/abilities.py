"""What engines of others cannot do of all that a request may ask. In: a `Sampling`. Out: an error that names the field."""

from __future__ import annotations

import dataclasses

from lookahead.decode.sampling import Sampling
from lookahead.errors import UsageError

OFF = {"typical_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # values that ask for nothing, as 0 and nothing at all


@dataclasses.dataclass(frozen=True)
class EngineFeatures:
    """title: of the engine. missing: fields that it does not have. not_with_drafts: fields that it does not have while it
    verifies drafts; objection: what it does then.
    """

    title: str
    missing: tuple[str, ...]
    not_with_drafts: tuple[str, ...]
    objection: str

    def check(self, sampling: Sampling, drafts: bool = True) -> None:
        """Raises UsageError for what the engine cannot do. drafts: it is asked to verify some."""
        if sampling.sampling == "model":
            raise UsageError(
                f"sampling is model: {self.title} does not sample by all of the model's generation config, give a temperature."
            )
        for name in self.missing + (self.not_with_drafts if drafts else ()):
            value = getattr(sampling, name)
            if value and value != OFF.get(name):
                refused = f"{self.title} {self.objection} it with drafts, so set --strategy off"
                raise UsageError(
                    f"{name} is set, and {f'{self.title} has none' if name in self.missing else refused} (engine hf has it)."
                )


VLLM = EngineFeatures(
    "vLLM", ("typical_p", "no_repeat_ngram_size", "bad_words_ids", "processors"), ("min_p", "logit_bias"), "refuses"
)
SGLANG = EngineFeatures(  # penalties count the text before a draft tree for all of its nodes there
    "SGLang",
    ("typical_p", "no_repeat_ngram_size", "bad_words_ids", "bad_words", "processors"),
    ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "min_new_tokens"),
    "does not keep to",
)
ABILITIES = {"vllm": VLLM, "sglang": SGLANG}  # by --engine
