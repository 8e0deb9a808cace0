"""The target model. In: a folder or hub name. Out: a stock Hugging Face causal LM and the way its drafts can be verified.

How drafts are verified is decided by a probe at load, not by a list of names:
    tree   any draft tree in one forward, by a tree attention mask
    chain  one branch in one forward, by the model's own causal mask (models that take no tree mask)
    plain  no drafts: the model's own `generate` (models whose state cannot be rolled back)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lookahead.decode.batch import MaskPlan, tree_inputs
from lookahead.decode.kv_cache import SequenceCache
from lookahead.draft.tree import DraftTree, chain
from lookahead.errors import ModelError, UsageError
from lookahead.tokenizer import first_line, looks_like_path, quiet_hub

Mode = Literal["tree", "chain", "plain"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """A loaded model and how it verifies.

    mode: see the module's docstring. reason: why it is not "tree".
    """

    model: Any
    name: str
    mode: Mode
    reason: str = ""

    @functools.cached_property  # transformers walks the parameters at each call
    def device(self) -> torch.device:
        return self.model.device

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @functools.cached_property
    def text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @functools.cached_property
    def longest_text(self) -> int:
        """Tokens of prompt and output that the model has positions for."""
        for field in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            if getattr(self.text_config, field, None):
                return int(getattr(self.text_config, field))
        return 1 << 30

    @functools.cached_property
    def rope_changes_at(self) -> int:
        """Length from which positions are encoded in another way ("longrope", "dynamic"), so that drafts cannot cross it."""
        parameters = getattr(self.text_config, "rope_parameters", None) or {}
        nested = [p for p in parameters.values() if isinstance(p, dict)]
        for rope in (parameters, *nested):
            if rope.get("rope_type") in ("longrope", "dynamic"):
                original = rope.get("original_max_position_embeddings")
                original = original or getattr(self.text_config, "original_max_position_embeddings", None)
                return int(original or self.longest_text)
        return 1 << 30

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer, as `generate` sees them."""
        ids = self.model.generation_config.eos_token_id
        if ids is None:
            ids = self.text_config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @functools.cached_property
    def mask_plan(self) -> MaskPlan:
        return MaskPlan.of(self.text_config)

    @functools.cached_property
    def _last_only(self) -> dict[str, Any]:
        """Keyword that spares the scores of all prompt tokens but the last, where the model knows it."""
        return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}

    def sequence(self, capacity: int) -> SequenceState:
        """State of one sequence of about `capacity` tokens (it grows where needed)."""
        return SequenceState(self, capacity)


class SequenceState:
    """One sequence in the model's cache: prefill, then forward and keep in turn."""

    def __init__(self, target: TargetModel, capacity: int):
        self.target = target
        self.cache = SequenceCache()
        self._capacity = capacity
        self.past = 0  # tokens whose keys and values are kept

    def prefill(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Take in int64 [1, length]; returns scores of the next token [1, vocab]."""
        output = self.target.model(input_ids=token_ids, past_key_values=self.cache, use_cache=True, **self.target._last_only)
        self.past += token_ids.shape[1]
        self.cache.reserve(max(self._capacity, self.past + 1))
        return output.logits[0, -1:]

    def forward(self, tree: DraftTree) -> torch.Tensor:
        """Scores [nodes, vocab] of the token after each node of `tree`, whose root is the next token to take in.

        In chain mode `tree` must be a chain.
        """
        target = self.target
        self.cache.reserve(self.past + len(tree))
        if target.mode == "tree":
            inputs = tree_inputs(tree, self.past, target.mask_plan, target.dtype, target.device)
            fed: dict[str, Any] = {
                "input_ids": inputs.input_ids,
                "position_ids": inputs.position_ids,
                "attention_mask": inputs.attention_mask,
            }
        else:
            assert tree.is_chain()
            fed = {"input_ids": torch.from_numpy(tree.token_ids.astype(np.int64))[None].to(target.device)}
        return target.model(**fed, past_key_values=self.cache, use_cache=True).logits[0]

    def keep(self, nodes: list[int]) -> None:
        """Keep the keys and values of these nodes of the last tree (a path from its root); drop the others."""
        self.cache.keep(self.past, nodes)
        self.past += len(nodes)


def load_model(name: str, dtype: str = "auto", device: str = "auto", attention: str | None = None) -> TargetModel:
    """Load a causal LM from a folder or hub name and probe how it verifies.

    dtype: auto (float32 on a CPU, the checkpoint's own elsewhere), float32, bfloat16, float16. device: auto, cpu, cuda...
    Raises ModelError if it is no causal LM or cannot be loaded, UsageError for an unknown dtype or missing device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    target_device = _device(device)
    if dtype not in ("auto", *DTYPES):
        raise UsageError(f"--dtype {dtype}: choose auto, {', '.join(DTYPES)}.")
    chosen: Any = DTYPES.get(dtype) or (torch.float32 if target_device.type == "cpu" else "auto")
    path = Path(name)
    if path.is_file():
        raise ModelError(f"{name}: is a file. Give the model's folder, or a hub name such as org/model.")
    if not path.is_dir() and looks_like_path(name):
        raise ModelError(f"{name}: no such folder. Give a model folder, or a hub name such as org/model.")
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"{name}: no config.json in this folder, so it is no model.")
    try:
        with quiet_hub():
            config = AutoConfig.from_pretrained(name)
    except Exception as error:  # transformers and the hub raise many kinds
        raise ModelError(f"{name}: cannot be read as a model ({first_line(error)}).") from error
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: a {config.model_type} model is no causal language model. Choose one that is.")
    held = config.architectures or []
    if held and not any(a.lower() == known[type(config)].__name__.lower() or a.endswith("ForCausalLM") for a in held):
        raise ModelError(f"{name}: holds a {held[0]}, which is no causal language model. Choose one that is.")
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"{name}: no weights in this folder (looked for *.safetensors and *.bin).")
    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=chosen, **({"attn_implementation": attention} if attention else {})
            )
    except Exception as error:
        raise ModelError(f"{name}: cannot be loaded ({first_line(error)}).") from error
    return probed(model.to(target_device).eval(), name)


@torch.inference_mode()
def probed(model: Any, name: str = "model") -> TargetModel:
    """Wrap a loaded model, finding out whether it verifies trees, chains or nothing."""
    reasons: list[str] = []
    attempts: tuple[Mode, ...] = ("tree", "chain")
    for mode in attempts:
        target = TargetModel(model, name, mode, "; ".join(reasons))
        try:
            error = _probe(target)
        except Exception as failure:  # a model that cannot take the mask or the cache fails in its own way
            error = f"{type(failure).__name__}: {first_line(failure)}"
        if not error:
            break
        reasons.append(f"no {mode} ({error})")
    else:
        target = TargetModel(model, name, "plain", "; ".join(reasons))
    return target


def _probe(target: TargetModel) -> str:
    """Compare scores of a draft tree with those of each of its paths alone. Returns what differs, or ""."""
    generator = np.random.default_rng(0)
    prompt, nodes = 12, 6
    ids = generator.integers(1, target.vocab_size, prompt + nodes).astype(np.int64)
    state = target.sequence(2 * prompt)
    state.prefill(torch.from_numpy(ids[None, : prompt - 1]).to(target.device))
    draft = ids[prompt - 1 : prompt - 1 + nodes]
    if target.mode == "tree":
        #      0
        #    1   2
        #   3 4   5
        tree = dataclasses.replace(chain(draft), parents=np.array([-1, 0, 0, 1, 1, 2], np.int32))
        paths, kept = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]], [0, 2, 5]
    else:
        tree = chain(draft)
        paths, kept = [list(range(k + 1)) for k in range(nodes)], [0, 1, 2]
    scores = state.forward(tree)
    state.keep(kept)
    after = chain(ids[-1:])
    again = state.forward(after)
    texts = [[*ids[: prompt - 1], *draft[path]] for path in paths]
    texts.append([*texts[paths.index(kept)], ids[-1]])
    worst, noise = 0.0, 0.0
    for text, row in zip(texts, [*scores, again[0]], strict=True):
        alone = _next_scores(target, text)
        if not torch.isfinite(alone).all():
            return "scores are not finite"
        spread = float(alone.std()) or 1.0
        worst = max(worst, float((alone - row.float()).abs().max()) / spread)
        if target.dtype != torch.float32:  # how far rounding alone moves scores: the same text, longer by one token
            longer = _next_scores(target, [*text, 1], place=-2)
            noise = max(noise, float((alone - longer).abs().max()) / spread)
    if not worst <= max(1e-2, 4 * noise):
        return f"scores differ by {worst:.2g} of their spread"
    return ""


def _next_scores(target: TargetModel, text: list[int], place: int = -1) -> torch.Tensor:
    """float32 [vocab]: scores after the token at `place` of `text`, computed without a cache."""
    return target.model(input_ids=torch.tensor([text], device=target.device), use_cache=False).logits[0, place].float()


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: no such kind of device. Use cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no CUDA device. Use --device cpu.")
    return device


@contextlib.contextmanager
def _quiet_transformers() -> Any:
    """No progress bars and weight reports of transformers on the terminal: ours say what matters."""
    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
