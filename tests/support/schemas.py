"""Thirty JSON schemas: nested objects, arrays, enums, unions, numbers, texts with patterns, formats and escapes, references."""

from typing import Any

Schema = dict[str, Any]


def record(required: bool = True, **properties: Schema) -> Schema:
    names = list(properties) if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def text(**limits: Any) -> Schema:
    return {"type": "string", **limits}


def listed(items: Schema, **limits: Any) -> Schema:
    return {"type": "array", "items": items, **limits}


TEXT, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
COLOUR = {"enum": ["red", "green", "blue"]}
POINT = record(x=NUMBER, y=NUMBER)

SCHEMAS: dict[str, Schema] = {
    "text": TEXT,
    "pattern": text(pattern="^[A-Z]{2}-[0-9]{4}$"),
    "loose pattern": text(pattern="[0-9]"),
    "date": text(format="date"),
    "e-mail": text(format="email"),
    "integer": INTEGER,
    "from 3 to 17": {"type": "integer", "minimum": 3, "maximum": 17},
    "tens": {"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 1000},
    "enum": COLOUR,
    "mixed enum": {"enum": ["a", 1, 2.5, None, True, [1, "x"], {"k": "v"}]},
    "escapes": {"enum": ['quote " in it', "back\\slash", "tab\tand\nline", "é ü 漢 😀", "\u2028"]},
    "constant": {"const": {"version": 1, "kind": "answer"}},
    "numbers": listed(NUMBER, maxItems=4),
    "three colours": listed(COLOUR, minItems=3, maxItems=3),
    "lists of lists": listed(listed(INTEGER, maxItems=2), maxItems=3),
    "tuple": {"type": "array", "prefixItems": [TEXT, INTEGER, COLOUR], "items": False, "minItems": 3},
    "point": POINT,
    "person": record(name=TEXT, age=INTEGER, admin=BOOLEAN),
    "optional": record(required=False, name=TEXT, age=INTEGER, colour=COLOUR),
    "nested": record(outer=record(inner=record(value=INTEGER, why=text(maxLength=20)))),
    "list of points": record(points=listed(POINT, minItems=1, maxItems=3), closed=BOOLEAN),
    "answer": record(steps=listed(text(maxLength=30), minItems=1, maxItems=3), answer=NUMBER),
    "keys to be escaped": record(**{'a "quoted" key': INTEGER, "back\\slash": TEXT, "ключ": BOOLEAN}),
    "any key": {"type": "object", "additionalProperties": INTEGER},
    "union": {"anyOf": [INTEGER, TEXT, listed(INTEGER)]},
    "told apart by kind": {
        "anyOf": [record(kind={"const": "circle"}, r=NUMBER), record(kind={"const": "box"}, w=NUMBER, h=NUMBER)]
    },
    "all of": {"allOf": [record(a=INTEGER), {"type": "object", "properties": {"a": {"minimum": 5, "maximum": 50}}}]},
    "reference": {
        "$defs": {"name": text(maxLength=12)},
        **record(first={"$ref": "#/$defs/name"}, last={"$ref": "#/$defs/name"}),
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(value=INTEGER, children=listed({"$ref": "#/$defs/node"}, maxItems=2))},
    },
    "any JSON": {},
}
