"""The model `lookahead` of lm-evaluation-harness. In: its requests. Out: log-likelihoods and answers.

It inherits from its model `hf` how texts become tokens, where they are cut and how answers become texts: the two differ in who
computes the forwards. What a context shares with others is computed once (`prompt_logprobs_start`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import configure_pad_token, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from lookahead.api import OF_A_NAMED_MODEL, GenerationParams, GenerationResult, LookaheadEngine
from lookahead.decode.sampling_options import SamplingFields
from lookahead.draft.options import DraftOptions
from lookahead.errors import LookaheadError, ModelError, UsageError
from lookahead.models.load import load_model
from lookahead.models.options import ModelOptions

log = logging.getLogger(__name__)

OF_MODEL = (*OF_A_NAMED_MODEL, "tokenizer", "exact")  # arguments that are fields of ModelOptions
OF_SAMPLING = {field.name for field in dataclasses.fields(SamplingFields)}
WINDOWS = 1024  # of loglikelihood_rolling that are handed to the engine together


@register_model("lookahead")
class LookaheadLM(HFLM):
    """A causal LM in our engine."""

    def __init__(
        self,
        pretrained: str | None = None,
        trie: str | Sequence[str] = (),
        strategy: str = "auto",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        **options: Any,
    ):
        """pretrained: a folder, a GGUF file or a hub name. trie: tries or corpora to draft from, as a list or divided by ";".
        strategy: auto, hierarchical, parallel, single or off. batch_size: requests at once; auto: 8 on a CPU, 32 on a GPU.
        max_length: tokens of the longest text (default: as of `hf`). options: fields of `ModelOptions` that OF_MODEL lists.
        The others are those of `hf`.
        Raises UsageError for an argument that there is not, and LookaheadError if model or tries cannot be used.
        """
        TemplateLM.__init__(self)  # that of HFLM loads a model
        own = "pretrained, trie, strategy, max_length, add_bos_token, prefix_token_id, chat_template_args, enable_thinking"
        if unknown := sorted(options.keys() - {*OF_MODEL}):
            raise UsageError(f"no argument {unknown[0]}: give {own}, think_end_token, {', '.join(OF_MODEL)}.")
        if pretrained is None:
            raise UsageError("name a model: pretrained=NAME_OR_DIR.")
        if not isinstance(chat_template_args, dict | None):
            raise UsageError(f"chat_template_args is {chat_template_args!r}: give a dict.")
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise UsageError(f"max_length is {max_length!r}: it must be a whole number above 0.")
        if (enable_thinking and not think_end_token) or not isinstance(think_end_token, str | None):
            raise UsageError(f"think_end_token is {think_end_token!r}: give the text behind which an answer begins.")
        if options.get("device") == "cuda:0" and not torch.cuda.is_available():  # lm-eval's default everywhere
            options["device"] = "auto"
        wished = ModelOptions(str(pretrained), **options)
        target, tokenizer = load_model(wished), wished.load_tokenizer()
        if tokenizer is None:
            raise ModelError(f"{wished.name}: has no tokenizer: name one with tokenizer=NAME_OR_DIR.")
        kind: Any = "hierarchical" if strategy == "auto" else strategy
        size: Any = None if str(batch_size).startswith("auto") else batch_size  # else a number, or one as text
        self.engine = LookaheadEngine(
            target,
            tokenizer,
            trie.split(";") if isinstance(trie, str) else trie,
            batch_size=int(size) if str(size).isdigit() else size,
            drafts=DraftOptions(kind),
        )
        # what methods of HFLM read
        self._model, self._config, self._device = target.model, target.model.config, target.device
        self.tokenizer, self.backend, self.truncation = configure_pad_token(tokenizer, self._config), "causal", False
        self._max_length, self.add_bos_token, self.custom_prefix_token_id = max_length, add_bos_token, prefix_token_id
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.chat_template_args, self.enable_thinking = {**(chat_template_args or {}), **thinking}, enable_thinking
        self.think_end_token, self.batch_size_per_gpu = think_end_token, WINDOWS
        self.pretrained, self.revision, self.peft, self.delta = wished.name, wished.revision or "main", None, None
        if self.max_length > target.longest_text:
            raise UsageError(f"max_length is {self.max_length}: {target.name} has {target.longest_text} positions.")

    def get_model_info(self) -> dict[str, Any]:
        """What a file of results holds about the model. It has fewer parameters than its file, as panels are none."""
        return {name: value for name, value in super().get_model_info().items() if name != "model_num_parameters"}

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """(Log-probability of the continuation, whether greedy decoding emits it) of each request: its texts or None, context,
        continuation.

        Of the tokens the last `max_length` + 1 are used, the last one of which is scored and not read.
        """
        texts, params, cut = list[list[int]](), list[GenerationParams](), 0
        for _, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise LookaheadError(f"a continuation has {len(continuation)} tokens: 1 to {self.max_length} can be scored.")
            texts.append((context + continuation)[-self.max_length - 1 :])
            cut += len(texts[-1]) < len(context) + len(continuation)
            start = len(texts[-1]) - len(continuation)
            params.append(GenerationParams(max_new_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start))
        if cut:
            log.warning("%d of %d texts are longer than %d tokens and are cut on the left.", cut, len(texts), self.max_length)
        found = [(0.0, False)] * len(texts)
        for index, result in self._results("loglikelihood", texts, params, disable_tqdm):
            scored, request = [each for each in result.prompt_logprobs or () if each], requests[index][0]
            found[index] = sum(each.logprob for each in scored), all(each.top[0][0] == each.token_id for each in scored)
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, found[index])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers to (context, generation_kwargs), up to the first of their stop texts."""
        asked = [self._asked(*request.args) for request in requests]
        prompts, params = [prompt for prompt, _ in asked], [each for _, each in asked]
        answers = [""] * len(requests)
        for index, result in self._results("generate_until", prompts, params, disable_tqdm):
            text, stop = self.tok_decode(result.token_ids), [*params[index].stop]
            answers[index] = postprocess_generated_text(text, stop, self.think_end_token)
            self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
        return answers

    def _asked(self, context: str, gen_kwargs: dict[str, Any]) -> tuple[list[int], GenerationParams]:
        """Prompt and params of a request of generate_until. Samples depend on its index and the seed of torch alone."""
        asked: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)}
        most, samples = asked.pop("max_gen_toks"), asked.pop("do_sample")
        stop = handle_stop_sequences(asked.pop("until"), self.tok_decode(self.eot_token_id, skip_special_tokens=False))
        if asked.get("num_beams") == 1:
            del asked["num_beams"]
        if unknown := sorted(asked.keys() - OF_SAMPLING):
            allowed = ", ".join(sorted(OF_SAMPLING))
            raise UsageError(f"generation_kwargs: no {unknown[0]}: give until, max_gen_toks, do_sample, {allowed}.")
        if most >= self.max_length:
            raise UsageError(f"max_gen_toks is {most}: it must be below max_length, {self.max_length} tokens.")
        prompt, _ = self.tok_batch_encode([context], left_truncate_len=self.max_length - most)
        asked |= {"sampling": "model" if samples else "greedy", "seed": torch.initial_seed()}
        return prompt[0].tolist(), GenerationParams(max_new_tokens=most, stop=stop, **asked)

    def _results(
        self, kind: str, prompts: Sequence[list[int]], params: Sequence[GenerationParams], quiet: bool
    ) -> Iterator[tuple[int, GenerationResult]]:
        """(Index, result) of each prompt as it is finished. Raises the LookaheadError of one that failed."""
        with tqdm(total=len(prompts), desc=f"Running {kind} requests", disable=quiet) as bar:
            for index, result in self.engine.generate_iter(prompts, params):
                if result.error:
                    raise result.error
                bar.update()
                yield index, result
