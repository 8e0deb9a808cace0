"""A model quantized to a new folder, and compared with what it was. In: names, texts. Out: a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lookahead.bench.options import QuantizeOptions
from lookahead.corpus.read import first_documents
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.drafter import Drafter
from lookahead.draft.options import DraftOptions
from lookahead.draft.tree import chain, side_by_side
from lookahead.errors import CorpusError, UsageError
from lookahead.files.outputs import TRIE
from lookahead.forward.backend import check_offered
from lookahead.forward.slots import slots_of
from lookahead.forward.target import TargetModel
from lookahead.job.events import BenchEvents
from lookahead.models.load import load_model, read_config
from lookahead.models.options import ModelOptions
from lookahead.quantize.activation_stats import input_sizes
from lookahead.quantize.mixed import ACTIVATIONS, Chosen, choose_bits
from lookahead.quantize.write_packed import Calibration, Written, quantize_checkpoint
from lookahead.tokenizer import identity, own_tokenizer
from lookahead.trie.file import Trie


@dataclasses.dataclass(frozen=True)
class QuantizeReport:
    """mixed: None where all tokens have 8 bits. before, after: of the model, on the same texts, in float32; None: no text."""

    model: ModelOptions
    options: QuantizeOptions
    written: Written
    mixed: Chosen | None
    before: Quality | None = None
    after: Quality | None = None

    def as_json(self) -> dict[str, Any]:
        """The object that `quantize --json` prints."""
        written, options = self.written, self.options
        value: dict[str, Any] = {"model": self.model.name, "out": options.out, "weights": options.weights}
        value |= {"bytes_before": written.bytes_before, "bytes_after": written.bytes_after}
        value |= {"layers": [dataclasses.asdict(layer) for layer in written.layers], "activations": options.activations}
        if self.mixed is not None:
            value |= {"share_in_8_bits": self.mixed.share, "blocks_in_8_bits": self.mixed.in_8_bits}
            value |= {"calibration_loss_int8": self.mixed.loss_in_8_bits, "calibration_loss": self.mixed.loss}
        if (before := self.before) and (after := self.after):
            value |= {"text_tokens": before.tokens, "loss_before": before.loss, "loss_after": after.loss}
            value |= {"perplexity_before": before.perplexity, "perplexity_after": after.perplexity}
            value["answers"] = dataclasses.asdict(divergence(before, after))
        return value


def _texts(model: ModelOptions, path: str, rows: int) -> list[list[int]]:
    """Documents of a corpus or a trie, as ids. Raises LookaheadError for none, and for a trie of another tokenizer."""
    config, name = read_config(*model.source).get_text_config(decoder=True), model.name
    tokenizer, vocab_size = own_tokenizer(*model.source), int(config.vocab_size)
    if not (Path(path).is_file() and TRIE.matches(Path(path))):
        return [ids[:MOST_TOKENS] for ids in first_documents(path, tokenizer, vocab_size, rows)]
    trie = Trie(path)
    trie.check_tokenizer("" if tokenizer is None else identity(tokenizer, name).fingerprint, vocab_size, name)
    documents = [document for document in trie.documents() if len(document) > 1]
    if not documents:
        raise CorpusError(f"{path}: no document of 2 tokens or more.")
    return [each[:MOST_TOKENS].tolist() for each in documents[:: -(-len(documents) // rows)]]


def _calibration(model: ModelOptions, texts: list[list[int]], mixed: bool) -> Calibration:
    original = load_model(model, device="cpu", engine_mode="modules")

    def run() -> None:
        loss_of(original, texts)

    return Calibration(original.model, run, input_sizes(original.model, run), mixed)


def quantize(model: ModelOptions, options: QuantizeOptions, events: BenchEvents | None = None) -> QuantizeReport:
    """Write the folder, then compare. Raises LookaheadError where one of these fails; a folder that is written stays."""
    if options.activations not in ACTIVATIONS:
        raise UsageError(f"--activations {options.activations}: choose {', '.join(ACTIVATIONS)}.")
    if options.activations == "mixed" and options.calibration is None:
        raise UsageError("--activations mixed needs --calibration FILE, a corpus or a trie.")
    if options.activations == "mixed":
        check_offered("--quantize", options.weights, torch.device("cpu"))
    events = events or BenchEvents()
    texts = [] if options.text is None else _texts(model, options.text, options.rows)
    chosen = list[Chosen]()
    choose, calibration, mixed = None, None, options.activations == "mixed"
    if options.calibration is not None:
        documents = _texts(model, options.calibration, options.rows)
        with events.working("calibrating", 1, "models") as progress:
            calibration = _calibration(model, documents, mixed)
            progress(1)

        def choose_of(folder: Path, largest: Mapping[str, torch.Tensor]) -> dict[str, int]:
            target = load_model(quantized(folder), engine_mode="modules")
            chosen.append(choose_bits(target.model, largest, lambda: loss_of(target, documents) or 0.0, options.loss_budget))
            return chosen[0].in_8_bits

        choose = choose_of if mixed else None

    def quantized(folder: str | Path) -> ModelOptions:
        return ModelOptions(str(folder), device="cpu", trust_remote_code=model.trust_remote_code)

    trusted, weights_only = (model.trust_remote_code, model.revision), options.activations == "none"
    given = *trusted, calibration, choose, options.pack_embedding, weights_only
    with events.working("quantizing", 100, "%") as progress:
        name = model.name
        written = quantize_checkpoint(name, options.out, options.weights, lambda done, of: progress(100 * done // of), *given)
    del calibration, given  # the model that they hold is freed
    report = QuantizeReport(model, options, written, chosen[0] if chosen else None)
    if not texts:
        return report
    with events.working("comparing", 2, "models") as progress:
        before = quality_of(load_model(model, device="cpu"), texts)
        progress(1)
        after = quality_of(load_model(quantized(options.out)), texts)
        progress(2)
    return dataclasses.replace(report, before=before, after=after)


MOST_TOKENS = 512  # of a text: the rest is left out
ANSWERED, ANSWER_TOKENS = 16, 64  # texts whose first half is answered, and tokens of an answer


@dataclasses.dataclass(frozen=True)
class Quality:
    """Quality of a model on texts. loss: nats per token. answers: greedy tokens after the first halves of the first texts."""

    loss: float
    tokens: int
    answers: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@torch.inference_mode()
def quality_of(target: TargetModel, texts: Sequence[Sequence[int]]) -> Quality:
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor([text[: target.longest_text]], device=target.device)
        scores = target.model(input_ids=ids).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    engine = DecodingEngine(target, Drafter((), DraftOptions("off")), 1)
    requests = [engine.request(list(text[: max(1, len(text) // 2)]), ANSWER_TOKENS) for text in texts[:ANSWERED]]
    for _ in engine.run(requests):
        pass
    return Quality(total / tokens, tokens, [request.token_ids for request in requests])


@torch.inference_mode()
def loss_of(target: TargetModel, texts: Sequence[Sequence[int]]) -> float | None:
    """nats per token of texts (ids) as the model prefills prompts, with its KV cache; None where none has 2 tokens."""
    total, tokens = 0.0, 0
    for text in texts:
        ids = np.array(text[: min(MOST_TOKENS, target.longest_text)], np.int32)
        if len(ids) > 1:
            if target.mode == "plain":
                scores = target.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None].to(target.device)).logits[0]
            else:
                slots = slots_of(target)
                slots.begin(slots.add(ids.tolist()))
                scores = slots.forward(side_by_side([chain(ids)], ["all"])).of(0)
            scores = scores[:-1].float()
            after = torch.from_numpy(ids[1:].astype(np.int64)).to(scores.device)
            total += float(torch.nn.functional.cross_entropy(scores, after, reduction="sum"))
            tokens += len(after)
    return total / tokens if tokens else None


@dataclasses.dataclass(frozen=True)
class AnswerChange:
    """Position where greedy answers of two models diverge. text, token: counted from 0; None: all are the same."""

    identical: int
    answers: int
    text: int | None
    token: int | None


def divergence(before: Quality, after: Quality) -> AnswerChange:
    first = []
    for text, (left, right) in enumerate(zip(before.answers, after.answers, strict=True)):
        if left != right:
            same = (a == b for a, b in zip(left, right, strict=False))
            index = next((index for index, equal in enumerate(same) if not equal), min(len(left), len(right)))
            first.append((index, text))
    earliest = min(first, default=(None, None))
    return AnswerChange(len(before.answers) - len(first), len(before.answers), earliest[1], earliest[0])
