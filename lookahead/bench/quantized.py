"""A model quantized to a new folder, and compared with what it was. In: names, texts. Out: a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lookahead.bench.quality import MOST_TOKENS, Parting, Quality, loss_of, parting, quality_of, texts_of
from lookahead.errors import CorpusError, UsageError
from lookahead.files.outputs import TRIE
from lookahead.forward.backend import check_offered
from lookahead.job.events import BenchEvents
from lookahead.models.load import load_model, read_config
from lookahead.models.options import ModelOptions
from lookahead.quantize.activation_stats import input_sizes
from lookahead.quantize.mixed import ACTIVATIONS, Chosen, choose_bits
from lookahead.quantize.write_packed import Calibration, Written, quantize_checkpoint
from lookahead.tokenizer import identity, own_tokenizer
from lookahead.trie.file import Trie


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """What is quantized, as it was typed. text: a corpus file to compare on. activations: none, int8 or mixed; mixed needs
    calibration, a corpus file or a trie, by which weights are rounded, too. rows: of both. loss_budget: nats per token that
    tokens of 4 bits may cost on it.
    """

    model: ModelOptions
    out: str
    scheme: str
    text: str | None = None
    rows: int = 64
    activations: str = "int8"
    calibration: str | None = None
    loss_budget: float = 0.03
    pack_embedding: bool = False

    def written(self, folder: str | Path) -> ModelOptions:
        """The model in this folder."""
        return ModelOptions(str(folder), device="cpu", trust_remote_code=self.model.trust_remote_code)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of a model and its quantized form, on the same texts, in float32."""

    before: Quality
    after: Quality
    parting: Parting


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """mixed: None where all tokens have 8 bits. compared: None where there was no text."""

    spec: QuantizeSpec
    written: Written
    mixed: Chosen | None
    compared: Comparison | None

    def as_json(self) -> dict[str, Any]:
        """The object that `quantize --json` prints."""
        written, value = self.written, dict[str, Any]()
        value["model"], value["out"], value["weights"] = self.spec.model.name, self.spec.out, self.spec.scheme
        value["bytes_before"], value["bytes_after"] = written.bytes_before, written.bytes_after
        value["layers"] = [dataclasses.asdict(layer) for layer in written.layers]
        value["activations"] = self.spec.activations
        if self.mixed is not None:
            value |= {"share_in_8_bits": self.mixed.share, "blocks_in_8_bits": self.mixed.in_8_bits}
            value |= {"calibration_loss_int8": self.mixed.loss_in_8_bits, "calibration_loss": self.mixed.loss}
        if self.compared is not None:
            before, after = self.compared.before, self.compared.after
            value |= {"text_tokens": before.tokens, "loss_before": before.loss, "loss_after": after.loss}
            value |= {"perplexity_before": before.perplexity, "perplexity_after": after.perplexity}
            value["answers"] = dataclasses.asdict(self.compared.parting)
        return value


def _check(spec: QuantizeSpec) -> None:
    """Raises UsageError for tokens that cannot be quantized so."""
    if spec.activations not in ACTIVATIONS:
        raise UsageError(f"--activations {spec.activations}: choose {', '.join(ACTIVATIONS)}.")
    if spec.activations == "mixed" and spec.calibration is None:
        raise UsageError("--activations mixed needs --calibration FILE, a corpus or a trie.")
    if spec.activations == "mixed":
        check_offered("--quantize", spec.scheme, torch.device("cpu"))


def _texts(spec: QuantizeSpec, path: str) -> list[list[int]]:
    """Documents of a corpus or a trie, as ids. Raises LookaheadError for none, and for a trie of another tokenizer."""
    config, name = read_config(*spec.model.source).get_text_config(decoder=True), spec.model.name
    tokenizer, vocab_size = own_tokenizer(*spec.model.source), int(config.vocab_size)
    if not (Path(path).is_file() and TRIE.matches(Path(path))):
        return texts_of(path, tokenizer, vocab_size, spec.rows)
    trie = Trie(path)
    trie.check_tokenizer("" if tokenizer is None else identity(tokenizer, name).fingerprint, vocab_size, name)
    documents = [document for document in trie.documents() if len(document) > 1]
    if not documents:
        raise CorpusError(f"{path}: no document of 2 tokens or more.")
    return [each[:MOST_TOKENS].tolist() for each in documents[:: -(-len(documents) // spec.rows)]]


def _calibration(spec: QuantizeSpec, texts: list[list[int]]) -> Calibration:
    original = load_model(spec.model, device="cpu", engine_mode="modules")

    def run() -> None:
        loss_of(original, texts)

    return Calibration(original.model, run, input_sizes(original.model, run), spec.activations == "mixed")


def quantize(spec: QuantizeSpec, events: BenchEvents | None = None) -> QuantizeReport:
    """Write the folder, then compare. Raises LookaheadError where one of these fails; a folder that is written stays."""
    _check(spec)
    events = events or BenchEvents()
    texts = [] if spec.text is None else _texts(spec, spec.text)
    chosen = list[Chosen]()
    choose, calibration = None, None
    if spec.calibration is not None:
        documents = _texts(spec, spec.calibration)
        with events.working("calibrating", 1, "models") as progress:
            calibration = _calibration(spec, documents)
            progress(1)

        def choose_of(folder: Path, largest: Mapping[str, torch.Tensor]) -> dict[str, int]:
            target = load_model(spec.written(folder), engine_mode="modules")
            chosen.append(choose_bits(target.model, largest, lambda: loss_of(target, documents) or 0.0, spec.loss_budget))
            return chosen[0].in_8_bits

        choose = choose_of if spec.activations == "mixed" else None
    _, trusted, revision = spec.model.source
    given = trusted, revision, calibration, choose, spec.pack_embedding, spec.activations == "none"
    with events.working("quantizing", 100, "%") as progress:
        name = spec.model.name
        written = quantize_checkpoint(name, spec.out, spec.scheme, lambda done, of: progress(100 * done // of), *given)
    del calibration, given  # the model that they hold is freed
    mixed = chosen[0] if chosen else None
    if not texts:
        return QuantizeReport(spec, written, mixed, None)
    with events.working("comparing", 2, "models") as progress:
        before = quality_of(load_model(spec.model, device="cpu"), texts)
        progress(1)
        after = quality_of(load_model(spec.written(spec.out)), texts)
        progress(2)
    return QuantizeReport(spec, written, mixed, Comparison(before, after, parting(before, after)))
