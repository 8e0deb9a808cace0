"""job.yaml of `generate`: its JSON Schema and an example with every option, both made from the options themselves.

`python -m lookahead_cli.job_schema` writes job.schema.json anew.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).with_name("job.schema.json")
NOT_IN_A_FILE = ("config", "print_config")
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def job_schema() -> dict[str, Any]:
    """Keys are names of options, with - or _ as they are typed."""
    from lookahead_cli.generate import command

    properties: dict[str, Any] = {}
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if name in NOT_IN_A_FILE:
            continue
        kind, option = typing.get_args(hints[name])
        described = {**_type_of(kind), "description": option.help}
        if option.min is not None:
            described["minimum"] = option.min
        if option.max is not None:
            described["maximum"] = option.max
        if parameter.default is not None:
            described["default"] = parameter.default
        properties[name.replace("_", "-")] = described
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job.yaml of lookahead generate",
        "type": "object",
        "properties": properties,
        "patternProperties": {f"^{name.replace('-', '_')}$": schema for name, schema in properties.items() if "-" in name},
        "additionalProperties": False,
    }


def _type_of(kind: Any) -> dict[str, Any]:
    """Of the annotation of an option; what may be repeated may be one value or a list, numbers given as text may be numbers."""
    members = typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else (kind,)
    found: list[str] = []
    for member in members:
        if member is type(None):
            found.append("null")
        elif typing.get_origin(member) is list:
            scalar = ["string", "number"]
            return {"type": [*scalar, "array", "null"], "items": {"type": scalar}}
        else:
            found.append(JSON_TYPES[member])
    if "string" in found:
        found.append("number")  # such as decoding-length: 16
    return {"type": found if len(found) > 1 else found[0]}


def print_options(options: Mapping[str, Any]) -> None:
    """All options as they hold now, as YAML on stdout."""
    import yaml

    values = {name.replace("_", "-"): value for name, value in options.items() if name not in NOT_IN_A_FILE}
    print(f"# yaml-language-server: $schema={SCHEMA}")
    is_utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=is_utf8), end="")


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
