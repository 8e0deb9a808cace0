"""A model quantized to a new folder, and compared with what it was. In: names, texts. Out: a report."""

from __future__ import annotations

import dataclasses
from typing import Any

from lookahead.bench.events import BenchEvents
from lookahead.bench.quality import Parting, Quality, parting, quality_of, texts_of
from lookahead.job.setup import own_tokenizer
from lookahead.models.load import load_model, read_config
from lookahead.models.write_packed import Written, quantize_checkpoint


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """What is quantized, as it was typed. text: a corpus file to compare on; rows: of it."""

    model: str
    out: str
    scheme: str
    text: str | None = None
    rows: int = 64
    trust_remote_code: bool = False
    revision: str | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of a model and its quantized form, on the same texts, in float32."""

    before: Quality
    after: Quality
    parting: Parting


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """compared: None where there was no text."""

    spec: QuantizeSpec
    written: Written
    compared: Comparison | None

    def as_json(self) -> dict[str, Any]:
        """The object that `quantize --json` prints."""
        written, value = self.written, dict[str, Any]()
        value["model"], value["out"], value["weights"] = self.spec.model, self.spec.out, self.spec.scheme
        value["bytes_before"], value["bytes_after"] = written.bytes_before, written.bytes_after
        value["layers"] = [dataclasses.asdict(layer) for layer in written.layers]
        if self.compared is not None:
            before, after = self.compared.before, self.compared.after
            value |= {"text_tokens": before.tokens, "loss_before": before.loss, "loss_after": after.loss}
            value |= {"perplexity_before": before.perplexity, "perplexity_after": after.perplexity}
            value["answers"] = dataclasses.asdict(self.compared.parting)
        return value


def quantize(spec: QuantizeSpec, events: BenchEvents | None = None) -> QuantizeReport:
    """Write the folder, then compare. Raises LookaheadError where one of these fails; a folder that is written stays."""
    events = events or BenchEvents()
    texts: list[list[int]] = []
    if spec.text is not None:
        config = read_config(spec.model, spec.trust_remote_code, spec.revision).get_text_config(decoder=True)
        tokenizer = own_tokenizer(spec.model, spec.trust_remote_code, spec.revision)
        texts = texts_of(spec.text, tokenizer, int(config.vocab_size), spec.rows)
    given = spec.trust_remote_code, spec.revision
    with events.working("quantizing", 100, "%") as progress:
        written = quantize_checkpoint(spec.model, spec.out, spec.scheme, lambda done, of: progress(100 * done // of), *given)
    if not texts:
        return QuantizeReport(spec, written, None)
    with events.working("comparing", 2, "models") as progress:
        trusted = spec.trust_remote_code
        before = quality_of(load_model(spec.model, device="cpu", trust_remote_code=trusted, revision=spec.revision), texts)
        progress(1)
        after = quality_of(load_model(spec.out, device="cpu", trust_remote_code=trusted), texts)
        progress(2)
    return QuantizeReport(spec, written, Comparison(before, after, parting(before, after)))
