"""Options of a model. In: from Python, a command line or job.yaml. Out: a `ModelOptions`, for `load.load_model`.

It is passed whole from where it is typed to where it is used. No model is read here, and torch is not imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead.errors import UsageError
from lookahead.files.hub import with_gguf_file
from lookahead.options import OptionGroup, option
from lookahead.tokenizer import load_tokenizer, own_tokenizer


@dataclass(frozen=True)
class ModelOptions(OptionGroup):
    """The model that answers, and how it is loaded."""

    CHANGES_ANSWERS = True

    model: str | None = option(None, "Causal LM: a folder, a GGUF file or a Hugging Face name.", "NAME_OR_DIR")
    gguf_file: str | None = option(
        None,
        "The GGUF file to load, if --model is a folder or Hugging Face name that holds several. Needs pip install "
        "'lookahead[gguf]'.",
        "NAME",
    )
    revision: str | None = option(None, "Branch, tag or commit of the model, if --model is a Hugging Face name.", "NAME")
    adapter: Sequence[str] | None = option(
        None,
        "PEFT adapter (such as LoRA) of the model, merged into its weights; with NAME= for the rows of a job that name it; "
        "repeat for several. Needs pip install 'lookahead[adapter]'.",
        "[NAME=]NAME_OR_DIR",
    )
    tokenizer: str | None = option(None, "Tokenizer to use instead of the model's own.", "NAME_OR_DIR")
    trust_remote_code: bool = option(False, "Run the Python code that comes with the model or its tokenizer. Read it first.")
    dtype: str = option("auto", "auto (float32 on a CPU, the checkpoint's own on a GPU), float32, bfloat16 or float16.")
    device: str | None = option(None, "auto, cpu, cuda or cuda:N.", default_text="auto")
    threads: int = option(
        0,
        "Threads of a model on a CPU; 0: as many as torch takes, but no more than this process has cores.",
        "N",
        least=0,
        most=1024,
        changes_answers=False,
    )
    attn: str | None = option(None, "Attention implementation: sdpa or eager (default: the model's).", "NAME")
    engine: str = option(
        "hf",
        "hf: our engine for transformers models. vllm, sglang: vLLM or SGLang with our drafts (pip install 'lookahead[vllm]', "
        "'lookahead[sglang]').",
    )
    engine_arg: Sequence[str] | None = option(
        None, "Argument of vLLM or SGLang, its value as JSON or text; repeat for several.", "NAME=VALUE"
    )
    engine_mode: str = option(
        "auto",
        "How forwards are run: modules (the model's own, one by one), program (a whole forward in one native call, on CPUs; an "
        "error if the model does not support it) or auto (program if supported).",
    )
    quantize: str = option(
        "none",
        "Quantize the model's weights, on a CPU: int8, int4 (groups of 64, the output layer int8) or none. Answers are "
        "those of the quantized model, the same with drafts and without.",
    )
    kv_dtype: str = option(
        "none",
        "Keep keys and values in 8 or 4 bits, on a CPU: int8, int4 or none. Answers are then others, the same with drafts and "
        "without.",
    )
    exact: bool = option(
        False,
        "Require, on a CPU, that a token's scores are the same bits in every forward, so that drafts and batches change no "
        "token in half precision either; an error if the model does not support it.",
    )

    device_map: str | None = option(
        None,
        "Spread one model over this machine's GPUs, as transformers does: auto.",
        "MAP",
        panel="Scale-out",
        changes_answers=False,
    )
    tp_plan: str | None = option(
        None,
        "Tensor parallel, as transformers does: auto. Start with torchrun --no-python --nproc-per-node N lookahead.",
        "PLAN",
        panel="Scale-out",
        changes_answers=False,
    )

    @classmethod
    def of(cls, model: str | ModelOptions, dtype: str | None = None, device: str | None = None, **options: Any) -> ModelOptions:
        """Make options of a model's name, or of other options; those given here instead. Raises UsageError
        for a wrong value.
        """
        options |= {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
        if "attention" in options:
            options["attn"] = options.pop("attention")
        return dataclasses.replace(model, **options) if isinstance(model, ModelOptions) else cls(model, **options)

    @property
    def name(self) -> str:
        """The model, with its GGUF file if one is named. Raises UsageError if there is no model."""
        if self.model is None:
            raise UsageError("name a model: --model org/name or a folder.")
        return with_gguf_file(self.model, self.gguf_file) or self.model

    @property
    def source(self) -> tuple[str, bool, str | None]:
        """(name, trust_remote_code, revision): what its config and its own tokenizer are read by."""
        return self.name, self.trust_remote_code, self.revision

    @property
    def adapters(self) -> dict[str | None, str]:
        """Folder or hub name of each adapter, by the name that rows give; None: of rows that name none.

        Raises UsageError for an empty name or folder, and for a name given twice.
        """
        found: dict[str | None, str] = {}
        for item in self.adapter or ():
            before, equals, after = item.partition("=")
            name, folder = (before, after) if equals and not Path(item).exists() else (None, item)
            if not folder or name == "":
                raise UsageError(f"--adapter {item}: give NAME=FOLDER, such as legal=adapters/legal, or FOLDER alone.")
            if name in found:
                twice = f"{name} is given twice" if name else "is a second one without a name: give NAME=FOLDER"
                raise UsageError(f"--adapter {item}: {twice}.")
            found[name] = folder
        return found

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that rows may name."""
        return tuple(name for name in self.adapters if name)

    def of_rows(self, adapter: str | None) -> ModelOptions:
        """The model of rows that name this adapter, or none."""
        return dataclasses.replace(self, adapter=self.adapters.get(adapter))

    def load_tokenizer(self) -> Any | None:
        """The tokenizer that was named, else the model's own; None if the model has none. Raises ModelError if it is broken."""
        if self.tokenizer:
            return load_tokenizer(self.tokenizer, self.trust_remote_code)
        return own_tokenizer(*self.source)
