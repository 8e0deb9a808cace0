"""What a command may write: never what it reads, never a file of another kind without being told, and only where it can."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lookahead.budget.profile import SHIPPED, why_not_cached
from lookahead.errors import LookaheadError, UsageError
from lookahead.files import outputs
from lookahead.files.atomic import followed, replacing
from lookahead.files.outputs import Input, Output, check_outputs
from lookahead.job.progress import JobTotals, metrics_text
from tests.support.cli import write_jsonl
from tests.support.jobs import MODEL
from tests.support.loading import refuse_to_load
from tests.support.tries import build_ids


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file below a folder, and where every link in it leads."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A copy of the demo model, which a test that fails may destroy."""
    return shutil.copytree(MODEL, tmp_path_factory.mktemp("copy") / "model")


@pytest.fixture
def here(tmp_path, model):
    """A folder with one file of everything that commands read; nothing in it may change."""
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    write_jsonl(tmp_path / "ids.jsonl", [{"ids": [1, 2, 3]}])
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt_ids": [1, 2], "response_ids": [3, 4]}])
    build_ids(tmp_path / "a.trie", [[1, 2, 3, 4]])
    (tmp_path / "job.yaml").write_text("max-new-tokens: 4\n")
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "answer.lark").write_text('start: "a"\n')
    shutil.copytree(model, tmp_path / "model", copy_function=os.link)
    os.link(tmp_path / "prompts.jsonl", tmp_path / "hard.jsonl")
    (tmp_path / "soft.jsonl").symlink_to("prompts.jsonl")
    (tmp_path / "way").symlink_to(".")
    before = contents(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path
    assert contents(tmp_path) == before


GENERATE = "generate --model model --input prompts.jsonl --overwrite "
IDS = "--vocab-size 10"


@pytest.mark.parametrize(
    ("line", "option", "reader"),
    [
        (f"build-trie ids.jsonl -o ids.jsonl {IDS}", "-o ids.jsonl", "CORPUS"),
        (f"build-trie *.jsonl -o ids.jsonl {IDS} --overwrite", "-o ids.jsonl", "CORPUS"),
        ("build-trie ids.jsonl -o model/tokenizer.json --tokenizer model --overwrite", "-o", "--tokenizer"),
        ("prune-trie a.trie -o way/a.trie --min-count 2", "-o way/a.trie", "TRIE"),
        ("prune-trie a.trie -o ids.jsonl --min-count 2 --coverage ids.jsonl --overwrite", "-o ids.jsonl", "--coverage"),
        ("inspect-trie a.trie --coverage ids.jsonl --plot ids.jsonl --overwrite", "--plot ids.jsonl", "--coverage"),
        ("calibrate --model model -o model/config.json --overwrite", "-o model/config.json", "--model"),
        ("bench --replay pairs.jsonl --save pairs.jsonl --overwrite", "--save pairs.jsonl", "--replay"),
        ("replay pairs.jsonl --prompts prompts.jsonl --save soft.jsonl --overwrite", "--save soft.jsonl", "--prompts"),
        ("bench --replay pairs.jsonl --trie pairs=a.trie --save a.trie --overwrite", "--save a.trie", "--trie"),
        ("bench --model model --input prompts.jsonl --plot model/model.safetensors --overwrite", "--plot", "--model"),
        (GENERATE + "-o prompts.jsonl", "-o prompts.jsonl", "--input"),
        (GENERATE + "-o soft.jsonl", "-o soft.jsonl", "--input (prompts.jsonl)"),
        (GENERATE + "-o way/prompts.jsonl", "-o way/prompts.jsonl", "--input (prompts.jsonl)"),
        (GENERATE + "-o out.jsonl --input pairs*.jsonl --metrics pairs.jsonl", "--metrics pairs.jsonl", "--input"),
        (GENERATE + "-o out.jsonl --save-trie prompts.jsonl", "--save-trie prompts.jsonl", "--input"),
        (GENERATE + "-o a.trie --trie a.trie", "-o a.trie", "--trie"),
        (GENERATE + "-o job.yaml --config job.yaml", "-o job.yaml", "--config"),
        (GENERATE + "--metrics schema.json --json-schema schema.json", "--metrics schema.json", "--json-schema"),
        (GENERATE + "--save-trie model/model.safetensors", "--save-trie model/model.safetensors", "--model"),
    ],
)  # fmt: skip
def test_output_that_is_an_input_is_refused_by_whatever_path_it_is_named(cli, here, line, option, reader):
    cli.fails(2, *line.split(), saying=[option, f"is read by {reader}", "Choose another file"])


@pytest.mark.parametrize(
    ("line", "saying"),
    [
        (f"build-trie ids.jsonl -o job.yaml {IDS}", "-o job.yaml: exists and is not a trie file"),
        ("merge-tries a.trie -o prompts.jsonl", "-o prompts.jsonl: exists and is not a trie file"),
        ("inspect-trie a.trie --coverage ids.jsonl --plot job.yaml", "--plot job.yaml: exists and is not a PNG, PDF or SVG"),
        ("calibrate --model model -o schema.json", "-o schema.json: exists and is not a cost profile"),
        ("bench --replay pairs.jsonl --save schema.json", "--save schema.json: exists and is not the JSON of a bench"),
        ("bench --model model --input prompts.jsonl --report job.yaml", "--report job.yaml: exists and is not a page"),
        ("generate --model model --input prompts.jsonl -o o.jsonl --metrics job.yaml", "--metrics job.yaml: exists and is not"),
    ],
)
def test_file_of_another_kind_is_replaced_only_if_told(cli, here, line, saying):
    cli.fails(2, *line.split(), saying=[saying, "or give --overwrite to replace it"])


@pytest.mark.parametrize(
    "line",
    [
        *(
            GENERATE + f"-o new.{ending}"
            for ending in ("csv", "CSV", "tsv.gz", "jsonl.bz2", "parquet.gz", "xlsx", "html", "trie")
        ),
        GENERATE + "-o o.jsonl --save-trie new.jsonl.gz",
        GENERATE + "-o o.jsonl --metrics new.json",
        f"build-trie ids.jsonl -o new.json {IDS}",
        "inspect-trie a.trie --coverage ids.jsonl --plot new.jpg",
        "calibrate --model model -o new.json.gz",
        "replay pairs.jsonl --save new.csv",
        "bench --model model --input prompts.jsonl --report new.pdf",
    ],
)
def test_ending_that_names_another_kind_of_file_is_refused(cli, here, line):
    cli.fails(2, *line.split(), saying=["new.", ": its ending names another kind of file than is written. Use "])


@pytest.mark.parametrize("name", ["o.jsonl.journal", "o.jsonl.manifest.json", "o.jsonl.learned.jsonl"])
def test_files_that_are_kept_beside_an_output_are_outputs(cli, tmp_path, name):
    prompts = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    job = ("generate", "--model", MODEL, "--input", prompts, "-o", tmp_path / "o.jsonl")
    (tmp_path / name).write_text('{"notes": "of somebody"}\n')
    before = contents(tmp_path)
    cli.fails(2, *job, saying=[f"{name}: exists and is not", "--overwrite"])
    cli.fails(2, *job, "--metrics", tmp_path / name, "--overwrite", saying=["-o and --metrics name the same file"])
    assert contents(tmp_path) == before


def test_file_of_another_kind_is_replaced_with_overwrite(cli, tmp_path):
    ids, out = write_jsonl(tmp_path / "ids.jsonl", [{"ids": [1, 2]}]), tmp_path / "notes.txt"
    out.write_text("notes")
    assert cli("build-trie", ids, "-o", out, "--vocab-size", 10, "--overwrite", "--json").code == 0
    assert outputs.TRIE.matches(out)
    assert cli("build-trie", ids, "-o", out, "--vocab-size", 10, "--json").code == 0  # a trie, as ever
    ids.write_text("")
    assert cli("build-trie", ids, "-o", ids, "--vocab-size", 10, "--json").code == 2


def test_own_files_are_of_their_kinds_and_empty_ones_of_any(tmp_path):
    (tmp_path / "m.prom").write_text(metrics_text(JobTotals(), {}))
    assert outputs.METRICS.matches(tmp_path / "m.prom")
    assert all(outputs.PROFILE.matches(path) for path in SHIPPED.glob("*.json"))
    assert not any(outputs.BENCH.matches(path) for path in SHIPPED.glob("*.json"))
    kinds = (outputs.TRIE, outputs.METRICS, outputs.PICTURE, outputs.PAGE, outputs.PROFILE, outputs.BENCH, outputs.JOURNAL)
    for kind in kinds:
        empty = tmp_path / f"empty{kind.endings[0] if kind.endings else ''}"
        empty.touch()
        check_outputs([Output("-o", empty, kind)], [])
        assert not kind.matches(empty)


def test_pictures_of_each_format_are_pictures(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    for ending in ("png", "svg", "pdf"):
        pyplot.figure().savefig(tmp_path / f"x.{ending}")
        assert outputs.PICTURE.matches(tmp_path / f"x.{ending}")
    (tmp_path / "page.html").write_text("<!doctype html><title>mine</title><svg></svg>")
    assert not outputs.PICTURE.matches(tmp_path / "page.html")


def test_two_outputs_are_two_files(tmp_path):
    (tmp_path / "link").symlink_to("new")
    pairs = [("new", "new"), ("new", "link"), ("new", f"../{tmp_path.name}/new")]
    for a, b in pairs:
        with pytest.raises(UsageError, match="--save and --plot name the same file"):
            check_outputs([Output("--save", tmp_path / a), Output("--plot", tmp_path / b)], [])
    (tmp_path / "new").touch()
    os.link(tmp_path / "new", tmp_path / "hard")
    with pytest.raises(UsageError, match="the same file"):
        check_outputs([Output("--save", tmp_path / "new"), Output("--plot", tmp_path / "hard")], [])
    check_outputs([Output("--save", "/dev/null"), Output("--plot", "/dev/null")], [Input("--input", ["-", None, "no such"])])


# ---- tried before the work


UNWRITABLE = Path("/proc/self/task")  # a folder that takes no new file, from root neither


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    ("line", "option"),
    [
        (f"build-trie ids.jsonl {IDS} -o", "-o"),
        ("prune-trie a.trie --min-count 2 -o", "-o"),
        ("inspect-trie a.trie --coverage ids.jsonl --plot", "--plot"),
        ("bench --replay pairs.jsonl --save", "--save"),
        ("bench --model model --input prompts.jsonl --report", "--report"),
        ("calibrate --model model -o", "-o"),
        ("generate --model model --input prompts.jsonl -o", "-o"),
        ("generate --model model --input prompts.jsonl -o o.jsonl --metrics", "--metrics"),
        ("generate --model model --input prompts.jsonl -o o.jsonl --save-trie", "--save-trie"),
    ],
)
def test_output_that_cannot_be_written_is_named_by_its_option_before_any_work(cli, here, monkeypatch, line, option):
    refuse_to_load(monkeypatch)
    cli.fails(1, *line.split(), UNWRITABLE / "x", saying=[f"{option} {UNWRITABLE / 'x'}: cannot write here"])
    cli.fails(1, *line.split(), here / "no" / "x", saying=[f"{option} {here / 'no' / 'x'}: its folder does not exist"])
    cli.fails(1, *line.split(), here / "model", saying=[f"{option} {here / 'model'}: is a folder"])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_calibrate_needs_a_place_for_the_profile_before_it_measures(cli, tmp_path, monkeypatch):
    assert why_not_cached() == ""
    monkeypatch.setenv("LOOKAHEAD_CACHE", "/proc/self/task/x")
    cli.fails(1, "calibrate", "--model", MODEL, saying=["LOOKAHEAD_CACHE", "Or name a file with -o"])
    result = cli("calibrate", "--model", tmp_path / "none", "-o", tmp_path / "p.json")  # ends at the model that is missing
    assert "The profile goes to" in result.err.splitlines()[0]
    assert "LOOKAHEAD_CACHE" in result.err.splitlines()[0]


def test_demo_keeps_files_that_are_not_its_own(cli, tmp_path):
    for name in ("prompts.jsonl", "answers.trie"):
        (tmp_path / name).write_text("mine\n")
        cli.fails(2, "demo", "--keep", tmp_path, saying=[f"{name}: exists and is not"])
        assert contents(tmp_path) == {str(tmp_path / name): b"mine\n"}
        (tmp_path / name).unlink()


def is_root_with(*tools: str) -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, tools))


@pytest.mark.skipif(not is_root_with("mount", "umount"), reason="needs root")
def test_full_disk_and_file_mounted_by_itself_are_found_by_trying(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        check_outputs([Output("-o", disk / "x")], [])
        assert not list(disk.iterdir())
        (disk / "own").write_bytes(b"own")
        subprocess.run(["mount", "--bind", disk / "own", disk / "own"], check=True)
        with pytest.raises(LookaheadError, match=r"--plot .*own: cannot be replaced .*mounted by itself"):
            check_outputs([Output("--plot", disk / "own")], [])
        subprocess.run(["umount", disk / "own"], check=True)
        with pytest.raises(OSError, match="No space left"):
            (disk / "filler").write_bytes(bytes(1 << 17))
        with pytest.raises(LookaheadError, match=r"--save .*x: .*No space left on device"):
            check_outputs([Output("--save", disk / "x")], [])
        assert {path.name for path in disk.iterdir()} == {"own", "filler"}
        assert (disk / "own").read_bytes() == b"own"
    finally:
        subprocess.run(["umount", disk], check=True)


# ---- symbolic links
def test_link_is_followed_and_stays(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "target").write_text("old")
    (tmp_path / "link").symlink_to("folder/target")
    (tmp_path / "link to link").symlink_to(tmp_path / "link")
    (tmp_path / "dangling").symlink_to("folder/new")

    def write(name):
        with replacing(tmp_path / name, "w") as file:
            file.write(f"by {name}")
            assert next((tmp_path / "folder").glob(".*.tmp"))  # where it can be renamed to the target

    for name, target in (("link", "target"), ("link to link", "target"), ("dangling", "new")):
        write(name)
        assert (tmp_path / name).is_symlink()
        assert not (tmp_path / "folder" / target).is_symlink()
        assert (tmp_path / "folder" / target).read_text() == f"by {name}"
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["new", "target"]


def test_links_in_a_circle_and_into_missing_folders_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "lost").symlink_to("nowhere/file")
    with pytest.raises(LookaheadError, match="in a circle"):
        check_outputs([Output("-o", tmp_path / "a")], [])
    with pytest.raises(LookaheadError, match=r"-o .*lost: its folder does not exist"):
        check_outputs([Output("-o", tmp_path / "lost")], [])


def test_link_to_a_pipe_is_that_pipe():
    read, write = os.pipe()
    try:
        assert followed(f"/dev/fd/{write}") == Path(f"/dev/fd/{write}")
    finally:
        os.close(read)
        os.close(write)
