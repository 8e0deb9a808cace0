"""Names of folders and of the hub: what was meant as a folder never goes to the hub, and nothing waits for a network."""

import os
import shutil
from pathlib import Path

import pytest

from lookahead.errors import ModelError, UsageError
from lookahead.files import hub
from lookahead.files.hub import check_name, gguf_in, located, with_gguf_file
from lookahead.tokenizer import load_tokenizer
from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl


@pytest.fixture
def online(monkeypatch):
    """The hub may be asked; which names it was asked for. It does not answer."""
    asked = []

    def model_info(self, name, **_):
        asked.append(name)
        raise ConnectionError("Name or service not known\nand more lines")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr(hub, "is_cached", lambda name: name == "org/cached")
    hub._problem.cache_clear()
    return asked


@pytest.mark.parametrize("name", ["./x", "../x", "/nowhere/x", "models/x", "a/b/c", "~/x", "x y", "org/..", "-x", "org/x/"])
def test_what_can_only_be_a_folder_never_goes_to_the_hub(name, tmp_path, monkeypatch, online):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelError, match=r"no such folder") as refused:
        check_name(name, "a model folder")
    assert str(refused.value).startswith(f"{name}: ")
    assert online == []


def test_folder_of_a_similar_name_is_offered(tmp_path, monkeypatch, online):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples" / "demo-model").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"samples/demo-modle: no such folder in samples\. Did you mean samples/demo-model\?"):
        check_name("samples/demo-modle", "a model folder")
    assert online == []


def test_gguf_file_is_named_with_its_folder_or_repository(tmp_path, online):
    (tmp_path / "a.Q8_0.gguf").write_text("")
    here, path = str(tmp_path), str(tmp_path / "a.Q8_0.gguf")
    assert with_gguf_file(here, "a.Q8_0.gguf") == path
    assert gguf_in(path) == (here, "a.Q8_0.gguf")
    assert gguf_in("org/model/sub/b.gguf") == ("org/model", "sub/b.gguf")
    assert gguf_in(here) == (here, "")
    assert located(path, "a model folder") == (here, {"gguf_file": "a.Q8_0.gguf"})
    with pytest.raises(ModelError, match=r"b\.gguf: no such file\. GGUF files in this folder: a\.Q8_0\.gguf"):
        check_name(str(tmp_path / "b.gguf"), "a model folder")
    for model, file, problem in ((here, "a.bin", "name a file that ends in .gguf"), (path, "a.Q8_0.gguf", "is a file")):
        with pytest.raises(UsageError, match=problem):
            with_gguf_file(model, file)
    assert online == []


def test_hub_name_is_refused_at_once_where_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        check_name("org/no-such-model", "a model folder")


def test_hub_that_does_not_answer_is_asked_once_and_said_in_one_line(online):
    for _ in range(2):
        with pytest.raises(ModelError, match="it does not answer: Name or service not known") as refused:
            load_tokenizer("org/no-such-model")
        assert "\n" not in str(refused.value)
    assert online == ["org/no-such-model"]


@pytest.mark.parametrize("command", ["build-trie", "generate"])
def test_hub_name_without_a_network_fails_with_one_line(command, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # a port that nobody serves
    hub._problem.cache_clear()
    corpus = write_jsonl(tmp_path / "in.jsonl", [{"text": "a", "prompt": "a"}])
    options = {
        "build-trie": [corpus, "-o", tmp_path / "x.trie", "--tokenizer"],
        "generate": ["--input", corpus, "-o", tmp_path / "x.jsonl", "--model"],
    }
    said = "org/no-such-model: no such folder, and not from the hub (it does not answer"
    cli.fails(1, command, *options[command], "org/no-such-model", saying=[said])
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


# ---- the tokenizer of a trie
@pytest.fixture
def moved(cli, tokenizer_folder, tmp_path, monkeypatch):
    """A trie that was built with a tokenizer of a relative name, in a folder that is no longer the current one."""
    home = tmp_path / "home"
    shutil.copytree(tokenizer_folder, home / "some" / "tokenizer")
    write_jsonl(home / "corpus.jsonl", [{"text": "the cat sat on the mat"}])
    monkeypatch.chdir(home)
    assert cli("build-trie", "corpus.jsonl", "-o", "x.trie", "--tokenizer", "some/tokenizer").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return home / "x.trie"


def test_query_and_append_from_another_folder_find_the_tokenizer(cli, moved, online):
    assert Trie(moved).header.tokenizer_name == str(moved.parent / "some" / "tokenizer")
    result = cli("inspect-trie", moved, "--query", "the cat", "--json")
    assert result.code == 0
    assert result.json["query"]["continuations"]
    assert cli("build-trie", moved.parent / "corpus.jsonl", "--append", moved, "--json").code == 0
    assert online == []


def test_query_without_the_tokenizer_says_at_once_what_to_give(cli, moved, online):
    shutil.move(moved.parent / "some", moved.parent / "other")
    cli.fails(1, "inspect-trie", moved, "--query", "the cat", saying=[str(moved), "some/tokenizer", "--tokenizer NAME_OR_DIR"])
    cli.fails(1, "build-trie", moved.parent / "corpus.jsonl", "--append", moved, saying=["--tokenizer NAME_OR_DIR"])
    assert cli("inspect-trie", moved).code == 0  # shows ids
    assert cli("inspect-trie", moved, "--query", "the cat", "--tokenizer", moved.parent / "other" / "tokenizer").code == 0
    assert online == []


def test_names_that_are_not_text_build_merge_and_prune(cli, tokenizer_folder, tmp_path):
    folder = os.fsencode(tmp_path) + b"/odd\xff"
    os.mkdir(folder)
    odd = Path(os.fsdecode(folder))
    corpus = write_jsonl(odd / "corpus\udcfe.jsonl", [{"text": "the cat sat on the mat"}])
    trie = odd / "x\udcfd.trie"
    for command in (
        ["build-trie", corpus, "-o", trie, "--tokenizer", tokenizer_folder],
        ["build-trie", corpus, "--append", trie, "--tokenizer", tokenizer_folder],
        ["merge-tries", trie, "-o", odd / "merged\udcff.trie"],
        ["prune-trie", trie, "-o", odd / "pruned\udcff.trie", "--max-tokens", 100],
        ["inspect-trie", trie, "--verify"],
    ):
        for json in ([], ["--json"]):
            assert cli(*command, *json).code == 0, command
