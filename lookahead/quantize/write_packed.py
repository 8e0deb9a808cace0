"""Quantizing a checkpoint. In: a model's folder or hub name. Out: a folder with packed weights (packed.py), and what was lost.

Tensors are read, quantized and written one by one, so memory holds about one file of the result. Channels with large inputs
are made smaller first (equalize.py), and with texts to calibrate on, errors compensate each other (rounding.py). Weights of 4
bits whose inputs are not a multiple of 64 are written with 8. Where embeddings are tied, the output layer becomes a matrix of
its own. The embedding stays as it is, as transformers loads no other; config.json states in how many bits packed_model.py is to
hold it. If it is to be packed as well, the format is our own, which transformers refuses, and a tied output layer stays tied.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lookahead.backends.cpu.embedding import may_be_in_panels
from lookahead.backends.cpu.equalize import factors_of, norms_before
from lookahead.backends.cpu.packed import ACTIVATIONS_FIELD, EMBEDDING_BITS, FORMAT, METHOD, tensors_of
from lookahead.backends.cpu.quantize import bits_of, layers_to_quantize
from lookahead.backends.cpu.quantized import GROUP, Quantized
from lookahead.errors import ModelError, UsageError
from lookahead.files.hub import gguf_in
from lookahead.forward.backend import SCHEMES
from lookahead.models.checkpoint import INDEX, damaged_of, refuse_weights, shards_of, tensors_in
from lookahead.models.load import empty_model, read_config, unpack_gguf
from lookahead.models.prequantized import BLOCKS_IN_8_BITS, WITH_EMBEDDING
from lookahead.quantize.activation_stats import InputSizes, Moments
from lookahead.quantize.mixed import orders_of
from lookahead.quantize.rounding import quantized
from lookahead.tokenizer import first_line

SHARD_BYTES = 1 << 30  # of a file of weights
COPIED = (".json", ".jinja", ".txt", ".model", ".py", ".md")  # endings of what else belongs to a model
LEFT = ("config.json", INDEX)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A quantized linear layer. error: root mean square of what rounding changed, as a share of that of the weights."""

    name: str
    bits: int
    error: float


@dataclasses.dataclass(frozen=True)
class Written:
    """bytes_before, bytes_after: of all weights."""

    layers: list[Layer]
    bytes_before: int
    bytes_after: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """bits: of each weight that is quantized, by its name in the checkpoint. layers: that it belongs to. kept: weights that are
    also written as they are. routers: linear layers that stay. untied: the output layer has a matrix of its own from now on.
    embedding_bits: to hold the embedding in, once it is loaded. format: see packed.py.
    """

    bits: dict[str, int]
    layers: dict[str, list[str]]
    kept: set[str]
    routers: list[str]
    untied: bool
    embedding_bits: int
    format: str


def _plan(model: Any, scheme: str, pack_embedding: bool) -> _Plan:
    """model: on the meta device."""
    names = {id(module): name for name, module in model.named_modules()}
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    untied = head is not None and head.weight is embeddings.weight
    bits, layers = {}, {}
    for users, width in layers_to_quantize(model, scheme):
        modules = [getattr(module, name) for module, name in users]
        users_names = [names[id(module)] for module in modules]
        source = f"{names[id(embeddings)]}.weight" if untied and head in modules else f"{users_names[0]}.weight"
        bits[source] = width if modules[0].in_features % GROUP == 0 else 8
        layers[source] = users_names
    found = {name for each in layers.values() for name in each}
    routers = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name not in found]
    shared = f"{names[id(embeddings)]}.weight"
    embedding_bits = bits[shared] if untied and shared in bits else bits_of(scheme)
    if pack_embedding and may_be_in_panels(embeddings):
        bits[shared] = embedding_bits if embeddings.embedding_dim % GROUP == 0 else 8
        layers[shared] = [names[id(embeddings)]]
        return _Plan(bits, layers, set(), routers, False, bits[shared], WITH_EMBEDDING)
    return _Plan(bits, layers, {shared} if untied else set(), routers, untied, embedding_bits, FORMAT)


def quantization_config(plan: _Plan, scheme: str, sorted_inputs: bool = False) -> dict[str, Any]:
    """Return what config.json states of it."""
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    four = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP, "dynamic": False}
    if sorted_inputs:
        four["actorder"] = "group"
    main = 8 if scheme == "int8" else 4
    apart = sorted(name for source, names in plan.layers.items() if plan.bits[source] != main for name in names)
    groups = {"group_0": {"targets": ["Linear"], "weights": eight if main == 8 else four}}
    if apart:
        groups["group_1"] = {"targets": apart, "weights": eight}
    about = {"quant_method": METHOD, "format": plan.format, "quantization_status": "compressed", "ignore": plan.routers}
    return {**about, "config_groups": groups}


class _Files:
    """Writes tensors to files of about SHARD_BYTES."""

    def __init__(self, folder: Path):
        self.folder, self.held, self.size, self.total = folder, dict[str, torch.Tensor](), 0, 0
        self.files: list[list[str]] = []

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        self.held |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.size += sum(tensor.nbytes for tensor in tensors.values())
        if self.size >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.held:
            save_file(self.held, self.folder / f"{len(self.files)}.part", {"format": "pt"})
            self.files.append(list(self.held))
        self.total += self.size
        self.held, self.size = {}, 0

    def finish(self) -> None:
        self.flush()
        names = ["model.safetensors"]
        if len(self.files) > 1:
            names = [f"model-{n + 1:05}-of-{len(self.files):05}.safetensors" for n in range(len(self.files))]
            file_of = {tensor: name for name, tensors in zip(names, self.files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self.total}, "weight_map": file_of}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for number, name in enumerate(names):
            (self.folder / f"{number}.part").rename(self.folder / name)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A model that is to be quantized, in memory. run: runs it on texts. sizes: of inputs there. mixed: inputs are sorted, for
    tokens of 4 and 8 bits.
    """

    model: Any
    run: Callable[[], object]
    sizes: InputSizes
    mixed: bool


@dataclasses.dataclass(frozen=True)
class _Changes:
    """factors: of inputs, by names of layers; divisors: of tensors of norms, by their names. orders: of inputs, where they are
    sorted. largest: inputs on texts, divided. moments: of inputs on texts, not divided.
    """

    factors: dict[str, torch.Tensor]
    divisors: dict[str, torch.Tensor]
    orders: dict[str, torch.Tensor]
    largest: dict[str, torch.Tensor]
    moments: Moments | None

    @torch.no_grad()
    def matrix(self, layer: str, weight: torch.Tensor, bits: int) -> tuple[Quantized, torch.Tensor]:
        """Return what a weight is written as, and float32 [out, in], what that stands for."""
        weight, moments = weight.float(), None if self.moments is None else self.moments.of(layer)
        if layer in self.factors:
            weight = weight * self.factors[layer]
            moments = moments if moments is None else moments / self.factors[layer].outer(self.factors[layer])
        order = self.orders.get(layer)
        if order is None:
            return quantized(weight, bits, moments), weight
        moments = moments if moments is None else moments[order][:, order]
        return dataclasses.replace(quantized(weight[:, order], bits, moments), order=order), weight


def _changes(plan: _Plan, model: Any, source: Path, calibration: Calibration | None) -> _Changes:
    """model: on the meta device."""
    readers = {
        name: layers for name, layers in norms_before(model).items() if all(f"{each}.weight" in plan.bits for each in layers)
    }
    norms = {f"{norm}.{part}": norm for norm in readers for part, _ in model.get_submodule(norm).named_parameters()}
    held, order = dict[str, torch.Tensor](), list[str]()
    for name, file in tensors_in(shards_of(source)):
        order += plan.layers[name][:1] if name in plan.bits else []
        if name in norms:
            held[name] = file.get_tensor(name)
    factors, divisors = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for norm, layers in readers.items():
        parts = [name for name, of in norms.items() if of == norm]
        if all(part in held for part in parts):
            squares = None if calibration is None else calibration.sizes.squares.get(layers[0])
            each = factors_of(held[f"{norm}.weight"] if squares is None else squares.sqrt())
            if each is not None:
                divisors |= dict.fromkeys(parts, each)
                factors |= dict.fromkeys(layers, each)
    if calibration is None:
        return _Changes(factors, divisors, {}, {}, None)
    largest = {name: most / factors.get(name, 1) for name, most in calibration.sizes.largest.items()}
    moments = Moments(calibration.model, calibration.run, order)
    return _Changes(factors, divisors, orders_of(largest) if calibration.mixed else {}, largest, moments)


@torch.no_grad()
def _written(plan: _Plan, source: Path, files: _Files, changes: _Changes, progress: Callable[[int, int], None]) -> Written:
    """Write all tensors."""
    missing, layers, before = set(plan.bits), list[Layer](), 0
    for name, file in tensors_in(shards_of(source)):
        tensor = file.get_tensor(name)
        before += tensor.nbytes
        if name in changes.divisors:
            tensor = tensor / changes.divisors[name].to(tensor.dtype)
        if name not in plan.bits or name in plan.kept:
            files.add({name: tensor})
        not_finite, zero = damaged_of([(name, tensor)])
        integers = [name] if name.endswith(".weight") and not tensor.is_floating_point() else []
        refuse_weights(str(source), {"not finite": not_finite, "all zero": zero, "not floats": integers})
        if name in plan.bits:
            matrix, weight = changes.matrix(plan.layers[name][0], tensor, plan.bits[name])
            error = (matrix.to_dense() - weight).norm() / weight.norm().clamp_min(1e-30)
            for layer in plan.layers[name]:
                files.add(tensors_of(layer, matrix))
                layers.append(Layer(layer, plan.bits[name], float(error)))
            missing.discard(name)
            progress(len(plan.bits) - len(missing), len(plan.bits))
    if missing:
        raise ModelError(f"{source}: no tensor {min(missing)} in its safetensors files.")
    files.finish()
    return Written(layers, before, files.total)


Choose = Callable[[Path, Mapping[str, torch.Tensor]], dict[str, int]]


def quantize_checkpoint(
    name: str,
    out: str,
    scheme: str,
    progress: Callable[[int, int], None] = lambda done, all_of_them: None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    calibration: Calibration | None = None,
    choose: Choose | None = None,
    pack_embedding: bool = False,
    weights_only: bool = False,
) -> Written:
    """Quantize a model's folder, a GGUF file (unpacked first), or a hub name's files.

    The new folder is one that transformers loads, unless pack_embedding. scheme: int8 or int4. progress: called with how many
    weights are done, and how many there are. weights_only: the folder states that tokens are not to be quantized. choose: of
    tokens of 4 and 8 bits (mixed.py): how many blocks of each layer have 8 bits, given a folder that has all but that, and the
    largest inputs of layers. Raises UsageError if the new folder is there or the scheme is none, ModelError for a model that
    cannot be quantized, and as `load.read_config` does.
    """
    if gguf_in(name)[1]:
        with tempfile.TemporaryDirectory(prefix="lookahead-gguf-") as folder:
            unpack_gguf(name, folder, trust_remote_code, revision)
            further = calibration, choose, pack_embedding, weights_only
            return quantize_checkpoint(folder, out, scheme, progress, trust_remote_code, None, *further)
    target = Path(out)
    if scheme not in SCHEMES[1:]:
        raise UsageError(f"--weights {scheme}: choose {', '.join(SCHEMES[1:])}.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"-o {out}: is there already. Name a new folder.")
    config = read_config(name, trust_remote_code, revision)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{name}: is quantized already. Give the model that it was made of.")
    source = _files_of(name, revision)
    if not shards_of(source):
        raise ModelError(f"{name}: no weights in this folder (looked for *.safetensors).")
    try:
        model = empty_model(config, trust_remote_code)
        plan = _plan(model, scheme, pack_embedding)
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"{name}: a model of this shape cannot be made ({first_line(error)}).") from error
    if not plan.bits:
        raise ModelError(f"{name}: it has no linear layers that could be quantized.")
    return _write(plan, source, target, scheme, progress, _changes(plan, model, source, calibration), choose, weights_only)


def _files_of(name: str, revision: str | None) -> Path:
    """The folder of a model; of a hub name, where its files are kept. Raises ModelError if they cannot be had."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", *(f"*{ending}" for ending in COPIED)]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub raises many kinds
        raise ModelError(f"{name}: its files cannot be had ({first_line(error)}).") from error


def _write(
    plan: _Plan,
    source: Path,
    target: Path,
    scheme: str,
    progress: Callable[[int, int], None],
    changes: _Changes,
    choose: Choose | None,
    weights_only: bool,
) -> Written:
    """Under another name until all is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        written = _written(plan, source, _Files(folder), changes, progress)
        for path in source.iterdir():
            if path.is_file() and path.suffix in COPIED and path.name not in LEFT:
                shutil.copyfile(path, folder / path.name)
        fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
        fields["quantization_config"] = quantization_config(plan, scheme, bool(changes.orders))
        fields |= {ACTIVATIONS_FIELD: "none"} if weights_only else {EMBEDDING_BITS: plan.embedding_bits}
        if plan.untied:
            fields["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if choose is not None:
            fields[BLOCKS_IN_8_BITS] = choose(folder, changes.largest)
            (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if target.exists():
            target.rmdir()
        folder.rename(target)
    return written
