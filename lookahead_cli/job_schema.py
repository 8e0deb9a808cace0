"""job.yaml of `generate`: its JSON Schema and an example with every option, both made from the options of a job.

`python -m lookahead_cli.job_schema` writes job.schema.json again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lookahead.job.spec import OPTIONS, PANELS, JobSpec
from lookahead.options import kinds

SCHEMA = Path(__file__).with_name("job.schema.json")
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def job_schema() -> dict[str, Any]:
    """Keys are names of options, with - or _ as they are typed."""
    properties: dict[str, Any] = {}
    for name, each in OPTIONS.items():
        about = each.about
        default = f" Default: {about.default_text}." if about.default_text else ""
        limits = {"minimum": about.least, "maximum": about.most, "default": each.field.default}
        described = {**_type_of(kinds(PANELS[each.group][1])[name]), "description": about.help + default}
        described |= {key: value for key, value in limits.items() if value is not None}
        properties[name.replace("_", "-")] = described
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job.yaml of lookahead generate",
        "type": "object",
        "properties": properties,
        "patternProperties": {f"^{name.replace('-', '_')}$": schema for name, schema in properties.items() if "-" in name},
        "additionalProperties": False,
    }


def _type_of(members: tuple[type, ...]) -> dict[str, Any]:
    """Return the type of an option; what may be repeated may be one value or a list, numbers given as text may be numbers."""
    if tuple in members:
        scalar = ["string", "number"]
        return {"type": [*scalar, "array", "null"], "items": {"type": scalar}}
    found = [JSON_TYPES[member] for member in members if not (member is int and str in members)]
    if "string" in found:
        found.append("number")  # such as decoding-length: 16
    return {"type": found if len(found) > 1 else found[0]}


def print_options(spec: JobSpec) -> None:
    """All options as they hold now, as YAML on stdout; null: not given."""
    import yaml

    values = {name.replace("_", "-"): value for name, value in spec.options().items()}
    print(f"# yaml-language-server: $schema={SCHEMA}")
    is_utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=is_utf8), end="")


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
