"""What a job says of itself: manifest, progress, metrics; and its options in a file."""

import json
import re
from types import SimpleNamespace

import pytest
import yaml

from lookahead import JobSpec
from lookahead.budget.speedup import Speedup
from lookahead.errors import UsageError
from lookahead.job.progress import JobProgress, JobTotals, labels_of, metrics_text
from lookahead_cli.job_schema import SCHEMA, job_schema
from lookahead_cli.progress import line
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL, PROMPTS, questions, rows_of


def test_manifest_says_what_the_job_was_run_with(cli, tmp_path):
    corpus, source = write_jsonl(tmp_path / "c.jsonl", [{"text": "the cat"}]), write_jsonl(tmp_path / "in.jsonl", questions(2))
    cli("build-trie", corpus, "-o", tmp_path / "c.trie", "--tokenizer", MODEL)
    out = tmp_path / "out.jsonl"
    cli("generate", "--model", MODEL, "--input", source, "-o", out, "--trie", tmp_path / "c.trie", "--max-new-tokens", 4)
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["state"] == "complete"
    assert manifest["answering"]["max_new_tokens"] == 4
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= manifest["model_files"].keys()
    assert manifest["inputs"] == [{"path": str(source), "bytes": source.stat().st_size, "modified": pytest.approx(0, abs=1e12)}]
    (run,) = manifest["runs"]
    assert run["tries"][0]["path"] == str(tmp_path / "c.trie")
    assert len(run["tries"][0]["content_hash"]) > 10
    assert {"lookahead", "torch", "transformers"} <= run["versions"].keys()
    assert run["began"] <= run["ended"]
    assert manifest["counts"]["tokens"] == sum(row["completion_tokens"] for row in rows_of(out))


def test_printed_config_runs_the_same_job_again(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    job = ("--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 4)
    job += ("--stop", ".", "--stop", "x")
    config = cli("generate", *job, "--print-config", "--no-learn")
    assert config.code == 0
    assert not (tmp_path / "out.jsonl").exists()
    values = yaml.safe_load(config.out)
    assert (values["max-new-tokens"], values["stop"], values["learn"], values["trie"]) == (4, [".", "x"], False, None)
    assert values.keys() == job_schema()["properties"].keys()
    (tmp_path / "job.yaml").write_text(config.out)
    assert cli("generate", "--config", tmp_path / "job.yaml", "--print-config").out == config.out
    assert cli("generate", "--config", tmp_path / "job.yaml").code == 0
    assert len(rows_of(tmp_path / "out.jsonl")) == 2


def test_texts_in_yaml_stay_as_they_are_written(cli, tmp_path):
    written = ["yes", "no", "on", "1.50", "012", "1_000", "0x1F", "1e3", "2001-01-01", "1:30", ".inf", "true"]
    config = tmp_path / "job.yaml"
    stop = f"stop: [{', '.join(written)}, 'null', \"~\"]"
    config.write_text(f"model: {MODEL}\n{stop}\nsystem: no\nchat: true\ntop-k:\nseed: 012\n")
    values = yaml.safe_load(cli("generate", "--config", config, "--print-config").out)
    assert values["stop"] == [*written, "null", "~"]
    assert (values["system"], values["chat"], values["top-k"], values["seed"]) == ("no", True, None, 12)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stop: [a, ~]", "job.yaml:2: stop holds ~, which is not text: put text in quotes"),
        ("stop: [a, ]\nstop: b", "job.yaml:3: stop stands here a second time"),
        ("stop: [[a]]", "job.yaml:2: stop holds a sequence"),
        ("system: {a: b}", "job.yaml:2: system holds a mapping"),
        ("system: !!python/name:os.system x", "job.yaml:2: system holds x"),
        ("stop: &a [*a]", "job.yaml:2: stop holds a sequence"),
        ("stop: " + "[" * 10_000, "job.yaml: not YAML"),
        ("seed: 1.5", "Invalid value for '--seed'"),
        ("chat: maybe", "Invalid value for '--chat'"),
    ],
)
def test_what_is_no_value_in_yaml_is_a_usage_error_that_names_the_option(cli, tmp_path, text, problem):
    (tmp_path / "job.yaml").write_text(f"model: {MODEL}\n{text}\n")
    cli.fails(2, "generate", "--config", tmp_path / "job.yaml", "--print-config", saying=[problem])


def test_number_beyond_63_bits_is_a_usage_error_that_names_the_option(cli):
    cli.fails(2, "build-trie", "x", "-o", "y.trie", "--min-count", 10**25, saying=["--min-count"])
    cli.fails(2, "prune-trie", "x", "-o", "y.trie", "--max-tokens", 10**25, saying=["--max-tokens"])
    many = "1" * 5000
    for option, value in (("limit", 10**25), ("seed", -(10**25)), ("bad-words-ids", many), ("logit-bias", f"{many}=1")):
        cli.fails(2, "generate", "--model", "m", "--input", "x", f"--{option}", value, saying=[f"--{option}"])
    for wrong in ({"limit": 10**25}, {"temperature": 10**400}, {"stop_token_ids": [10**25]}):
        with pytest.raises(UsageError, match="below 2"):
            JobSpec.of(model="m", input="x", **wrong)


def test_shipped_schema_is_that_of_the_options():
    """Else: python -m lookahead_cli.job_schema"""
    assert json.loads(SCHEMA.read_text("utf-8")) == job_schema()


def test_no_learn_drafts_nothing_from_earlier_answers(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": PROMPTS[0]}] * 2)
    job = ("generate", "--model", MODEL, "--input", source, "--batch-size", 1, "--strategy", "hierarchical")
    drafting = (*job, "--decoding-length", 16, "--max-new-tokens", 40)
    learning, not_learning = cli(*drafting), cli(*drafting, "--no-learn")
    by_source = [[json.loads(line)["accepted_by_source"] for line in r.out.splitlines()] for r in (learning, not_learning)]
    assert "session" in by_source[0][1]
    assert "session" not in by_source[1][1]
    cli.fails(2, *job, "--no-learn", "--session-tokens", 9, saying=["--no-learn", "--session-tokens"])


def test_metrics_file_is_in_the_prometheus_text_format(cli, tmp_path):
    source, file = write_jsonl(tmp_path / "in.jsonl", [*questions(3), {}]), tmp_path / "job.prom"
    out = ("-o", tmp_path / "out.jsonl", "--quiet", "--metrics", file)
    assert cli("generate", "--model", MODEL, "--input", source, *out, "--max-new-tokens", 90).code == 3
    lines = file.read_text().splitlines()
    values = {line.split("{")[0]: line.rsplit(" ", 1)[1] for line in lines if not line.startswith("#")}
    assert all(SAMPLE.fullmatch(line) for line in lines if not line.startswith("#"))
    assert float(values["lookahead_rows_total"]) == float(values["lookahead_rows_expected"]) == 4
    assert float(values["lookahead_rows_failed_total"]) == 1
    tokens = sum(row.get("completion_tokens", 0) for row in rows_of(tmp_path / "out.jsonl"))
    assert float(values["lookahead_completion_tokens_total"]) == tokens
    assert float(values["lookahead_loading_seconds"]) > 0
    assert float(values["lookahead_edl"]) >= 1
    helped = [line.split()[2] for line in lines if line.startswith("# HELP")]
    assert len(helped) == len(set(helped)) == sum(line.startswith("# TYPE") for line in lines)


def test_log_line_says_how_far_the_job_is_how_fast_and_how_long_it_takes(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lookahead.job.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    totals = JobTotals(rows=10, tokens=100, first_tokens=10, steps=45)
    progress = JobProgress(totals, lambda: 1000, lambda: Speedup(10.0, 15.2, 0.4))
    totals.merge(JobTotals(rows=10, errors=1, tokens=100, first_tokens=10, steps=45))
    now[0] = 10
    line(progress)
    stamp, _, said = " ".join(capsys.readouterr().err.split()).partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", stamp)
    assert said == "20 of 1,000 rows, 10 tokens/s, EDL 2.00, 1.5x plain, 1 failed, 16 min 20 s left"


def test_summary_of_a_job_is_a_table_on_stderr(cli, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", questions(2))
    job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / "out.jsonl", "--max-new-tokens", 20)
    job += ("--strategy", "hierarchical", "--decoding-length", 8)  # drafts whatever forwards cost
    result = cli(*job)
    assert result.out == ""
    names = [line.split()[0] for line in result.err.splitlines() if line.strip()]
    assert names == ["rows", "tokens", "time", "speed", "EDL", "accepted", "forward"]
    assert cli(*job, "--overwrite", "--quiet").err == ""


# ---- metrics
SAMPLE = re.compile(r'lookahead_[a-z_]+\{[a-z_]+="(?:[^"\\\n]|\\["\\n])*"(?:,[a-z_]+="(?:[^"\\\n]|\\["\\n])*")*\} -?[0-9.e+-]+')


def samples(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_two_jobs_in_one_folder_have_no_sample_in_common(cli, tmp_path):
    source, found = write_jsonl(tmp_path / "in.jsonl", questions(2)), []
    for name in ("a", "b"):
        job = ("generate", "--model", MODEL, "--input", source, "-o", tmp_path / f"{name}.jsonl", "--max-new-tokens", 4)
        ran = cli(*job, "--metrics", tmp_path / f"{name}.prom", "--metrics-label", 'team=a "b"\\c', "--quiet")
        assert ran.code == 0, ran.err
        text = (tmp_path / f"{name}.prom").read_text()
        for sample in samples(text):
            assert SAMPLE.fullmatch(sample)
            assert f'job="{tmp_path}/{name}.jsonl",model="{MODEL}",team="a \\"b\\"\\\\c"' in sample
        found.append({line.rsplit(" ", 1)[0] for line in samples(text)})
        found.append({line for line in text.splitlines() if line.startswith("# ") and "speedup" not in line})
    assert not found[0] & found[2]
    assert found[1] == found[3]  # help and types are the same in both


def test_labels_are_checked_and_those_given_win(cli, tmp_path):
    job = ("generate", "--model", MODEL, "--input", "in.jsonl", "-o", tmp_path / "out.jsonl")
    cli.fails(2, *job, "--metrics-label", "a=b", saying=["--metrics-label", "--metrics FILE"])
    assert labels_of(["job=nightly", "a=b=c"], "out", "m") == {"job": "nightly", "model": "m", "a": "b=c"}
    for pairs in (["a"], ["=b"], ["1a=b"], ["__a=b"], ["a-b=c"], ["ä=b"], ["a\n=b"], ["source=x"], ["a=1", "a=2"]):
        with pytest.raises(UsageError, match="--metrics-label"):
            labels_of(pairs, "out", "m")


def test_any_text_can_be_a_label():
    totals = JobTotals()
    totals.accepted_by_source['trie:"\udcff\\\n'] = 1
    text = metrics_text(totals, {}, {"job": 'a"\n\\', "model": "\udcff"})
    assert text.encode()
    assert all(SAMPLE.fullmatch(line) for line in samples(text))
    assert sum(r'source="trie:\"?\\\n"' in line for line in samples(text)) == 1
