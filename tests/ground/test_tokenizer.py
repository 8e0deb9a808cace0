"""Tokenizers come out the same however they are loaded."""

import datetime
import json
import shutil

import pytest

from lookahead.corpus.read import CorpusReport, read_documents
from lookahead.tokenizer import chat_text, identity, load_tokenizer
from lookahead_cli.demo import samples_folder


@pytest.mark.parametrize("which", ["demo", "trained"])
def test_tokenizer_loaded_without_torch_is_the_one_that_auto_tokenizer_gives(which, tokenizer_folder):
    from transformers import AutoTokenizer

    folder = str(samples_folder() / "demo-model" if which == "demo" else tokenizer_folder)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    text = "The cat's mat: 48/2 = <<48/2=24>>\n\tnaïve  text</s>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert identity(ours, "x") == identity(theirs, "x")
    assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)


TIMED = [
    "\n  {% if strftime_now is defined %}\n  on {{ strftime_now('%-d %B %Y') }}\n {% endif %}\n{{ messages[0].content }}\n",
    "{%- macro day(code) -%}{{ strftime_now(code) }}{%- endmacro -%}{% set d = strftime_now('%d %b') %}{{ d }}{{ day('%Y') }}",
    "{% generation %}{{ strftime_now('%j%%') }}{% endgeneration %} no time",
    "{{ messages[0].content }}",
]


@pytest.mark.parametrize("template", TIMED)
def test_chat_template_writes_the_time_that_it_is_given_and_else_what_transformers_gives(template):
    tokenizer, chat = load_tokenizer(str(samples_folder() / "demo-model")), [{"role": "user", "content": "Hi"}]
    tokenizer.chat_template = template
    now = datetime.datetime.now()
    theirs = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert chat_text(tokenizer, chat, now) == theirs  # but for a test that runs at midnight
    then = datetime.datetime(1999, 12, 31, 23, 59)
    assert (chat_text(tokenizer, chat, then) == theirs) is ("strftime_now" not in template)
    assert "99" in chat_text(tokenizer, chat, then) or "365" in chat_text(tokenizer, chat, then) or template == TIMED[-1]


LIMITS = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 90},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<eos>",
    },
}


@pytest.mark.parametrize("generic", [True, False])
@pytest.mark.parametrize("names", [["truncation"], ["padding"], ["truncation", "padding"]])
def test_limits_in_tokenizer_json_cut_and_pad_no_text(tokenizer_folder, names, generic, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    fields = json.loads((folder / "tokenizer.json").read_text()) | {name: LIMITS[name] for name in names}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    if not generic:  # loaded by AutoTokenizer
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"auto_map": {}}))
    loaded, plain, text = load_tokenizer(str(folder)), load_tokenizer(str(tokenizer_folder)), "the cat sat on the mat"
    assert loaded(text)["input_ids"] == plain(text)["input_ids"]
    assert loaded.backend_tokenizer.encode(text).ids == plain.backend_tokenizer.encode(text).ids


def test_corpus_is_read_whole_by_a_tokenizer_that_was_limited_before(tokenizer_folder, tmp_path):
    from transformers import AutoTokenizer

    limited, file = AutoTokenizer.from_pretrained(tokenizer_folder, pad_token="<eos>"), tmp_path / "a.txt"
    file.write_text("the cat sat on the mat")
    whole = limited(file.read_text())["input_ids"]
    limited(["a", "b"], truncation=True, max_length=4, padding="max_length")
    (document,) = read_documents([str(file)], limited, CorpusReport())
    assert document.token_ids.tolist() == whole
