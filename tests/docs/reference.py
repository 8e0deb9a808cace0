"""docs/cli.md from the commands themselves. Write it with: python -m tests.docs.reference"""

import inspect
import re
from pathlib import Path
from typing import Any

from lookahead_cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
INTRO = """# Commands

Made from `lookahead COMMAND --help` by `python -m tests.docs.reference`.

- Results are printed on stdout, progress and warnings on stderr. `--json` prints one object on stdout.
- Exit codes: 0 ok, 1 data or run error, 2 usage error, 3 a complete job with failed rows, 130 interrupted, 143 terminated.
- `--config job.yaml` holds any options of a command; an option on the command line overrides it.
- `lookahead --version` prints the version, `python -m lookahead_cli` is the same program.
- `lookahead --install-completion` completes commands, options, and names of strategies and cost profiles in bash, zsh, fish and
  PowerShell.
- Figures (`--plot`) are PNG, PDF or SVG, by the ending of the file.
- File names, sources and other texts from outside are printed with control characters escaped. If stdout is not UTF-8, tables
  and trees are drawn in ASCII, other characters are escaped, and JSON stays valid UTF-8.
"""


def page() -> str:
    import typer

    commands: dict[str, Any] = typer.main.get_command(app).commands
    contents = "\n".join(["| command | |", "|---|---|", *(_row(name, command) for name, command in commands.items())])
    return "\n".join([INTRO, contents, "", *(_command(name, command) for name, command in commands.items())])


def _row(name: str, command: Any) -> str:
    first = inspect.cleandoc(command.help).split("\n\n")[0]
    return f"| [`lookahead {name}`](#lookahead-{name}) | {_cell(first)} |"


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]
    usage = " ".join([f"lookahead {name}", "[OPTIONS]", *(_argument(each) for each in arguments)])
    lines = [f"## lookahead {name}", "", f"```text\n{usage}\n```", ""]
    lines += [f"{_text(paragraph)}\n" for paragraph in inspect.cleandoc(command.help).split("\n\n")]
    lines += [_example(line) for line in inspect.cleandoc(command.epilog or "").split("\n\n")]
    panels: dict[str, list[Any]] = {}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    if arguments:
        lines += _table("Arguments", [(f"`{_argument(each)}`", each.help or "") for each in arguments])
    for panel, found in panels.items():
        lines += _table(panel, [(_names(each), _help(each)) for each in found])
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _example(paragraph: str) -> str:
    label, _, line = _text(paragraph).partition(": ")
    return f"{label}: `{line}`\n"


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"**{title}**", "", "| | |", "|---|---|", *(f"| {name} | {_cell(text)} |" for name, text in rows), ""]


def _names(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} `{option.metavar or option.name.upper()}`".replace("|", "\\|")


def _help(option: Any) -> str:
    default = option.show_default if isinstance(option.show_default, str) else option.default
    if option.required:
        return f"{option.help} Required."
    if option.is_flag or default is None or isinstance(default, (list, tuple)):
        return f"{option.help}{' Default: on.' if option.is_flag and default is True else ''}"
    return f"{option.help} Default: {default}."


def _text(text: str) -> str:
    return " ".join(re.sub(r"\[/?bold\]", "", text).split())


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
