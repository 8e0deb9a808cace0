"""Rooms import downwards only, and no file imports itself by way of others. Imports for types and inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Lowest first; a room imports those before it. Files of lookahead/ itself that are not named here are the ground.
ROOMS = (
    *("ground", "files", "tokenizer", "corpus", "native", "trie", "budget", "draft", "step", "forward", "decode"),
    *("models", "backends", "quantize", "engines", "cluster", "corpus_build", "job", "bench", "api", "hf_call", "hf"),
    *("harness", "lookahead_cli"),
)
# Who may import backends.cpu or .cuda; others ask for them by name, see forward.backend
OF_BACKENDS = {"cpu": ("backends.cpu", "quantize", "job.compile_groups"), "cuda": ("backends.cuda",)}
MOST_LINES, MOST_PARAMETERS = 80, 12  # of a function
# Functions with more parameters: kernels, whose arrays have no common type; a bench of many settings
OWED_PARAMETERS = {
    *("device_products._product", "triton_attention._add_text"),
    *("triton_attention._text", "triton_attention._path"),
}
DRAFT_ALONE = {f"engines.{file}" for file in ("requests", "batch_rows", "settings")}


def name_of(path: Path) -> str:
    """lookahead/trie/file.py -> trie.file; lookahead/__init__.py -> ""."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return "" if name == "lookahead" else name.removeprefix("lookahead.")


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("lookahead*/**/*.py")}


def imports_of(name: str) -> set[str]:
    """Files of ours by name_of, modules of others in full."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    ours = set()
    for full in found:
        parts = full.split(".")[full.startswith("lookahead.") :]
        known = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in TREES]
        ours.add(known[0] if known else "" if full.split(".")[0] == "lookahead" else full)
    return ours


def room_of(name: str) -> str:
    first, *further = name.split(".")
    return first if further or first in ROOMS else "ground"


def offences_of(name: str) -> Iterator[str]:
    room, imports = room_of(name), imports_of(name)
    if "" in imports:
        yield f"{name} imports the package face: import the file that has the name"
    for each in imports & TREES.keys():
        if ROOMS.index(room_of(each)) > ROOMS.index(room):
            yield f"{name} imports {each}, which is above it"
        users = next((users for backend, users in OF_BACKENDS.items() if f"{each}.".startswith(f"backends.{backend}.")), ("",))
        if not name.startswith(users):
            yield f"{name} imports {each}, a backend that it should ask for by name"
    banned = set() if room == "lookahead_cli" else {"typer", "rich"}
    if room in ("ground", "files", "corpus", "native", "trie", "budget", "draft", "step"):
        banned |= {"torch"}
    if name in DRAFT_ALONE:  # they run inside engines of others
        banned |= {"torch", "transformers", "vllm"}
        yield from (f"{name} imports {each}" for each in imports if room_of(each) in ("forward", "decode", "models"))
    yield from (f"{name} imports {each}" for each in banned & {full.split(".")[0] for full in imports})


def test_files_import_only_rooms_below_them_and_no_package_that_their_room_does_without() -> None:
    assert [offence for name in sorted(TREES.keys() - {""}) for offence in offences_of(name)] == []


def test_kernels_of_the_cpu_are_compiled_without_torch() -> None:
    """Where a wheel is built there is none (hatch_build.py)."""
    reached = {
        name
        for name in TREES
        if name.startswith(("forward.", "backends.cpu.")) and name.endswith(("_kernel", "_code", "_math", "_meta"))
    }
    assert len(reached) > 8
    new = reached
    while new := {each for name in new for each in imports_of(name) & TREES.keys()} - reached:
        reached |= new
    packages = {each.split(".")[0] for name in reached - {"forward.processor"} for each in imports_of(name)}
    assert not packages & {"torch", "transformers"}


def test_no_file_imports_itself_by_way_of_others() -> None:
    reached = {name: imports_of(name) & TREES.keys() for name in TREES}
    for middle in TREES:
        for name in TREES:
            if middle in reached[name]:
                reached[name] = reached[name] | reached[middle]
    assert [name for name in TREES if name in reached[name]] == []


def test_functions_are_short_and_take_few_parameters() -> None:
    long, wide = set(), set()
    for name, tree in TREES.items():
        for each in ast.walk(tree):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                known = f"{name.rpartition('.')[2]}.{each.name}"
                if each.end_lineno is not None and each.end_lineno - each.lineno >= MOST_LINES:
                    long.add(known)
                if len([*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]) > MOST_PARAMETERS:
                    wide.add(known)
    assert (long, wide) == (set(), OWED_PARAMETERS)
