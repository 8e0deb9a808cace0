"""build-trie, inspect-trie, prune-trie and merge-tries, as typed."""

import itertools
import json
import re
import subprocess
import sys

import pytest

from lookahead.trie.file import Trie
from tests.support.cli import write_jsonl
from tests.support.jobs import COMMAND
from tests.support.processes import Program


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", [{"text": "the cat sat on the mat"}, {"text": "the cat sat on the log"}])


@pytest.fixture
def trie(cli, corpus, tokenizer_folder):
    out = corpus.parent / "cats.trie"
    assert cli("build-trie", corpus, "-o", out, "--tokenizer", tokenizer_folder).code == 0
    return out


@pytest.fixture
def ids_trie(cli, tmp_path):
    corpus = write_jsonl(tmp_path / "ids.jsonl", [{"ids": [1, 2, 3, 1, 2, 4]}, {"ids": [5, 6, 7, 8]}, {"ids": [1, 2, 3, 9]}])
    assert cli("build-trie", corpus, "-o", tmp_path / "ids.trie", "--vocab-size", 10).code == 0
    return tmp_path / "ids.trie"


def test_build_prints_a_table_and_the_next_command_or_one_line_of_json(cli, corpus, tokenizer_folder):
    job = ("build-trie", corpus, "-o", corpus.parent / "a.trie", "--tokenizer", tokenizer_folder)
    shown, printed = cli(*job), cli(*job, "--source", "cats", "--json")
    assert (shown.code, "corpus.jsonl" in shown.out, "Next: lookahead inspect-trie" in shown.err) == (0, True, True)
    value = printed.json
    assert printed.out.count("\n") == 1
    assert value["rows"] == value["documents"] == 2
    assert value["bytes"] == (corpus.parent / "a.trie").stat().st_size
    assert value["sources"] == [{"name": "cats", "documents": 2, "tokens": value["tokens"]}]


def test_build_skips_bad_rows_and_lists_them_by_line_or_stops_at_the_first(cli, tmp_path, tokenizer_folder):
    corpus = tmp_path / "mixed.jsonl"
    corpus.write_bytes(b'{"text": "the cat"}\nnot json\n{"body": "x", "id": 1}\n\xff\xfe\n{"text": ""}\n[1]\n')
    result = cli("build-trie", corpus, "-o", tmp_path / "a.trie", "--tokenizer", tokenizer_folder, "--json")
    assert result.code == 0
    assert (result.json["rows"], result.json["bad_rows"]) == (1, 5)
    assert f'skipped {corpus}:3: no "text" field (found: body, id). Use --text-field NAME.' in result.err
    for line in (2, 4, 5, 6):
        assert f"skipped {corpus}:{line}: " in result.err
    strict = ("build-trie", corpus, "-o", tmp_path / "b.trie", "--tokenizer", tokenizer_folder, "--strict")
    cli.fails(1, *strict, saying=[f"{corpus}:2: not JSON"])
    assert not (tmp_path / "b.trie").exists()


@pytest.mark.parametrize(
    ("name", "content", "saying"),
    [
        ("empty.jsonl", b"", ["empty.jsonl", "no rows"]),
        ("junk.jsonl", bytes(range(128, 256)) * 4, ["junk.jsonl:1", "not UTF-8"]),
        ("corpus.doc", b"text", ["corpus.doc", "unknown kind of file", ".jsonl"]),
    ],
)
def test_unusable_corpus_is_one_line_and_leaves_the_old_trie(cli, tmp_path, tokenizer_folder, name, content, saying):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "old.trie").write_bytes(b"\x89LKT old")
    named = ("--tokenizer", tokenizer_folder)
    cli.fails(1, "build-trie", tmp_path / name, "-o", tmp_path / "old.trie", *named, saying=saying)
    assert (tmp_path / "old.trie").read_bytes() == b"\x89LKT old"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "old.trie"])


def test_what_is_missing_or_does_not_fit_is_named(cli, corpus, trie, ids_trie, tmp_path, tokenizer_folder):
    (tmp_path / "bare").mkdir()
    out, named = tmp_path / "a.trie", ("--tokenizer", tokenizer_folder)
    ids = write_jsonl(tmp_path / "ids.jsonl", [{"ids": [1, 2, 10]}])
    for line, saying in (
        (("build-trie", tmp_path / "no.jsonl", "-o", out, *named), "no.jsonl: no such file"),
        (("build-trie", corpus, "-o", out, "--tokenizer", tmp_path / "no"), "no: no such folder"),
        (("build-trie", corpus, "-o", out, "--tokenizer", tmp_path), "no tokenizer in this folder"),
        (("build-trie", corpus, "-o", tmp_path / "no" / "a.trie", *named), "folder does not exist"),
        (("build-trie", tmp_path / "bare", "-o", out, *named), "no files in this folder"),
        (("build-trie", corpus, "-o", out, "--vocab-size", 9), "--tokenizer"),
        (("build-trie", ids, "-o", out, "--vocab-size", 10), "outside the vocabulary of 10"),
        (("merge-tries", trie, ids_trie, "-o", out), "differs"),
    ):
        cli.fails(1, *line, saying=[saying])
    assert not out.exists()


def test_wrong_combinations_are_usage_errors(cli, corpus, trie, tmp_path):
    out = tmp_path / "x.trie"
    cli.fails(2, "build-trie", corpus, "-o", out, saying=["--tokenizer", "--vocab-size"])
    cli.fails(2, "build-trie", corpus, "-o", out, "--tokenizer", "x", "--vocab-size", 3, saying=["either"])
    cli.fails(2, "build-trie", corpus, saying=["-o OUT.trie", "--append F.trie"])
    cli.fails(2, "build-trie", corpus, "-o", out, "--append", trie, saying=["either"])
    cli.fails(2, "build-trie", corpus, "--append", trie, "--min-count", 2, saying=["--min-count", "prune-trie"])
    cli.fails(2, "inspect-trie", trie, "--plot", tmp_path / "x.png", saying=["--coverage"])
    cli.fails(2, "inspect-trie", trie, "--export", tmp_path / "x", saying=["--documents"])
    cli.fails(2, "inspect-trie", trie, "--documents", "--coverage", corpus, saying=["--coverage"])
    cli.fails(2, "inspect-trie", trie, "--documents", "--decoding-length", 5, saying=["--decoding-length"])
    cli.fails(2, "build-trie", corpus, "-o", out, "--no-such-option", saying=["--no-such-option"])
    cli.fails(2, "prune-trie", trie, "-o", out, saying=["nothing to prune"])
    cli.fails(2, "prune-trie", trie, "-o", out, "--max-bytes", "much", saying=["'much'", "KiB"])
    cli.fails(2, "prune-trie", trie, "-o", out, "--drop-source", "dogs", saying=["dogs", "corpus.jsonl"])
    cli.fails(2, "merge-tries", trie, trie, "-o", out, "--weight", "cats", saying=["NAME=W"])
    cli.fails(2, "merge-tries", trie, trie, "-o", out, "--weight", "dogs=2", saying=["dogs", "no such trie or source"])
    cli.fails(2, "no-such-command", saying=["no-such-command"])
    cli.fails(2, "build-trie", corpus, "-o", out, "--workers", 10**9, saying=["--workers", "1024"])
    assert not out.exists()


def test_inspect_shows_sources_depths_branches_and_integrity(cli, trie):
    result = cli("inspect-trie", trie, "--verify")
    assert result.code == 0
    for text in ("corpus.jsonl", "Nodes by depth", "Most frequent branches", "every checksum and invariant holds"):
        assert text in result.out


def test_query_draws_the_draft_tree_with_what_the_corpus_says_for_it(cli, trie):
    drawn = cli("inspect-trie", trie, "--query", "the cat sat on the").out.partition("Draft tree of 15 tokens\n")[2]
    first, *lines = drawn.splitlines()
    assert first == "'the cat sat on the'  last 5 tokens seen 2 times"
    for text in ("' mat", "' log"):
        (line,) = (line for line in lines if text in line and "match 5" in line)
        assert line.endswith("match 5  trie:cats  1 of 2 times")
        assert "%" in line
    value = cli("inspect-trie", trie, "--query", "the cat sat on the", "--json").json["query"]
    assert value["count"] == 2
    assert sorted(c["share"] for c in value["continuations"]) == [0.5, 0.5]
    nodes = value["draft"]
    assert len(nodes) == 15
    matched = [node for node in nodes if node["match_length"] == 5 and node["parent"] == -1]
    assert {node["text"] for node in matched} == {" mat", " log"}
    assert [(n["count"], n["match_count"], n["source"]) for n in matched] == [(1, 2, "trie:cats")] * 2
    for place, node in enumerate(nodes):
        assert -1 <= node["parent"] < place
        assert node["probability"] <= (nodes[node["parent"]]["probability"] if node["parent"] >= 0 else 1)


@pytest.mark.parametrize("length", [2, 5, 40])
def test_decoding_length_is_the_size_of_the_tree_of_a_query(cli, trie, length):
    asked = ("inspect-trie", trie, "--query", "the cat", "--decoding-length", length)
    assert len(cli(*asked, "--json").json["query"]["draft"]) == length - 1
    assert f"Draft tree of {length - 1} tokens" in cli(*asked).out


def test_query_of_a_trie_of_ids_is_ids(cli, ids_trie):
    out = cli("inspect-trie", ids_trie, "--query", "9 1 2").out
    assert "9 1 2  last 2 tokens seen 3 times" in out
    assert re.search(r"^  [├└] 3 .*  match 2  trie:ids  2 of 3 times$", out, re.MULTILINE)
    value = cli("inspect-trie", ids_trie, "--query", "9 1 2", "--json").json["query"]
    assert [(c["token_id"], c["count"], c["text"]) for c in value["continuations"]] == [(3, 2, None), (4, 1, None)]
    assert (3, None, 2) in [(node["token_id"], node["text"], node["count"]) for node in value["draft"]]


def test_query_that_the_corpus_never_saw_says_so(cli, ids_trie, tokenizer_folder, trie):
    assert "not in the corpus" in cli("inspect-trie", trie, "--query", "Z").out
    for query in ("x", "1 10", "-1"):
        cli.fails(2, "inspect-trie", ids_trie, "--query", query, saying=["built from ids", "ids below 10", "--tokenizer"])
    for empty in ((ids_trie, "--query", " "), (trie, "--query", "")):
        cli.fails(2, "inspect-trie", *empty, saying=["--query: is empty"])
    cli.fails(2, "inspect-trie", trie, "--decoding-length", 8, saying=["--decoding-length", "--query TEXT"])


def test_damaged_trie_is_refused_with_what_and_what_to_do(cli, trie, tmp_path):
    whole = trie.read_bytes()
    bad = tmp_path / "bad.trie"
    bad.write_bytes(whole[:-10])
    cli.fails(1, "inspect-trie", bad, saying=[f"header states {len(whole)} bytes, file has {len(whole) - 10}", "rebuild"])
    bad.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    cli.fails(1, "inspect-trie", bad, "--verify", saying=["damaged"])
    cli.fails(1, "inspect-trie", tmp_path / "no.trie", saying=["no.trie", "cannot be read"])


def test_prune_says_before_and_after_and_what_it_costs(cli, ids_trie, tmp_path):
    out = tmp_path / "small.trie"
    value = cli("prune-trie", ids_trie, "-o", out, "--max-tokens", 6, "--coverage", tmp_path / "ids.jsonl", "--json").json
    assert value["before"]["tokens"] == 14
    assert value["after"]["tokens"] <= 6
    assert value["after"]["edl"] < value["before"]["edl"]
    assert "before" in cli("prune-trie", ids_trie, "-o", out, "--min-count", 2).out
    Trie(out).verify()


def test_merge_adds_up_and_keeps_weights(cli, trie, corpus, tokenizer_folder):
    other, out = corpus.parent / "other.trie", corpus.parent / "all.trie"
    cli("build-trie", corpus, "-o", other, "--tokenizer", tokenizer_folder, "--source", "more")
    value = cli("merge-tries", trie, other, "-o", out, "--weight", "more=2.5", "--json").json
    assert value["tokens"] == 2 * Trie(trie).header.tokens
    assert [(s["name"], s["weight"]) for s in value["sources"]] == [("corpus.jsonl", 1.0), ("more", 2.5)]
    assert cli("merge-tries", trie, other, "-o", out).code == 0


def test_append_adds_a_segment_with_the_tokenizer_of_the_trie_and_merge_joins_them(cli, trie, corpus):
    more = write_jsonl(corpus.parent / "more.jsonl", [{"text": "the cat sat on the hat"}])
    before = Trie(trie).header.tokens
    value = cli("build-trie", more, "--append", trie, "--json").json
    assert value["segments"] == 2
    assert value["tokens"] == before + value["added_tokens"]
    assert [s["name"] for s in value["sources"]] == ["corpus.jsonl", "more.jsonl"]
    query = ("inspect-trie", trie, "--query", "the cat sat on the", "--json")
    appended = cli(*query).json
    assert appended["query"]["count"] == 3
    assert len(appended["segments"]) == 2
    assert "2 of" in cli("inspect-trie", trie, "--verify").out
    assert cli("merge-tries", trie, "-o", trie).code == 0
    joined = cli(*query).json
    assert len(joined["segments"]) == 1
    for value in (appended, joined):
        assert len(value["query"].pop("draft")) == 15  # may differ: matches that break off are kept for each segment
    for key in ("query", "depths", "top", "sources"):
        assert joined[key] == appended[key]


def test_plot_draws_edl_by_size_and_json_holds_it(cli, tmp_path):
    rows = [{"ids": [i % 4, 5, 6, 7, i % 3, 8, 9, i % 5]} for i in range(80)]
    corpus, out = write_jsonl(tmp_path / "c.jsonl", rows), tmp_path / "c.trie"
    assert cli("build-trie", corpus, "-o", out, "--vocab-size", 10).code == 0
    drawn = ("inspect-trie", out, "--coverage", corpus, "--plot", tmp_path / "size.png")
    curve = cli(*drawn, "--json").json["capacity"]
    assert (tmp_path / "size.png").read_bytes().startswith(b"\x89PNG")
    assert curve[0]["tokens"] == 0
    assert curve[-1]["tokens"] == Trie(out).header.tokens
    assert [c["tokens"] for c in curve] == sorted(c["tokens"] for c in curve)
    assert curve[-1]["edl"] > curve[0]["edl"]
    assert "no trie" in cli(*drawn).out


def test_commands_import_no_torch_and_on_ids_no_transformers(trie, ids_trie, tokenizer_folder):
    script = f"""
import sys
from lookahead_cli.app import run
for line in (
    "build-trie ids.jsonl -o a.trie --vocab-size 10", "build-trie ids.jsonl --append a.trie",
    "inspect-trie a.trie --verify --coverage ids.jsonl", "inspect-trie a.trie --query 5",
    "prune-trie a.trie -o b.trie --min-count 2 --coverage ids.jsonl", "merge-tries a.trie b.trie -o c.trie",
):
    assert run(line.split()) == 0
    assert not {{"torch", "transformers"}} & set(sys.modules), line
for line in (
    "build-trie corpus.jsonl -o t.trie --tokenizer {tokenizer_folder}", "build-trie corpus.jsonl --append t.trie",
    "inspect-trie t.trie --query cat", "prune-trie t.trie -o b.trie --min-count 2 --coverage corpus.jsonl --overwrite",
):
    assert run(line.split()) == 0
    assert "torch" not in sys.modules, line
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=trie.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_config_file_holds_options_and_a_flag_wins(cli, corpus, tokenizer_folder, tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text(f"tokenizer: {tokenizer_folder}\nsource: from-file\nmin-count: 1\n")
    out = tmp_path / "a.trie"
    assert cli("build-trie", corpus, "-o", out, "--config", config, "--json").json["sources"][0]["name"] == "from-file"
    value = cli("build-trie", corpus, "-o", out, "--config", config, "--source", "flag", "--json").json
    assert value["sources"][0]["name"] == "flag"
    config.write_text("colour: red\n")
    cli.fails(2, "build-trie", corpus, "-o", out, "--config", config, saying=["job.yaml", "'colour'", "known"])
    config.write_text("a: [")
    cli.fails(2, "build-trie", corpus, "-o", out, "--config", config, saying=["job.yaml", "not YAML"])
    cli.fails(2, "build-trie", corpus, "-o", out, "--config", tmp_path / "no.yaml", saying=["no.yaml", "cannot be read"])


def test_memory_that_is_not_there_is_one_error_line(cli, corpus, tmp_path, monkeypatch):
    def without(*_, **__):
        raise MemoryError("Unable to allocate 678 GiB")

    monkeypatch.setattr("lookahead.trie.build.write_segment", without)
    job = ("build-trie", corpus, "-o", tmp_path / "a.trie", "--vocab-size", 9)
    cli.fails(1, *job, saying=["not enough memory (Unable to allocate 678 GiB)"])


def test_reader_that_leaves_early_is_no_error(ids_trie):
    with Program(COMMAND, "inspect-trie", ids_trie) as child:
        child.stdout.close()
        assert child.stderr.read() in ("", "Reading the trie ...\n")  # the latter where that takes long
        assert child.wait() == 0


# ---- documents
def test_documents_are_listed_searched_exported_and_taken_out_again(cli, trie, tmp_path, monkeypatch, tokenizer_folder):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    corpus, out, gone = tmp_path / "corpus.jsonl", tmp_path / "out.trie", tmp_path / "gone.jsonl"
    assert cli("build-trie", corpus, "-o", trie, "--tokenizer", tokenizer_folder).code == 0
    listed = cli("inspect-trie", trie, "--documents")
    assert "2 of 2 documents" in listed.out
    assert "the cat sat on the log" in listed.out
    found = cli("inspect-trie", trie, "--documents", "--query", "on the log", "--export", gone, "--json").json
    assert [(d["number"], d["source"]) for d in found["listed"]] == [(2, "corpus.jsonl")]
    assert (found["documents"], found["matching"]) == (2, 1)
    (row,) = map(json.loads, gone.read_text(encoding="utf-8").splitlines())
    assert row["text"].startswith("the cat sat on the log")
    for unwanted in (gone, write_jsonl(tmp_path / "same.jsonl", [{"text": "the cat sat on the log"}])):
        assert cli("prune-trie", trie, "-o", out, "--drop-documents", unwanted).code == 0
        write_jsonl(corpus, [{"text": "the cat sat on the mat"}])
        assert cli("build-trie", corpus, "-o", tmp_path / "rest.trie", "--tokenizer", tokenizer_folder).code == 0
        assert out.read_bytes() == (tmp_path / "rest.trie").read_bytes()


def test_documents_of_a_trie_of_ids_are_ids(cli, ids_trie, tmp_path):
    gone = tmp_path / "gone.jsonl"
    assert "2 of 3 documents contain '1  2'" in cli("inspect-trie", ids_trie, "--documents", "--query", "1  2").out
    assert "0 of 3 documents" in cli("inspect-trie", ids_trie, "--documents", "--query", "2 1").out
    assert cli("inspect-trie", ids_trie, "--documents", "--query", "3 9", "--export", gone).code == 0
    assert json.loads(gone.read_text(encoding="utf-8")) == {"number": 3, "source": "ids.jsonl", "ids": [1, 2, 3, 9]}
    value = cli("prune-trie", ids_trie, "-o", tmp_path / "out.trie", "--drop-documents", gone, "--json").json
    assert (value["before"]["documents"], value["after"]["documents"]) == (3, 2)


def test_documents_that_cannot_be_dropped_are_told(cli, ids_trie, tmp_path):
    drop = ("prune-trie", ids_trie, "-o", tmp_path / "out.trie", "--drop-documents")
    cli.fails(1, *drop, write_jsonl(tmp_path / "a.jsonl", [{"ids": [1, 2]}]), saying=["1 of the 1 documents", "--documents"])
    cli.fails(1, *drop, write_jsonl(tmp_path / "b.jsonl", [{"ids": [5, 6, 7, 8]}, {"ids": [11]}]), saying=["b.jsonl:2", "11"])
    cli.fails(1, *drop, tmp_path / "no.jsonl", saying=["no.jsonl: no such file"])
    kept = write_jsonl(tmp_path / "c.jsonl", [{"ids": [9]}, {"ids": [5, 6, 7, 8]}])
    result = cli(*drop, kept)
    assert result.code == 0
    assert "1 of the 2 documents to be dropped are not in this trie; the first of them is document 1" in result.err


def test_limits_may_be_percentages(cli, ids_trie, tmp_path):
    out = tmp_path / "out.trie"
    value = cli("prune-trie", ids_trie, "-o", out, "--max-tokens", "60%", "--json").json
    assert 0 < value["after"]["tokens"] <= 8
    rows = write_jsonl(tmp_path / "many.jsonl", [{"ids": [k % 10, (k // 10) % 10] * 9} for k in range(100)])
    assert cli("build-trie", rows, "-o", tmp_path / "many.trie", "--vocab-size", 10).code == 0
    value = cli("prune-trie", tmp_path / "many.trie", "-o", out, "--max-bytes", "50%", "--json").json
    assert 0.4 < value["after"]["bytes"] / value["before"]["bytes"] <= 0.5
    for option, text in itertools.product(("--max-tokens", "--max-bytes"), ("0%", "101%", "%", "half%", "nan%", "-5%")):
        cli.fails(2, "prune-trie", ids_trie, "-o", out, option, text, saying=[repr(text), "percentage"])
    cli.fails(2, "prune-trie", ids_trie, "-o", out, "--max-tokens", "many", saying=["--max-tokens many", "50%"])


def test_query_prints_the_tree_before_anything_else(cli, trie):
    out = cli("inspect-trie", trie, "--query", "the cat").out
    assert out.startswith("Draft tree of")
    assert re.search(r"^trie .*cats.trie", out, re.MULTILINE)
    assert "Nodes by depth" not in out
    assert "Nodes by depth" in cli("inspect-trie", trie, "--query", "the cat", "--top", 3).out


def test_most_frequent_branches_leave_out_what_documents_begin_with(cli, tmp_path):
    rows = [{"prompt_ids": [1, 2, 3, 4], "response_ids": [k, 5, 6, 7, 8]} for k in range(10, 20)]
    corpus = write_jsonl(tmp_path / "answers.jsonl", rows)
    assert cli("build-trie", corpus, "-o", tmp_path / "a.trie", "--vocab-size", 20).code == 0
    top = cli("inspect-trie", tmp_path / "a.trie", "--json", "--top", 1).json["top"]
    assert [(each["token_ids"], each["count"]) for each in top] == [([5, 6, 7, 8], 10)]
