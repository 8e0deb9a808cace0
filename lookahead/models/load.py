"""Loading a model. In: a folder or hub name. Out: a stock Hugging Face causal LM, probed for how its drafts can be verified."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lookahead.budget.estimate import ModelSizes, estimate
from lookahead.budget.profile import CostProfile
from lookahead.errors import ModelError, UsageError
from lookahead.files.hub import gguf_in, located
from lookahead.files.outputs import model_folder
from lookahead.forward.backend import QUANTIZED, backend_of, check_offered
from lookahead.forward.backends import by_own_settings
from lookahead.forward.target import DTYPES, TargetModel, longest_text, setting_of
from lookahead.model_files import check_folder, check_sizes
from lookahead.models.adapter import check_adapter, merged, wrapped
from lookahead.models.checkpoint import check_weights, shards_of, tensors_in
from lookahead.models.exact import batch_invariance_violation, exact_or_plain, tried_in_half
from lookahead.models.options import ModelOptions
from lookahead.models.prequantized import check_method, exact_where_needed, refuse_own_format
from lookahead.models.probe import probed
from lookahead.native.cores import usable_cores
from lookahead.tokenizer import TRUST, first_line, hub_arguments, load_tokenizer, quiet_hub

log = logging.getLogger(__name__)

_quiet = threading.RLock()  # held while transformers is quiet
ENGINE_MODES = ("auto", "modules", "program")  # see `load_model`


def estimated_profile(model: ModelOptions, gpu: str) -> CostProfile:
    """Return what a model should cost on another GPU, by its config.json alone (budget/estimate.py); auto is the config's own
    dtype.

    Raises ModelError and UsageError as `random_model` does.
    """
    config, name = read_config(*model.source), model.name
    text = config.get_text_config(decoder=True)
    chosen = _dtype(model.dtype) or text.dtype or torch.bfloat16
    try:
        sizes = sizes_of(empty_model(config, model.trust_remote_code), text)
    except Exception as error:  # such as of a model without attention heads
        raise ModelError(f"{name}: what this model costs cannot be estimated ({first_line(error)}).") from error
    return estimate(sizes, setting_of(config, name, gpu, chosen), gpu, int(text.vocab_size), longest_text(text))


def device_and_dtype(model: ModelOptions) -> tuple[torch.device, torch.dtype]:
    """Where and in which precision `load_model` computes: by a config where that decides on the dtype."""
    device = _device(model.device or "auto")
    dtype = _dtype(model.dtype, device) or read_config(*model.source).get_text_config(decoder=True).dtype
    return device, dtype or torch.float32


def sizes_of(model: Any, text: Any) -> ModelSizes:
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    table = model.get_input_embeddings().weight  # a look-up reads one row of it
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is table
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return ModelSizes(
        dense=sum(p.numel() for p in model.parameters()) - in_experts - (0 if tied else table.numel()),
        in_experts=in_experts,
        experts=_first_of(text, "num_local_experts", "num_experts", "n_routed_experts") if in_experts else 0,
        experts_per_token=_first_of(text, "num_experts_per_tok", "moe_k", "moe_topk") if in_experts else 0,
        layers=text.num_hidden_layers,
        key_values=2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        query_key=text.num_hidden_layers * heads * head_dim,
    )


def empty_model(config: Any, trust_remote_code: bool = False) -> Any:
    """A causal LM of a config without memory for its weights. Raises what transformers raises."""
    with _quiet_transformers(), torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


def _first_of(config: Any, *names: str) -> int:
    """The first of these that a config has; 1 if it has none."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)


@by_own_settings
def load_model(model: str | ModelOptions, dtype: str | None = None, device: str | None = None, **options: Any) -> TargetModel:
    """Load a causal LM from a folder or hub name and probe how it verifies. On a CPU its weights are laid out (linear.py).

    options: of `ModelOptions`, by name; attention: its attn. A device cuda:N becomes this thread's current device; tp_plan is
    for processes that torchrun has started. A quantized model that is not exact decodes plainly. Raises ModelError if an option
    cannot be had, or the model is not a causal LM or cannot be loaded, UsageError for an unknown dtype, mode or scheme, a
    missing device, or a model that cannot have such keys and values.
    """
    wished = ModelOptions.of(model, dtype, device, **options)
    name, trust_remote_code, revision = wished.source
    adapter, device_map, tp_plan = wished.adapters.get(None), wished.device_map, wished.tp_plan
    if wished.adapter_names:
        raise UsageError(f"--adapter {wished.adapter_names[0]}=...: only rows of a job name adapters. Give the folder alone.")
    target_device, precision = _checked(wished)
    chosen: Any = precision or "auto"
    path = Path(name)
    config = read_config(name, trust_remote_code, revision)
    check_method(name, config)
    if adapter:
        check_adapter(adapter)
    if path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
        raise ModelError(f"{name}: no weights in this folder (looked for *.safetensors and *.bin).")
    wishes: dict[str, Any] = {"attn_implementation": wished.attn} if wished.attn else {}
    if device_map:
        wishes["device_map"] = device_map
    if tp_plan:
        wishes.update(_tensor_parallel(tp_plan))
    with _reading(name):
        alone = target_device.type == "cpu" and not (device_map or tp_plan or adapter)
        cpu = backend_of("cpu") if alone else None
        loaded = cpu.packed_model(name, config, chosen, wishes) if cpu else None
        if cpu and gguf_in(name)[1] and wished.quantize == "none":
            empty = empty_model(config, trust_remote_code)
            loaded = cpu.gguf_model(name, revision, config, empty, chosen, wishes)
        if loaded is None:
            refuse_own_format(name, config)
            loaded = _whole(name, config, trust_remote_code, revision, dtype=chosen, **wishes)
    if adapter:
        with _quiet_transformers():
            loaded = merged(loaded, adapter)
    target = _probed(loaded, wished, None if device_map or tp_plan else target_device)
    if target.linear not in QUANTIZED:
        target = exact_where_needed(target, config)
    if wished.exact and not target.exact:
        if target.program is not None:
            target.program.exact = True
        if where := batch_invariance_violation(target):
            raise ModelError(f"{name}: --exact: scores are not the same bits in every forward ({where}).")
        target = dataclasses.replace(target, exact=True)
    elif target.linear in QUANTIZED and not target.exact:
        target = exact_or_plain(target)
    target = tried_in_half(target)
    _log_setting(target)
    return target.as_tensor_parallel_rank() if tp_plan else target


def check_adapters(wished: ModelOptions) -> None:
    """Raise ModelError for an adapter that cannot be merged into the model, by names and shapes of weights: none are read of a
    model that all fit.
    """
    config = read_config(*wished.source)
    for name, adapter in wished.adapters.items():
        check_adapter(adapter)
        try:
            with _quiet_transformers():
                wrapped(empty_model(config, wished.trust_remote_code), adapter)
        except Exception:  # some kinds, such as PiSSA, read weights
            load_model(wished.of_rows(name))


def unpack_gguf(name: str, folder: str, trust_remote_code: bool = False, revision: str | None = None) -> None:
    """Write a GGUF file as a folder that any tool loads, weights in float32. Raises ModelError as `load_model`."""
    config = read_config(name, trust_remote_code, revision)
    with _reading(name):
        _whole(name, config, trust_remote_code, revision, dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(name, trust_remote_code, revision).save_pretrained(folder)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """While open, transformers is quiet, and what it raises becomes a ModelError."""
    try:
        with _quiet_transformers():
            yield
    except ModelError:
        raise
    except Exception as error:
        if Path(name).is_dir():
            any(False for _ in tensors_in(shards_of(Path(name))))  # raises for a file that cannot be read
        raise ModelError(f"{name}: cannot be loaded ({first_line(error)}).") from error


def _whole(name: str, config: Any, trust_remote_code: bool, revision: str | None, **wishes: Any) -> Any:
    """The model, by a class of transformers, all of whose weights are those of its checkpoint.

    Raises ModelError as `check_weights`, and what transformers raises.
    """
    source, further = located(name, "a model folder", revision)
    is_gguf = "gguf_file" in further
    if is_gguf:
        further["config"] = config  # which takes seconds to read
    asked = {**hub_arguments(trust_remote_code, revision), **wishes, **further}
    model, found = auto_class(config).from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **asked)
    check_weights(name, model, found, folder=None if is_gguf else model_folder(name, revision))
    if is_gguf:  # transformers has unpacked its blocks: a model of floats, which can be saved and quantized
        model.config.__dict__.pop("quantization_config", None)
        model.is_quantized, model.hf_quantizer = False, None
    return model


def _tensor_parallel(plan: str) -> dict[str, Any]:
    """Return how this version of transformers receives a plan."""
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan=plan)}
    except (ImportError, TypeError):
        return {"tp_plan": plan}


@by_own_settings
def random_model(model: str | ModelOptions, dtype: str | None = None, device: str | None = None, **options: Any) -> TargetModel:
    """A causal LM of the shape that a config.json gives, with random weights, the same each time; no weights are read.

    It costs what the real one costs and emits random text. Arguments and errors as of `load_model`.
    """
    wished = ModelOptions.of(model, dtype, device, **options)
    target_device, chosen = _checked(wished)
    config = read_config(*wished.source)
    chosen = chosen or config.get_text_config(decoder=True).dtype or torch.bfloat16
    devices = [target_device] if target_device.type == "cuda" else []
    try:
        with _quiet_transformers(), torch.random.fork_rng(devices), target_device:
            torch.manual_seed(0)
            made = auto_class(config).from_config(
                config,
                dtype=chosen,
                trust_remote_code=wished.trust_remote_code,
                **({"attn_implementation": wished.attn} if wished.attn else {}),
            )
    except Exception as error:
        raise ModelError(f"{wished.name}: a model of this shape cannot be made ({first_line(error)}).") from error
    target = _probed(made, wished, target_device)
    _log_setting(target)
    return target


def _checked(wished: ModelOptions) -> tuple[torch.device, Any]:
    """(device, dtype as of `_dtype`), once this thread computes with as many threads as it shall. Raises UsageError."""
    device = _device(wished.device or "auto")
    dtype = _dtype(wished.dtype, device)
    if wished.engine_mode not in ENGINE_MODES:
        raise UsageError(f"--engine-mode {wished.engine_mode}: choose {', '.join(ENGINE_MODES)}.")
    for option, scheme in (("--quantize", wished.quantize), ("--kv-dtype", wished.kv_dtype)):
        check_offered(option, scheme, device)
        if scheme != "none" and (wished.device_map or wished.tp_plan):
            raise UsageError(f"{option} {scheme} is for a model on one device: leave out --device-map and --tp-plan.")
    if device.type == "cpu":
        torch.set_num_threads(wished.threads or min(torch.get_num_threads(), usable_cores()))
    return device, dtype


def _probed(model: Any, wished: ModelOptions, device: torch.device | None) -> TargetModel:
    """Return how the model verifies, moved to this device, if one is given, with linear layers as a CPU's kernels read them.

    Raises ModelError where its forward is to be a program and is none; as `pack_linears` and `with_kv_dtype`.
    """
    cpu = backend_of("cpu")
    if device is not None:
        model = model.to(device)
        model = cpu.pack_linears(model, wished.quantize, wished.name) if cpu else model
    target = probed(model.eval(), wished.name, wished.engine_mode != "modules")
    if cpu and wished.kv_dtype != "none":
        target = cpu.with_kv_dtype(target, wished.kv_dtype)
    if wished.engine_mode == "program" and target.program is None:
        raise ModelError(f"{wished.name}: --engine-mode program: its forward cannot be one native call (--verbose tells why).")
    return target


def _log_setting(target: TargetModel) -> None:
    """Return how the model was loaded, for --verbose."""
    setting, reason = target.setting, f" ({target.reason})" if target.reason else ""
    where = f"{setting.device}, {setting.threads} threads" if setting.threads else setting.device
    log.info(
        "%s: %s, %s, attention %s, linear layers by %s", target.name, where, setting.dtype, setting.attention, setting.linear
    )
    if target.kv_dtype != "none":
        log.info("%s: keys and values in %s, %d bytes a token", target.name, target.kv_dtype, target.kv_bytes)
    log.info("%s: drafts are verified in mode %s%s", target.name, target.mode, reason)


def read_config(name: str, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The config of a causal LM. Arguments as of `load_model`.

    Raises ModelError if there is none or it is of another kind of model, UsageError for a revision of a folder.
    """
    from transformers import AutoConfig

    path = Path(name)
    if path.is_dir():
        check_folder(path)
    if path.is_file() and not gguf_in(name)[1]:
        raise ModelError(f"{name}: is a file. Give the model's folder, a GGUF file, or a hub name such as org/model.")
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(each.name for each in path.glob("*.gguf"))
        instead = f" It holds GGUF files; name one: {path / files[0]}" if files else ""
        raise ModelError(f"{name}: no config.json in this folder, so it is not a model.{instead}")
    if path.is_dir() and revision:
        raise UsageError(f"--revision {revision}: {name} is a folder; only hub names have revisions.")
    with quiet_hub():
        source, further = located(name, "a model folder", revision)
    try:
        with quiet_hub():
            config = AutoConfig.from_pretrained(source, **hub_arguments(trust_remote_code, revision), **further)
    except Exception as error:  # transformers and the hub raise many kinds
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ModelError(f"{name}: brings code of its own. {TRUST}") from error
        raise ModelError(f"{name}: cannot be read as a model ({first_line(error)}).") from error
    if not path.exists() and (cached := model_folder(name, revision)):
        check_folder(cached)
    check_sizes(name, config)
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return config
    known = auto_class(config)._model_mapping
    if type(config) not in known or not _is_causal(config, known[type(config)]):
        raise ModelError(f"{name}: a {config.model_type} model is not a causal language model. Choose one that is.")
    held = config.architectures or []
    if held and not any(a.lower() == known[type(config)].__name__.lower() or a.endswith("ForCausalLM") for a in held):
        raise ModelError(f"{name}: holds a {held[0]}, which is not a causal language model. Choose one that is.")
    return config


def auto_class(config: Any) -> Any:
    """Return the auto class of transformers for a model of this config. A multimodal one is loaded whole, and
    takes text alone.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    whole = getattr(transformers, "AutoModelForMultimodalLM", transformers.AutoModelForImageTextToText)
    of_whole = whole._model_mapping[type(config)].__name__ if type(config) in whole._model_mapping else None
    text_only = type(config) in AutoModelForCausalLM._model_mapping and of_whole not in (config.architectures or [])
    return AutoModelForCausalLM if of_whole is None or text_only else whole


def _is_causal(config: Any, of_model: Any) -> bool:
    """It decodes text, and needs nothing else."""
    needs = {
        name
        for name, parameter in inspect.signature(of_model.forward).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    by_token = of_model.can_generate() and "Diffusion" not in of_model.__name__
    return needs <= {"self", "input_ids"} and by_token and not getattr(config, "is_encoder_decoder", False)


def _dtype(name: str, device: torch.device | None = None) -> Any:
    """auto is float32 on a CPU, else None: the config's own. Raises UsageError for what is none."""
    if name not in ("auto", *DTYPES):
        raise UsageError(f"--dtype {name}: choose auto, {', '.join(DTYPES)}.")
    return DTYPES.get(name, torch.float32 if device is not None and device.type == "cpu" else None)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: no such kind of device. Use cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {name}: this machine has no CUDA device. Use --device cpu.")
    if device.index is not None:  # of this thread: what names no device, such as a library's workspace, belongs there too
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and weight reports of transformers on the terminal: ours report what matters. One thread at a time, as
    its settings are those of the process.
    """
    from transformers import modeling_gguf_pytorch_utils as of_gguf
    from transformers.utils import logging as transformers_logging

    with _quiet:
        level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        bar_of_gguf = of_gguf.tqdm
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        of_gguf.tqdm = lambda tensors, **named: tensors
        try:
            yield
        finally:
            of_gguf.tqdm = bar_of_gguf
            transformers_logging.set_verbosity(level)
            if bars:
                transformers_logging.enable_progress_bar()
