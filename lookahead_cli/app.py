"""Entry point: one command per file; errors become one line on stderr and an exit code.

Exit codes: 0 ok, 1 data or run error, 2 usage error, 3 a complete job with failed rows, 130 interrupted (SIGINT), 143
terminated (SIGTERM). Heavy imports happen inside the command that needs them, so that `--help` is instant.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import io
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lookahead.errors import LookaheadError, first_line
from lookahead.printable import in_one_line
from lookahead.version import __version__
from lookahead_cli import (
    bench,
    build_trie,
    calibrate,
    demo,
    generate,
    inspect_trie,
    logs,
    merge_tries,
    prune_trie,
    quantize,
    replay,
    report,
)
from lookahead_cli.options import with_address
from lookahead_cli.render import abandon_stdout

app = typer.Typer(
    name="lookahead",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
LOOKS = 3_000  # the demo model is as fast with them; with 1,000 it was a tenth slower
for command in (build_trie, inspect_trie, prune_trie, merge_tries, generate, report, bench, replay, calibrate, quantize, demo):
    name = command.__name__.rpartition(".")[2].replace("_", "-")
    reads_files = name in ("build-trie", "inspect-trie", "prune-trie", "merge-tries", "replay", "report")
    about, example, lines = inspect.cleandoc(command.command.__doc__ or "").partition("Example: ")
    app.command(name, no_args_is_help=reads_files, help=about.strip(), epilog=example + lines)(command.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lookahead {__version__}")
        raise typer.Exit()


@app.callback()
def lookahead(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Faster offline LLM generation without a draft model and without changing an output token.

    Drafts the next tokens from tries of existing text, verifies all draft tokens in one forward of the model, and keeps those
    that the model itself would have generated.

    Start here: [bold]lookahead demo[/bold]
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. Everything a user can cause ends in one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding does not know is escaped there, as it is on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    typed, began = list(sys.argv[1:] if arguments is None else arguments), time.monotonic()
    command_line = shlex.join(["lookahead", *typed])
    with logs.lines(command_line):
        code = _run(typed, command_line)
        logs.ended(code, time.monotonic() - began)
    return code


def _run(typed: Sequence[str], command_line: str) -> int:
    try:
        result = program()(args=with_address(typed), prog_name="lookahead", standalone_mode=False, obj=command_line)
    except LookaheadError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        logs.note("interrupted", logging.WARNING)
        return 130
    except BrokenPipeError:
        abandon_stdout()
        return 0
    except OSError as error:  # a disk or a file that fails that nothing else reports
        about = f"{error.filename}: " if error.filename is not None else ""
        return _failed(about + " ".join(str(error.strerror or error).split()))
    except MemoryError as error:
        return _failed(f"there is not enough memory ({first_line(error)}).")
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        message = " ".join(error.format_message().split())  # none where the help has been shown instead
        return _failed(message, 2) if message else 2
    return result if isinstance(result, int) else 0


@functools.cache
def program() -> Any:
    """The command line as a tree of commands, whose options' help is text and not markup."""
    root = typer.main.get_command(app)
    for each in (root, *getattr(root, "commands", {}).values()):
        for option in each.params:
            about = option.type_descriptor.parameter_info
            if option.type_descriptor.annotation is int and about.max is None:
                about.max = (1 << 63) - 1
            if described := getattr(option, "help", None):
                option.help = re.sub(r"\[(?=[a-z#/@][^\[]*?\])", r"\\[", described)
    return root


def _failed(message: str, code: int = 1) -> int:
    if code != 2:  # a command line that is refused is not part of a log
        logs.note(message, logging.ERROR)
    print(f"error: {in_one_line(message, getattr(sys.stderr, 'encoding', None))}", file=sys.stderr)
    return code


def main() -> None:
    """Run the program.

    What it imports is half a million objects, which live to the end and need not be gone through on the way. Threads of OpenMP
    that wait for others look LOOKS times before they sleep: by default they look for milliseconds, in which another job on the
    same cores would compute.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(LOOKS))
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(run())
