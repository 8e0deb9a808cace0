"""Shared fixtures: tries from token ids, tiny models with random weights, a tiny tokenizer, the device."""

import contextlib
import os
from collections.abc import Generator

import hypothesis
import pytest
import torch

from lookahead.forward.memory import gc_frozen
from lookahead.token_documents import TokenDocument, TokenizerIdentity
from lookahead.trie.build import build_trie
from lookahead.trie.file import Trie
from lookahead_cli import render
from tests import architectures
from tests.support import loading
from tests.support.cli import Cli

torch.set_num_threads(1)
os.environ.setdefault("RAY_worker_niceness", "0")  # of 15, Ray's own, its workers wait for the tests that run beside them
if "PYTEST_XDIST_WORKER" in os.environ:  # tests run beside each other, and so do the commands that they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_whole_session = contextlib.ExitStack()
LONGEST = ("test_workers", "test_job_resume", "test_parallel", "test_custom_generate", "test_api", "test_cli_bench")

hypothesis.settings.register_profile("fast", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("deep", max_examples=200, deadline=None, derandomize=True)


def pytest_configure(config: pytest.Config) -> None:
    """`-m deep` takes the deep profile of hypothesis, and so does HYPOTHESIS_PROFILE=deep."""
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("deep" if selects_deep(config) else "fast"))


def selects_deep(config: pytest.Config) -> bool:
    expression = config.option.markexpr
    return "deep" in expression and "not deep" not in expression


@pytest.hookimpl(tryfirst=True)  # marks are there before others select by them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Properties are deep tests too, where these are asked for. Files whose tests take longest come first: what is left at the
    end, when workers share out the rest, is short.
    """
    if selects_deep(config):
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker(pytest.mark.deep)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(autouse=True, scope="session")
def models_are_loaded_once():
    """See loading.py."""
    with pytest.MonkeyPatch.context() as patch:
        loading.load_once(patch)
        yield


def pytest_collection_finish() -> None:
    """What has been imported stays: a million objects that each garbage collection, two in each job, would look through."""
    _whole_session.enter_context(gc_frozen())


@pytest.fixture(autouse=True, scope="session")
def no_profiles(tmp_path_factory):
    """Cost profiles of this user's own do not count, and no line says that something takes long on a loaded machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKAHEAD_CACHE", str(tmp_path_factory.mktemp("profiles")))
        patch.setattr(render.with_spinner, "__defaults__", (3600.0,))
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="session")
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    return request.param


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def make_trie(tmp_path):
    """make_trie(documents, vocab_size=10, name="corpus.trie", sources="a") -> Trie; one source each, or one for all."""

    def make(documents, vocab_size=10, name="corpus.trie", sources="a", **options):
        of_each = [sources] * len(documents) if isinstance(sources, str) else sources
        rows = [TokenDocument(ids, source) for ids, source in zip(documents, of_each, strict=True)]
        build_trie(rows, tmp_path / name, TokenizerIdentity(vocab_size, "0123456789abcdef", "tiny"), **options)
        return Trie(tmp_path / name)

    return make


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A saved byte-level BPE tokenizer with an end-of-sequence token and a chat template that refuses system turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    from lookahead.tokenizer import load_tokenizer

    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="session")
def tiny_model():
    """tiny_model(architecture, device="cpu") -> a model with random weights, the same in each run; made once."""
    return architectures.tiny_model


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What tests print about names that are not UTF-8 cannot be sent from one process of pytest-xdist to another."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report
