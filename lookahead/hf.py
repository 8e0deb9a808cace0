"""`model.generate(..., custom_generate=lookahead_generate)`: drafts inside the `generate` of transformers.

In: what `generate` has prepared: ids, processors, stopping criteria, config. Out: what `model._sample` returns for it, scores
included. Each row is a `Generation` whose tokens a `GenerateRow` chooses; the loop is the engine's. What `generate` does to its
arguments before is not known here, but for those that it does not hand on (hf_call.py).

Rows run ahead of each other, so processors and criteria see one row at a time, as [1, width + emitted] with its padding.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerateDecoderOnlyOutput,
)

from lookahead.decode.chooser import draw, processed
from lookahead.decode.constraint import Guide
from lookahead.decode.engine import DecodingEngine, Generation
from lookahead.decode.own_state import own_copies
from lookahead.draft.drafter import Drafter
from lookahead.errors import UsageError
from lookahead.forward.backends import by_own_settings, callers_device
from lookahead.forward.slots import Scores
from lookahead.forward.target import TargetModel
from lookahead.hf_call import is_wrapped, not_handed_on, prompts_of, refuse_unknown_ids, refuse_what_cannot_be, stop_criteria
from lookahead.models.probe import probed

log = logging.getLogger(__name__)

KEPT = "_lookahead"  # name of what is kept on a model
ENGINES = 4  # that are kept, each with its drafter


@by_own_settings
def lookahead_generate(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    streamer: Any = None,
    drafter: Drafter | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    synced_gpus: bool | None = None,
    **model_kwargs: Any,
) -> Any:
    """Return what `model._sample` returns for these arguments, in fewer forwards. For `generate` to call.

    input_ids: [rows, width], padded on the left where model_kwargs["attention_mask"] is 0.
    drafter: who drafts, and keeps what it learns; None: one that the model keeps from call to call.
    stop_strings: see `generate`; asked for here so that it reaches us together with the tokenizer.
    Raises UsageError for what cannot be done in this way, and what processors, criteria and forwards raise.
    """
    given = not_handed_on()
    streamer = given.get("streamer") if streamer is None else streamer
    if stop_strings:
        tokenizer = given.get("tokenizer") if tokenizer is None else tokenizer
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, stop_criteria(stop_strings, tokenizer)])
    refuse_what_cannot_be(model, generation_config, {**given, "synced_gpus": synced_gpus or given.get("synced_gpus")})
    arguments = (logits_processor, stopping_criteria, generation_config)
    if is_wrapped(model):
        log.warning("%s: a wrapper adds to what generate gives it, so it is decoded without drafts.", _name_of(model))
        return model._sample(input_ids, *arguments, streamer=streamer, **model_kwargs)
    prompts = prompts_of(input_ids, model_kwargs)
    longest = max(input_ids.shape[1] + 1, stopping_criteria.max_length or input_ids.shape[1] + 1)
    kept = _kept_of(model)
    with kept.lock:
        target = kept.target_of(model)
        if target.decodes_plainly(longest):
            return model._sample(input_ids, *arguments, streamer=streamer, **model_kwargs)
        refuse_unknown_ids(target, prompts, drafter)
        call = Call(input_ids, generation_config, logits_processor, stopping_criteria)
        batch = Batch(call, input_ids, prompts, streamer)
        batch.decode(kept.engine_of(drafter, rows=len(prompts)), longest - input_ids.shape[1])
    if streamer is not None:
        streamer.end()
    return batch.output(input_ids)


class Call:
    """State that all rows of a call share.

    width: of the prompts. device: of the ids, where `generate` chooses tokens. asked: criteria, but for end tokens and the
    longest text. pads: rows that have ended are filled with `pad`; else they continue until all have. Raises UsageError where
    there is no token to fill ended rows with.
    """

    def __init__(
        self, input_ids: torch.Tensor, config: Any, processors: LogitsProcessorList, criteria: StoppingCriteriaList
    ) -> None:
        self.rows, self.width = input_ids.shape
        self.device, self.processors = input_ids.device, processors
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        if self.pads and config._pad_token_tensor is None:
            raise UsageError("there is an EosTokenCriteria and no pad token for rows that have ended: set pad_token_id.")
        self.pad = int(config._pad_token_tensor) if self.pads else 0
        self.asked = StoppingCriteriaList(c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria))
        ends = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
        self.stop_ids = frozenset(itertools.chain(*ends))
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=1 << 62)
        self.draws = Draws(self.rows, self.device) if config.do_sample else None
        self.in_dict = bool(config.return_dict_in_generate)
        self.keeps_scores = self.in_dict and bool(config.output_scores)
        self.keeps_logits = self.in_dict and bool(config.output_logits)


class Draws:
    """The random draws of `generate`: at each step one for all rows at once, from the global stream of the device.

    Rows come to a step one by one, so the stream is remembered as it was before each. What the draw for all rows gives a row
    depends on the stream and on the row's own probabilities, not on those of other rows.
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows, self.device = rows, device
        self._before: list[torch.Tensor] = []  # states of the stream, one for each step
        self._again = torch.Generator(device)

    def draw(self, row: int, step: int, probabilities: torch.Tensor) -> int:
        """The token of a row at a step. probabilities: [1, vocab]."""
        if self.rows == 1:
            return draw(probabilities)
        alike = probabilities.repeat(self.rows, 1)
        if step == len(self._before):
            self._before.append(self._state())
            return int(torch.multinomial(alike, 1)[row])
        self._again.set_state(self._before[step])
        return int(torch.multinomial(alike, 1, generator=self._again)[row])

    def _state(self) -> torch.Tensor:
        state: torch.Tensor = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        return state


class GenerateRow:
    """One row's tokens, chosen as `generate` chooses them (a `Chooser` of the engine).

    scores, logits: [1, vocab] of each step, where asked for. ended: a criterion has stopped it.
    """

    guide: Guide | None = None
    is_followed = False  # it is notified of each token, for criteria and streamers

    def __init__(self, call: Call, number: int, ids: torch.Tensor):
        self.call, self.number = call, number
        self.emitted: list[int] = []
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self.ended = False
        self._ids = ids  # [1, width + emitted]
        self._processors = LogitsProcessorList(of_row(p, number, call.rows) for p in call.processors)
        self._asked = StoppingCriteriaList(of_row(c, number, call.rows) for c in call.asked)
        self._takes_best = not (call.processors or call.draws or call.keeps_scores or call.keeps_logits)

    def next_token(self, scores: Scores, slot: int, node: int) -> int:
        if self._takes_best:
            return scores.best(slot, node)
        with torch.inference_mode(False), torch.no_grad():  # as in `generate`: what is kept is good for training too
            found = self.score(scores.of(slot)[node])
            if self.call.draws:
                return self.call.draws.draw(self.number, len(self.emitted), found.softmax(-1))
            return int(found.argmax(-1))

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        """[1, vocab] float32: the scores of the next token, kept where asked for. logits: [vocab]."""
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self.call.device)
        with callers_device():
            found = processed(self._processors, self._ids, raw)
        if self.call.keeps_scores:
            self.scores.append(found)
        if self.call.keeps_logits:
            self.logits.append(raw)
        return found

    def accept_token(self, token: int) -> bool:
        self.take(token)
        if self.ended:  # and continues alongside rows that have not
            return False
        self.ended = token in self.call.stop_ids or self.call.width + len(self.emitted) >= self.call.max_length
        if self._asked:
            with torch.inference_mode(False), torch.no_grad(), callers_device():
                scores = tuple(self.scores) if self.call.keeps_scores else None
                self.ended |= bool(self._asked(self._ids, scores).all())
        return self.ended

    def take(self, token: int) -> None:
        """`token` is the next of the text."""
        self.emitted.append(token)
        if self._processors or self._asked:  # a new tensor each time, as in `generate`: some keep what they are shown
            with torch.inference_mode(False):
                self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=-1)


def of_row(thing: Any, row: int, rows: int) -> Any:
    """A processor or criterion for one row of several: a copy, so that the state it keeps about a text is the row's own.

    The user's own are copied deeply (decode/own_state.py), of those of transformers what changes; those that know all rows are
    left with this one. Raises UsageError for one that cannot be copied.
    """
    if rows == 1:
        return thing
    shallow = type(thing).__module__.startswith("transformers.") and type(thing) is not SynthIDTextWatermarkLogitsProcessor
    own = copy.copy(thing) if shallow else own_copies([thing])[0]
    if isinstance(own, PrefixConstrainedLogitsProcessor):
        own._prefix_allowed_tokens_fn = lambda _, ids: thing._prefix_allowed_tokens_fn(row, ids)
    elif isinstance(own, RepetitionPenaltyLogitsProcessor) and isinstance(own.prompt_ignore_length, torch.Tensor):
        own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
    elif isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = _of_prompt(own.encoder_input_ids, row, rows)
    elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams, own.batch_size = _of_prompt(own.generated_ngrams, row, rows), 1
    elif isinstance(own, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        own.unconditional_context = {
            name: _of_prompt(value, row, rows) if isinstance(value, torch.Tensor) else value
            for name, value in own.unconditional_context.items()
        }
    return own


def _of_prompt(values: Any, row: int, rows: int) -> Any:
    """The value of a row's prompt, where there is one for each; num_return_sequences rows come of a prompt."""
    prompt = row * len(values) // rows
    return values[prompt : prompt + 1]


class Batch:
    """The rows of a call, from their prompts to what `generate` returns."""

    def __init__(self, call: Call, input_ids: torch.Tensor, prompts: list[list[int]], streamer: Any):
        self.call, self.prompts, self.streamer = call, prompts, streamer
        self.rows = [GenerateRow(call, number, input_ids[number : number + 1]) for number in range(call.rows)]
        self._streamed = 0  # steps

    def decode(self, engine: DecodingEngine, room: int) -> None:
        """Decode all rows to the length of the longest. room: tokens that a row may emit."""
        try:
            self._run(engine, [room] * len(self.rows))
            steps = max(len(row.emitted) for row in self.rows)
            missing = [steps - len(row.emitted) for row in self.rows]
            if self.call.pads:
                for row, prompt, count in zip(self.rows, self.prompts, missing, strict=True):
                    if count:
                        self._pad(engine.target, row, prompt, count)
            else:
                self._run(engine, missing)
            self._stream()
        finally:
            engine.release_cache()  # weights may change before the next call

    def _run(self, engine: DecodingEngine, rooms: Sequence[int]) -> None:
        """Let rows emit up to that many tokens more."""
        generations = [
            Generation([*prompt, *row.emitted], room, frozenset(), chooser=row, streamed=self.streamer is not None)
            for row, prompt, room in zip(self.rows, self.prompts, rooms, strict=True)
            if room
        ]
        for generation in engine.run(generations, stopped=self._stream):
            if generation.error:
                raise generation.error

    def _pad(self, target: TargetModel, row: GenerateRow, prompt: Sequence[int], count: int) -> None:
        """Fill a row that has ended. `generate` scores the padding as any text, so its scores are computed where asked for."""
        if self.call.keeps_scores or self.call.keeps_logits:
            text = torch.tensor([[*prompt, *row.emitted, *[self.call.pad] * (count - 1)]], device=target.device)
            chosen = {"logits_to_keep": count} if "logits_to_keep" in target.arguments else {}
            with torch.no_grad():
                for logits in target.model(input_ids=text, use_cache=False, **chosen).logits[0, -count:]:
                    row.score(logits)
                    row.take(self.call.pad)
        else:
            row.emitted += [self.call.pad] * count

    def _stream(self) -> bool:
        """Hand the streamer the steps that are known of all rows. Never ends a run."""
        while self.streamer is not None and (tokens := self._tokens_of(self._streamed)) is not None:
            with callers_device():
                self.streamer.put(torch.tensor(tokens, device="cpu"))
            self._streamed += 1
        return False

    def _tokens_of(self, step: int) -> list[int] | None:
        """Return what all rows emit at a step; None if that is not known, or none emits anything."""
        if not any(step < len(row.emitted) for row in self.rows):
            return None
        if not all(step < len(row.emitted) or (row.ended and self.call.pads) for row in self.rows):
            return None
        return [row.emitted[step] if step < len(row.emitted) else self.call.pad for row in self.rows]

    def output(self, input_ids: torch.Tensor) -> Any:
        """[rows, width + steps], or with it all that was kept."""
        emitted = torch.tensor([row.emitted for row in self.rows], dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat([input_ids, emitted], dim=-1)
        if not self.call.in_dict:
            return sequences
        scores = tuple(map(torch.cat, zip(*(row.scores for row in self.rows), strict=True)))
        logits = tuple(map(torch.cat, zip(*(row.logits for row in self.rows), strict=True)))
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=scores if self.call.keeps_scores else None,
            logits=logits if self.call.keeps_logits else None,
        )


# ---- what is kept of a model between calls


class Kept:
    """Kept for a model: how it verifies, and engines for its latest drafters.

    It is an attribute of the model, so that both go together (a weak mapping would hold its keys by way of the engines). A copy
    of the model, in memory or on file, has none.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # one call at a time; a processor may call `generate` itself
        self._target: TargetModel | None = None
        self._setting: tuple[Any, ...] = ()
        self._engines: list[DecodingEngine] = []  # the latest first
        self._drafter: Drafter | None = None

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        return Kept, ()

    def target_of(self, model: Any) -> TargetModel:
        """The model as it verifies now; probed again if something that decides on this has changed."""
        layers = tuple(type(module) for module in model.modules())  # adapters and quantization put in others
        attention = model.config.get_text_config(decoder=True)._attn_implementation
        setting = (model.device, model.dtype, model.training, attention, layers)
        if self._target is None or self._target.model is not model or setting != self._setting:
            devices = [model.device] if model.device.type == "cuda" else []
            with torch.random.fork_rng(devices):  # dropout of a model in training draws
                target = probed(model, _name_of(model))
            self._target = target.as_tensor_parallel_rank() if (getattr(model, "tp_size", None) or 1) > 1 else target
            self._setting, self._engines = setting, []
        return self._target

    def engine_of(self, drafter: Drafter | None, rows: int) -> DecodingEngine:
        """An engine for `rows` rows; that of earlier calls with this drafter, if there is one, as it knows costs."""
        assert self._target is not None
        if drafter is None:
            drafter = self._drafter = self._drafter or Drafter()
        known = [engine for engine in self._engines if engine.drafter is drafter]
        engine = known[0] if known else DecodingEngine(self._target, drafter)
        self._engines = [engine, *(e for e in self._engines if e is not engine)][:ENGINES]
        engine.batch_size = rows
        return engine


def _kept_of(model: Any) -> Kept:
    kept: Kept = vars(model).setdefault(KEPT, Kept())
    return kept


def _name_of(model: Any) -> str:
    return getattr(model.config, "name_or_path", "") or type(model).__name__
