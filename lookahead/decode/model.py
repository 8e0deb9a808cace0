"""The target model. In: a folder or hub name. Out: a stock Hugging Face causal LM and the way its drafts can be verified.

How drafts are verified is decided by a probe at load (probe.py), not by a list of names:
    packed  the trees of all slots in one forward, by an attention function of ours around the model's own
    tree    one tree in one forward, by a tree attention mask
    chain   one branch in one forward, by the model's own causal mask (models that take no tree mask)
    replay  one branch, tried on a copy of the model's recurrent state
    plain   no drafts: the model's own `generate` (models whose state cannot take in several tokens)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from lookahead.budget.cost import CostCurve
from lookahead.budget.estimate import ModelSizes, estimate
from lookahead.budget.profile import CostProfile, Setting, cached_profile
from lookahead.decode.adapter import check_adapter, merged
from lookahead.decode.attention import PackedAttention
from lookahead.decode.batch import MaskPlan
from lookahead.decode.linear import kind_of_linear, lay_out
from lookahead.decode.parallel import agreed
from lookahead.decode.processor import processor_name
from lookahead.decode.slots import PackedSlots, SeparateSlots, Slots
from lookahead.errors import ModelError, UsageError
from lookahead.hub import check_name
from lookahead.tokenizer import TRUST, first_line, hub_arguments, quiet_hub

log = logging.getLogger(__name__)

Mode = Literal["packed", "tree", "chain", "replay", "plain"]
# Multiplications that take as long as a call of attention does beside its work. On a CPU 20 us, measured with keys of 288 and
# of 768 values; on a GPU, not measured, 15 us at 2.7e13 a second.
ON_CPU, ON_GPU = 8e5, 4e8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True)
class TargetModel:
    """A loaded model and how it verifies.

    mode: see the module's docstring. reason: why it is not "packed".
    place_bytes: memory that keys and values of one token take, where it is packed (0: not known).
    bucketed: packed steps take one of a few shapes (default: on a GPU). now: the clock that steps are timed by.
    agreed: what processes that share the model take a measured value for (parallel.py).
    """

    model: Any
    name: str
    mode: Mode
    reason: str = ""
    place_bytes: int = 0
    bucketed: bool = False
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
        parameters = getattr(self.text_config, "rope_parameters", None) or {}
        nested = [p for p in parameters.values() if isinstance(p, dict)]
        for rope in (parameters, *nested):
            if rope.get("rope_type") in ("longrope", "dynamic"):
                original = rope.get("original_max_position_embeddings")
                original = original or getattr(self.text_config, "original_max_position_embeddings", None)
                return int(original or self.longest_text)
        return 1 << 30

    @functools.cached_property
    def chooses_keys_from(self) -> int:
        """Length from which layers look at their best keys only (sparse attention): which those are can hang on rounding."""
        return int(getattr(self.text_config, "index_topk", None) or 1 << 30)

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer, as `generate` sees them: those of the generation config alone."""
        ids = self.model.generation_config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    @functools.cached_property
    def mask_plan(self) -> MaskPlan:
        return MaskPlan.of(self.text_config)

    @functools.cached_property
    def call(self) -> float:
        """Of attention: it takes as long as so many products of a query with a key, see `batch.runs_of`."""
        return (ON_CPU if self.device.type == "cpu" else ON_GPU) / self.text_config.hidden_size

    @functools.cached_property
    def arguments(self) -> frozenset[str]:
        """Names of what the model's forward takes."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @functools.cached_property
    def state_name(self) -> str:
        """What the model calls its memory of a text, as an argument and in its output."""
        return next((name for name in ("cache_params", "state") if name in self.arguments), "past_key_values")

    @functools.cached_property
    def setting(self) -> Setting:
        """What the costs of its forwards hang on."""
        threads = torch.get_num_threads() if self.device.type == "cpu" else 0
        attention = str(self.text_config._attn_implementation)
        known = self.model.config, self.name, processor_name(self.device), self.dtype
        return setting_of(*known, attention, self.mode, threads, kind_of_linear(self.model))

    def costs(self) -> CostCurve:
        """What its forwards cost, as measured for this setting beforehand, if it was; each engine learns on its own.

        Where processes share the model, their first steps measure it: what each finds in its own cache is not agreed on, and
        was measured with a whole model.
        """
        return CostCurve(None if self.is_shared else cached_profile(self.setting), self.bucketed)

    @functools.cached_property
    def packed_attention(self) -> PackedAttention:
        return PackedAttention(self.model, self.mask_plan)

    def decodes_plainly(self, length: int) -> bool:
        """A text that grows to `length` tokens must be left to the model's own `generate`."""
        return self.mode == "plain" or length > min(self.rope_changes_at, self.chooses_keys_from)

    @property
    def is_shared(self) -> bool:
        """This is one of several processes that each hold a slice of every layer."""
        return self.agreed is not float

    def in_step(self) -> TargetModel:
        """The same for one of several processes that share the model: they take what they measure from each other."""
        return dataclasses.replace(self, now=lambda: agreed(time.perf_counter()), agreed=agreed)

    def slots(self) -> Slots:
        """Where sequences live while they are decoded. Not for models of mode "plain"."""
        return PackedSlots(self) if self.mode == "packed" else SeparateSlots(self)


def setting_of(
    config: Any,
    name: str,
    device: str,
    dtype: torch.dtype,
    attention: str = "sdpa",
    mode: Mode = "packed",
    threads: int = 0,
    linear: str = "torch",
) -> Setting:
    """The setting of a model of this config. Its shape is what the config says but for names and versions."""
    left_out = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures")
    shape = json.dumps({key: repr(value) for key, value in config.to_dict().items() if key not in left_out}, sort_keys=True)
    fingerprint = hashlib.sha256(shape.encode()).hexdigest()[:16]
    return Setting(name, fingerprint, device, str(dtype).removeprefix("torch."), attention, mode, threads, linear)


def estimated_profile(
    name: str, dtype: str, gpu: str, trust_remote_code: bool = False, revision: str | None = None
) -> CostProfile:
    """What a model should cost on a GPU that is not here, by its config.json alone (budget/estimate.py).

    dtype: auto (the config's own), float32, bfloat16, float16. Raises ModelError and UsageError as `random_model` does.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(name, trust_remote_code, revision)
    text = config.get_text_config(decoder=True)
    chosen = _dtype(dtype) or text.dtype or torch.bfloat16
    try:
        with _quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"{name}: a model of this shape cannot be made ({first_line(error)}).") from error
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    table = model.get_input_embeddings().weight  # a look-up reads one row of it
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is table
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    sizes = ModelSizes(
        dense=sum(p.numel() for p in model.parameters()) - in_experts - (0 if tied else table.numel()),
        in_experts=in_experts,
        experts=_first_of(text, "num_local_experts", "num_experts", "n_routed_experts") if in_experts else 0,
        experts_per_token=_first_of(text, "num_experts_per_tok", "moe_k", "moe_topk") if in_experts else 0,
        layers=text.num_hidden_layers,
        key_values=2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        query_key=text.num_hidden_layers * heads * head_dim,
    )
    return estimate(sizes, setting_of(config, name, gpu, chosen), gpu, int(text.vocab_size), longest_text(text))


def _first_of(config: Any, *names: str) -> int:
    """The first of these that a config has; 1 if it has none."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)


def longest_text(text_config: Any) -> int:
    """Tokens that a model of this config has positions for."""
    for field in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if getattr(text_config, field, None):
            return int(getattr(text_config, field))
    return 1 << 30


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    device_map: str | None = None,
    tp_plan: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    adapter: str | None = None,
) -> TargetModel:
    """Load a causal LM from a folder or hub name and probe how it verifies. On a CPU its weights are laid out (linear.py).

    dtype: auto (float32 on a CPU, the checkpoint's own elsewhere), float32, bfloat16, float16. device: auto, cpu, cuda...
    device_map, tp_plan: as of transformers, which then choose the devices; the latter in processes that torchrun has started.
    trust_remote_code: run code that comes with the model. revision: branch, tag or commit of a hub name. adapter: folder or hub
    name of a PEFT adapter, which is merged into the weights (adapter.py).
    Raises ModelError if it is no causal LM or cannot be loaded, UsageError for an unknown dtype or missing device.
    """
    from transformers import AutoModelForCausalLM

    from lookahead.decode.probe import probed

    target_device, chosen = _device(device), _dtype(dtype)
    path = Path(name)
    read_config(name, trust_remote_code, revision)
    further = check_name(name, "a model folder", revision)
    if adapter:
        check_adapter(adapter)
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"{name}: no weights in this folder (looked for *.safetensors and *.bin).")
    if chosen is None:
        chosen = torch.float32 if target_device.type == "cpu" else "auto"
    wishes: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if device_map:
        wishes["device_map"] = device_map
    if tp_plan:
        wishes.update(_tensor_parallel(tp_plan))
    try:
        with _quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=chosen, **hub_arguments(trust_remote_code, revision), **further, **wishes
            )
    except Exception as error:
        raise ModelError(f"{name}: cannot be loaded ({first_line(error)}).") from error
    if adapter:
        with _quiet_transformers():
            model = merged(model, adapter)
    target = probed((model if device_map or tp_plan else lay_out(model.to(target_device))).eval(), name)
    _log_setting(target)
    return target.in_step() if tp_plan else target


def _tensor_parallel(plan: str) -> dict[str, Any]:
    """How this version of transformers is told a plan."""
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan=plan)}
    except (ImportError, TypeError):
        return {"tp_plan": plan}


def random_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> TargetModel:
    """A causal LM of the shape that a config.json says, with random weights, the same each time; no weights are read.

    It costs what the real one costs and says nothing that makes sense. Arguments and errors as of `load_model`.
    """
    from transformers import AutoModelForCausalLM

    from lookahead.decode.probe import probed

    target_device, chosen = _device(device), _dtype(dtype)
    config = read_config(name, trust_remote_code, revision)
    if chosen is None:
        of_config = config.get_text_config(decoder=True).dtype or torch.bfloat16
        chosen = torch.float32 if target_device.type == "cpu" else of_config
    devices = [target_device] if target_device.type == "cuda" else []
    try:
        with _quiet_transformers(), torch.random.fork_rng(devices), target_device:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=chosen,
                trust_remote_code=trust_remote_code,
                **({"attn_implementation": attention} if attention else {}),
            )
    except Exception as error:
        raise ModelError(f"{name}: a model of this shape cannot be made ({first_line(error)}).") from error
    target = probed(lay_out(model.to(target_device)).eval(), name)
    _log_setting(target)
    return target


def _log_setting(target: TargetModel) -> None:
    """How the model was loaded, for --verbose."""
    setting, reason = target.setting, f" ({target.reason})" if target.reason else ""
    where = f"{setting.device}, {setting.threads} threads" if setting.threads else setting.device
    log.info(
        "%s: %s, %s, attention %s, linear layers by %s", target.name, where, setting.dtype, setting.attention, setting.linear
    )
    log.info("%s: drafts are verified in mode %s%s", target.name, target.mode, reason)


def read_config(name: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The config of a causal LM. Arguments as of `load_model`.

    Raises ModelError if there is none or it is of another kind of model, UsageError for a revision of a folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(name)
    if path.is_file():
        raise ModelError(f"{name}: is a file. Give the model's folder, or a hub name such as org/model.")
    if path.is_dir() and not (path / "config.json").exists():
        raise ModelError(f"{name}: no config.json in this folder, so it is no model.")
    if path.is_dir() and revision:
        raise UsageError(f"--revision {revision}: {name} is a folder; only hub names have revisions.")
    with quiet_hub():
        further = check_name(name, "a model folder", revision)
    try:
        with quiet_hub():
            config = AutoConfig.from_pretrained(name, **hub_arguments(trust_remote_code, revision), **further)
    except Exception as error:  # transformers and the hub raise many kinds
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ModelError(f"{name}: brings code of its own. {TRUST}") from error
        raise ModelError(f"{name}: cannot be read as a model ({first_line(error)}).") from error
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return config
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: a {config.model_type} model is no causal language model. Choose one that is.")
    held = config.architectures or []
    if held and not any(a.lower() == known[type(config)].__name__.lower() or a.endswith("ForCausalLM") for a in held):
        raise ModelError(f"{name}: holds a {held[0]}, which is no causal language model. Choose one that is.")
    return config


def _dtype(name: str) -> Any:
    """None for auto. Raises UsageError for what is none."""
    if name not in ("auto", *DTYPES):
        raise UsageError(f"--dtype {name}: choose auto, {', '.join(DTYPES)}.")
    return DTYPES.get(name)


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
