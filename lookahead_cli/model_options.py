"""Options of which model is loaded beside its name, shared by the commands that load one."""

from __future__ import annotations

from typing import Annotated

import typer

TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run the Python code that comes with the model or its tokenizer. Read it first."),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of the model, where --model is a hub name."),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        metavar="NAME_OR_DIR",
        help="PEFT adapter (such as LoRA) of the model, merged into its weights. Needs pip install 'lookahead[adapter]'.",
    ),
]
ModelTokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="NAME_OR_DIR", help="Another tokenizer than the model's own."),
]
