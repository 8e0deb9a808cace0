"""A PEFT adapter (such as LoRA) in its base model. In: a loaded model, the adapter's folder or hub name. Out: a stock model.

The adapter's weights are merged into the model's, so that every way of verifying drafts works and forwards cost what the base
model's do.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lookahead.errors import LookaheadError, ModelError
from lookahead.files.hub import check_name
from lookahead.model_files import check_folder
from lookahead.models.checkpoint import damaged_of, refuse_weights
from lookahead.tokenizer import first_line

log = logging.getLogger(__name__)

CONFIG = "adapter_config.json"


def check_adapter(adapter: str) -> dict[str, Any]:
    """Further arguments for loading it, as of `hub.check_name`. Reads no weights.

    Raises LookaheadError if PEFT is missing, ModelError for a path or hub name that holds no adapter.
    """
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise LookaheadError("--adapter needs PEFT: pip install 'lookahead[adapter]'.") from error
    path = Path(adapter)
    if path.is_file():
        raise ModelError(f"{adapter}: is a file. Give the adapter's folder, or a hub name such as org/adapter.")
    further = check_name(adapter, "an adapter's folder")
    if path.is_dir():
        check_folder(path)
        for name, lacks in ((CONFIG, "so it is not a PEFT adapter"), ("adapter_model.*", "so the adapter has no weights")):
            if not any(path.glob(name)):
                raise ModelError(f"{adapter}: no {name} in this folder, {lacks}.")
    return further


def wrapped(model: Any, adapter: str) -> Any:
    """The model in a PeftModel with the adapter; it may be one without memory for its weights.

    Raises what `check_adapter` does, and ModelError if the adapter was made for a model of other shapes, or is of a kind that
    is not merged into weights.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    further = check_adapter(adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is missing is checked below
            found = PeftModel.from_pretrained(model, adapter, **further)
            of_model = get_peft_model_state_dict(found, save_embedding_layers=False).keys()
            of_file = load_peft_weights(adapter, device="cpu", **further)
            known = found.load_adapter(adapter, found.active_adapter, **further)  # who loads it first does not tell
    except Exception as error:  # PEFT, torch and the hub raise many kinds
        shapes = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if shapes:
            raise ModelError(f"{adapter}: was made for a model of other shapes ({shapes[0].rstrip('.')}).") from error
        raise ModelError(f"{adapter}: the adapter cannot be loaded ({first_line(error)}).") from error
    config = found.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if getattr(config, "layer_replication", None):  # copies of a layer share its weights, which would get the sum of all
        kind = f"{kind} with layer_replication"
    elif hasattr(found, "merge_and_unload"):
        kind = None
    if kind:
        raise ModelError(f"{adapter}: an adapter of type {kind} cannot be merged into a model's weights.")
    integers = [key for key, weight in of_file.items() if not weight.is_floating_point()]
    refuse_weights(adapter, {"not floats": integers, "not finite": damaged_of(of_file.items())[0]})
    unknown, missing = known.unexpected_keys, of_model - of_file.keys()
    for apart, what in ((unknown, "holds {} that the model has no layer for"), (missing, "lacks {}")):
        if apart:
            some = f"{min(apart)} and {len(apart) - 1} more" if len(apart) > 1 else min(apart)
            raise ModelError(f"{adapter}: was made for another model: it {what.format(some)}.")
    return found


def merged(model: Any, adapter: str) -> Any:
    """The model with the adapter's weights merged into its own, as of `PeftModel.merge_and_unload`. Raises as `wrapped`."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    in_peft = wrapped(model, adapter)
    ends = [each for each in (model.get_input_embeddings(), model.get_output_embeddings()) if each is not None]
    shared = len({id(getattr(each, "base_layer", each).weight) for each in ends}) < len(ends)
    if shared and any(isinstance(each, BaseTunerLayer) and not hasattr(each, "token_indices") for each in ends):
        log.warning(
            "%s: changes embeddings that input and output of the model share. Merging changes both, as PEFT's merge_and_unload "
            "does, so answers are not those of the adapter that is not merged.",
            adapter,
        )
    try:
        return in_peft.merge_and_unload(safe_merge=True)
    except Exception as error:
        raise ModelError(f"{adapter}: cannot be merged into the model ({first_line(error)}).") from error
