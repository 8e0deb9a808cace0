"""A model in a folder is loaded and probed once per process of the tests: most of their jobs run the demo model.

What an engine learns is its own; only the model and how it verifies are shared. `load_model` itself loads at each call, and so
do the commands that tests start as processes.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookahead import api
from lookahead.forward.target import TargetModel
from lookahead.job import setup
from lookahead.models import load, probe
from lookahead.models.options import ModelOptions

DOORS = (setup, api)  # modules that call `load_model` by this name
MOST_MODELS = 4  # that are kept


def load_once(patch: pytest.MonkeyPatch) -> None:
    """As long as `patch` lasts."""
    loader = Loader(load.load_model)
    for door in DOORS:
        patch.setattr(door, "load_model", loader)


def load_each_time(patch: pytest.MonkeyPatch) -> None:
    """As users do."""
    for door in DOORS:
        patch.setattr(door, "load_model", load.load_model)


def without_the_op(patch: pytest.MonkeyPatch) -> None:
    """Models attend by their own function, so that scores depend on the shape of the forward."""
    patch.setattr(probe, "op_may_serve", lambda target: False)
    load_each_time(patch)


def refuse_to_load(patch: pytest.MonkeyPatch) -> None:
    """A test fails that loads a model after this."""

    def no_model(*arguments: object, **options: object) -> None:
        raise AssertionError("a model is loaded")

    for door in (*DOORS, load):
        patch.setattr(door, "load_model", no_model)


class Loader:
    """load_model that answers for a folder it knows, as long as no file of it has changed."""

    def __init__(self, load: Callable[..., TargetModel]):
        self.load = load
        self.loaded = functools.lru_cache(MOST_MODELS)(self._load)

    def __call__(self, *arguments: Any, **options: Any) -> TargetModel:
        chosen = ModelOptions.of(*arguments, **options)
        chosen = dataclasses.replace(chosen, tokenizer=None, device=chosen.device or "auto")
        folder = Path(chosen.name)
        if not folder.is_dir() or chosen.device_map or chosen.tp_plan or chosen.revision or chosen.adapter:
            return self.load(*arguments, **options)
        files = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir()))
        hits = self.loaded.cache_info().hits
        target, generation_config = self.loaded(chosen, files)
        if self.loaded.cache_info().hits > hits:
            load._log_setting(target)
        target.model.generation_config = copy.deepcopy(generation_config)
        return dataclasses.replace(target)  # what is cached of its settings, such as its threads, is read again

    def _load(self, chosen: ModelOptions, files: object) -> tuple[TargetModel, Any]:
        target = self.load(chosen)
        return target, copy.deepcopy(target.model.generation_config)
