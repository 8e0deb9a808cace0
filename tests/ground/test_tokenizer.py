"""Tokenizers come out the same however they are loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lookahead.tokenizer import identity, load_tokenizer
from lookahead_cli.demo import samples_folder


@pytest.mark.parametrize("which", ["demo", "trained"])
def test_tokenizer_loaded_without_torch_is_the_one_that_auto_tokenizer_gives(which: str, tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    folder = str(samples_folder() / "demo-model" if which == "demo" else tokenizer_folder)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    text = "The cat's mat: 48/2 = <<48/2=24>>\n\tnaïve  text</s>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert identity(ours, "x") == identity(theirs, "x")
    assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)


def test_copied_tokenizer_has_the_same_fingerprint(tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_folder, tmp_path / "copy")
    copied = identity(load_tokenizer(str(tmp_path / "copy")), "copy")
    assert copied.fingerprint == identity(load_tokenizer(str(tokenizer_folder)), "x").fingerprint
