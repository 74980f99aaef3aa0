"""The JSON Schema of a command's YAML file: `openrlhf schema ppo > run.schema.json`. Editors complete flags
with it, show their help and mark wrong ones."""

import json
import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from openrlhf.api import (
    OPTION_PREFIX,
    Command,
    FlagChoices,
    FlagRange,
    PassThrough,
    flag_tables,
    flag_values,
    list_flags,
    short_errors,
)
from openrlhf.tools.command_line.arguments import ArgumentParser
from openrlhf.tools.command_line.run_files import TRAINING

BOUNDS = {
    "at_least": "minimum",
    "at_most": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
}
TYPES: dict[Any, Any] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": ["string", "number", "boolean"]},  # every word of a file may be a text
    NoneType: {"type": "null"},
    PassThrough: {"type": ["object", "string"]},
}


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf schema", description=__doc__)
    parser.add_argument("command", choices=[command.name for command in TRAINING], help="command of the file")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        name = make_parser().parse_args(argv).command
        command = next(command for command in TRAINING if command.name == name)
        print(json.dumps(schema(command), indent=2, ensure_ascii=False))


def schema(command: Command) -> dict[str, Any]:
    defaults = flag_values(command.config_type())
    root = _section(f"Flags of `openrlhf {command.name}`. {command.summary}")
    for key, field in list_flags(command.config_type).items():
        own = schema_of(field.type) | {"description": field.help}
        is_json = not isinstance(default := defaults[key], float) or math.isfinite(default)
        if is_json and key != "logger.wandb.run_name":  # its default is unique
            own["default"] = default
        _insert(root, key, own)
    for table, entry in flag_tables(command.config_type).items():
        flags = _section(" ".join((entry.__doc__ or "").split()))
        for key, field in list_flags(entry).items():
            _insert(flags, key, schema_of(field.type) | {"description": field.help})
        names = {"type": ["object", "null"], "additionalProperties": flags}
        _insert(root, table, names | {"description": f"{table}.NAME.*: {flags['description']}"})
    if command.selected(command.config_type()):
        own = {"type": ["object", "null"], "description": "Options of the classes that other flags select."}
        _insert(root, OPTION_PREFIX.rstrip("."), own)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root}


def _section(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {},
        "patternProperties": {},
    }


def _insert(root: dict[str, Any], key: str, own: Mapping[str, Any]) -> None:
    parts, node = key.split("."), root
    for depth, name in enumerate(parts, 1):
        inner = dict(own) if depth == len(parts) else _section(f"Flags {'.'.join(parts[:depth])}.*")
        node = node["properties"].setdefault(name, inner)
        _allow_dotted(root, parts[:depth])


def _allow_dotted(root: dict[str, Any], parts: Sequence[str]) -> None:
    """Allows several parts of a name in one key. They are patterns, so editors complete nested keys alone."""
    node, place = root, {"$ref": "#/properties/" + "/properties/".join(parts)}
    for start, name in enumerate(parts[:-1]):
        node["patternProperties"]["^" + r"\.".join(parts[start:]) + "$"] = place
        node = node["properties"][name]


def schema_of(type_: Any) -> dict[str, Any]:
    """Returns the schema of a flag's values. A list may also be one word, with commas."""
    origin, args = get_origin(type_), get_args(type_)
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(arg) for arg in args]}
    if origin is Literal:
        return {"enum": [*args, *(word == "true" for word in args if word in ("true", "false"))]}
    if origin is Annotated:
        return _restricted(schema_of(args[0]), args[1])
    if origin is tuple:
        several = args[-1] is Ellipsis
        size = {"minItems": 1} if several else {"minItems": len(args), "maxItems": len(args)}
        items = {"items": schema_of(args[0])} if several else {"prefixItems": [schema_of(a) for a in args]}
        word = {"type": "string"} if args[0] is str else {"type": "string", "pattern": ","}
        one = [schema_of(args[0])] if several else []
        return {"anyOf": [{"type": "array", **size, **items}, *one, word]}
    return TYPES[type_]


def _restricted(base: dict[str, Any], limits: Any) -> dict[str, Any]:
    if isinstance(limits, FlagRange):
        bounds = {name: getattr(limits, word) for word, name in BOUNDS.items()}
        return base | {name: bound for name, bound in bounds.items() if bound is not None}
    if isinstance(limits, FlagChoices):
        named = {"enum": limits.names}
        reference = {"type": "string", "pattern": ":"}  # to a class of the user's
        return {"anyOf": [named, reference]} if limits.others else named
    return base
