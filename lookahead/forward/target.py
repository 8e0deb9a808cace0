"""The target model as the engine sees it: facts about a stock Hugging Face causal LM, and how its drafts are verified.

How drafts are verified is decided by a probe at load (models/probe.py), not by a list of names:
    packed  the trees of all slots in one forward, by an attention function of ours around the model's own
    tree    one tree in one forward, by a tree attention mask
    chain   one branch in one forward, by the model's own causal mask (models that take no tree mask)
    replay  one branch, tried on a copy of the model's recurrent state
    plain   no drafts: the model's own `generate` (models whose state cannot take several tokens)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from lookahead.budget import ladder
from lookahead.budget.policy import StepCost
from lookahead.budget.profile import Setting, cached_profile
from lookahead.forward.attention import PackedAttention
from lookahead.forward.backend import PROGRAM, ForwardProgram
from lookahead.forward.batch import MaskPlan
from lookahead.forward.kv_cache import LayerShape
from lookahead.forward.parallel import agreed
from lookahead.forward.processor import processor_name
from lookahead.forward.tree_attention import NAME as TREE

Mode = Literal["packed", "tree", "chain", "replay", "plain"]
# Multiplications that take as long as a call of attention does in addition to its work. On a CPU 20 us, measured with keys of
# 288 and of 768 values; on a GPU, not measured, 15 us at 2.7e13 a second.
ON_CPU, ON_GPU = 8e5, 4e8
WIDTH = 1024  # of a model whose config does not give it
NO_LIMIT = 1 << 30  # tokens
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """A loaded model and how it verifies.

    mode: see the module's docstring. reason: why it is not "packed". not_program: why its forward is not a program, where steps
    are packed and it might have been one.
    kv_dtype: none, or int8 or int4, to which packed steps on a CPU quantize keys and values (quantized_cache.py).
    kv_bytes: memory that keys and values of one token take, where it is packed (0: not known). layers: where that goes.
    bucketed: packed steps take one of a few shapes (on a GPU). attends_by_op: in packed steps attention is one call of
    lookahead::tree_attention (tree_attention.py); else calls of the model's own function. program: a whole packed forward as
    one native call, instead of the model's modules. linear: the kind of its linear layers (backends/cpu/linear.py).
    exact: a token's scores are the same bits in any forward, as far as tried (models/exact.py); False where nobody has tried.
    inexact: where they are not, if that was tried; in float32, where it swaps no tokens in practice, only for --exact.
    capture: captures its packed steps as graphs (graphs.py); None: they are not. slots_factory: makes its slots where `mode`
    does not define how (slots.py). now: the clock that steps are timed by.
    agreed: what processes that share the model take a measured value for (parallel.py).
    """

    model: Any
    name: str
    mode: Mode
    reason: str = ""
    not_program: str = ""
    kv_bytes: int = 0
    layers: tuple[LayerShape, ...] = ()
    bucketed: bool = False
    attends_by_op: bool = False
    program: ForwardProgram | None = None
    linear: str = "torch"
    kv_dtype: str = "none"
    exact: bool = False
    inexact: str = ""
    capture: Callable[..., Any] | None = None
    slots_factory: Callable[[Any], Any] | None = None
    now: Callable[[], float] = time.perf_counter  # seconds
    agreed: Callable[[float], float] = float

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
        return longest_text(self.text_config)

    @functools.cached_property
    def rope_changes_at(self) -> int:
        """Length from which positions are encoded in another way ("longrope", "dynamic"), so that drafts cannot cross it."""
        stated = _stated_positions(self.text_config)
        for rope in _ropes(self.text_config):
            if _kind_of(rope) == "dynamic":  # the longest text that resets what a longer one has changed
                return stated - 1
            if _kind_of(rope) in ("longrope", "su"):
                return _original_positions(self.text_config, rope)
        return NO_LIMIT

    @functools.cached_property
    def chooses_keys_from(self) -> int:
        """Length from which layers look at their best keys only (sparse attention): which those are can depend on rounding."""
        return int(getattr(self.text_config, "index_topk", None) or NO_LIMIT)

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer, as `generate` sees them: those of the generation config alone."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @functools.cached_property
    def mask_plan(self) -> MaskPlan:
        return MaskPlan.of(self.text_config)

    @functools.cached_property
    def call(self) -> float:
        """Cost of a call of attention: it takes as long as that many products of a query with a key, see `batch.runs_of`.

        The op pads nothing, as if each slot had a call of its own for nothing.
        """
        if self.attends_by_op:
            return 0.0
        return (ON_CPU if self.device.type == "cpu" else ON_GPU) / getattr(self.text_config, "hidden_size", WIDTH)

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """Names of what the model's forward takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @functools.cached_property
    def state_name(self) -> str:
        """Return what the model calls its memory of a text, as an argument and in its output."""
        return state_name_of(self.model)

    @functools.cached_property
    def setting(self) -> Setting:
        """Return what the costs of its forwards depend on."""
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        attention = str(self.text_config._attn_implementation)
        if self.attends_by_op:
            attention = TREE if self.program is None else PROGRAM
        attention += "-graphs" if self.capture else ""
        known = self.model.config, self.name, processor_name(self.device), self.dtype
        return setting_of(*known, attention, self.mode, threads, self.linear, self.kv_dtype)

    def step_cost(self, batch: int) -> StepCost | None:
        """Return what its forwards cost for one row and for `batch`, where that was measured for this setting beforehand.

        Where processes share the model, what each finds in its own cache is not agreed on.
        """
        if self.is_shared:
            return None
        profile = cached_profile(self.setting)
        return ladder.of_profile(profile, batch) if profile else None

    @functools.cached_property
    def packed_attention(self) -> PackedAttention:
        return PackedAttention(self.model, self.mask_plan)

    def decodes_plainly(self, length: int) -> bool:
        """A text that grows to `length` tokens must be left to the model's own `generate`."""
        return self.mode == "plain" or length > min(self.rope_changes_at, self.chooses_keys_from)

    @property
    def notices(self) -> list[str]:
        """Return what its user should know before it answers: that drafts are verified in a slower way, or
        may change tokens.
        """
        found = [] if self.mode == "packed" else [f"{self.name} verifies by {self.mode}: {self.reason}"]
        if self.inexact:
            found.append(
                f"{self.name} is not exact in {self.setting.dtype} ({self.inexact}): where two tokens score the same within "
                "rounding, drafts and the batch decide between them. --dtype float32 avoids that; --exact refuses such a model."
            )
        return found

    @property
    def path(self) -> str:
        """Return how its forwards are computed, in a line of a summary."""
        if self.mode == "plain":
            return "by generate, without drafts"
        if self.program is not None:
            how = "one native call"
        else:
            why = f" ({self.not_program})" if self.not_program else ""
            how = f"module by module{why}" if self.mode == "packed" else f"row by row, verified by {self.mode}"
        exact = "not exact" if self.inexact else "exact" if self.exact else ""
        return ", ".join(filter(None, (how, self.setting.dtype, exact)))

    @property
    def is_shared(self) -> bool:
        """This is one of several processes that each hold a slice of every layer."""
        return self.agreed is not float

    def as_tensor_parallel_rank(self) -> TargetModel:
        """The same for one of several processes that share the model: they take what they measure from each other."""
        return dataclasses.replace(self, agreed=agreed)


def state_name_of(model: Any) -> str:
    """See `TargetModel.state_name`. Most models call it cache since transformers 5.24, and past_key_values before."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in ("cache_params", "state", "cache") if name in arguments), "past_key_values")


def setting_of(
    config: Any,
    name: str,
    device: str,
    dtype: torch.dtype,
    attention: str = "sdpa",
    mode: Mode = "packed",
    threads: int = 0,
    linear: str = "torch",
    kv_dtype: str = "none",
) -> Setting:
    """The setting of a model of this config. Its shape is what the config gives except for names and versions."""
    left_out = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")
    shape = json.dumps({key: repr(value) for key, value in config.to_dict().items() if key not in left_out}, sort_keys=True)
    fingerprint = hashlib.sha256(shape.encode()).hexdigest()[:16]
    return Setting(name, fingerprint, device, str(dtype).removeprefix("torch."), attention, mode, threads, linear, kv_dtype)


def longest_text(text_config: Any) -> int:
    """Tokens that a model of this config has positions for; the fewest, where layers differ.

    Rotary positions that are scaled reach `factor` times as far as the original ones. "llama3" and "longrope" come with
    max_position_embeddings raised already, often to less; the others come with either.
    """
    return min(NO_LIMIT, *(_reach(text_config, rope) for rope in _ropes(text_config)))


def _reach(text_config: Any, rope: dict[str, Any]) -> int:
    stated, original, kind = _stated_positions(text_config), _original_positions(text_config, rope), _kind_of(rope)
    if kind in ("linear", "dynamic", "yarn") or (kind in ("llama3", "longrope", "su") and original == stated):
        return max(stated, int(original * (rope.get("factor") or 1)))
    return stated


def _stated_positions(text_config: Any) -> int:
    """Without scaling. A negative number, as in XLNet, is none."""
    fields = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    stated = next((int(value) for field in fields if (value := getattr(text_config, field, None))), -1)
    return NO_LIMIT if stated < 0 else stated


def _original_positions(text_config: Any, rope: dict[str, Any]) -> int:
    field = "original_max_position_embeddings"
    return int(rope.get(field) or getattr(text_config, field, None) or _stated_positions(text_config))


def _ropes(text_config: Any) -> list[dict[str, Any]]:
    """Return how rotary positions are encoded: once, or for each kind of layer."""
    found = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    return [each or {} for each in found.values() if each is None or isinstance(each, dict)] or [found]


def _kind_of(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type")
