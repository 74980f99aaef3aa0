"""Flags declared by configuration classes: names, types, defaults and help, and the conversion of text to
values."""

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from openrlhf.config.choices import OneOf, TemplateText
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.resume import FREE_SECTIONS, Change, OnResume

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_NONE = ("none", "null")


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A flag: one field of a configuration."""

    key: str
    """Dotted name of the flag."""
    type: Any
    owner: type
    """Section class that declares the flag."""
    on_resume: OnResume = OnResume()

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def is_bool(self) -> bool:
        return self.type is bool

    @property
    def may_be_off(self) -> bool:
        """True if `no_` before the last word of the name switches the flag off."""
        return bool in (self.type, *get_args(self.type))

    @property
    def help(self) -> str:
        """Help text: the docstring under the field, and a description of each choice."""
        owners = (owner for owner in self.owner.__mro__ if is_dataclass(owner))
        docs = (_docstrings(owner.__module__).get(owner.__name__, {}).get(self.name) for owner in owners)
        return f"{next(filter(None, docs), '')} {_summary(self.type)}".strip()

    @property
    def choices(self) -> tuple[str, ...]:
        """The named values of the flag; empty if its values have no names."""
        return tuple(dict.fromkeys(_choices(self.type)))

    @property
    def values(self) -> str:
        """Description of the values that may follow the flag."""
        return _describe(self.type)


PLAIN = (str, int, float, type(None))


class Listed(tuple[str, ...]):
    """The words of a list in YAML: a single one may have commas."""


@cache
def list_flags(config_type: type) -> Mapping[str, Field]:
    """Returns all flags of a configuration class by key, in the order of declaration."""
    return {field.key: field for field in _walk(config_type, "")}


def find_flag(config_type: type, key: str) -> Field | None:
    """Returns the flag of this key; None if there is none. The flags of a table are `tasks.NAME.KEY`."""
    table, _, rest = key.partition(".")
    if entry := tables(config_type).get(table):
        field = list_flags(entry).get(rest.partition(".")[2])
        return field and replace(field, key=key)
    return list_flags(config_type).get(key)


def tables(config_type: type) -> Mapping[str, type]:
    """Returns the tables of a configuration: mappings of `NAME.KEY` to values, with the class of the keys."""
    return getattr(config_type, "TABLES", {})


def find_change(config_type: type, key: str) -> OnResume:
    """Returns the effect of a change of flag `key` on a resume; unknown flags must not change."""
    if key.startswith(FREE_SECTIONS):
        return OnResume(Change.FREE)
    field = find_flag(config_type, key)
    return field.on_resume if field else OnResume()


def flag_values(config: Any) -> dict[str, Any]:
    """Returns the values of all flags, and of the options in a mapping, by key."""
    values: dict[str, Any] = {}
    for name in _names(type(config)):
        value = getattr(config, name)
        if isinstance(value, PLAIN):  # of most flags, and quicker to recognize than the others
            values[name] = value
        elif is_dataclass(value):
            values |= {f"{name}.{key}": inner for key, inner in flag_values(value).items()}
        elif isinstance(value, Mapping) and not isinstance(value, PassThrough):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


@cache
def _names(config_type: type) -> list[str]:
    return [field.name for field in fields(config_type)]


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Returns the configuration with these values, by key, in place of its own."""
    if isinstance(config, Mapping):
        return {**config, **values}
    here = {key: value for key, value in values.items() if "." not in key}
    for section in dict.fromkeys(key.partition(".")[0] for key in values if "." in key):
        inner = {
            key[len(section) + 1 :]: value for key, value in values.items() if key.startswith(section + ".")
        }
        here[section] = with_values(getattr(config, section), inner)
    return replace(config, **here)


def format_flag(config: Any, key: str) -> str:
    """Returns `--key value`, marked if the value is the default."""
    value = flag_values(config)[key]
    is_default = value == flag_values(type(config)())[key]
    return f"--{key} {' '.join(to_words(value))}{' (default)' if is_default else ''}"


def convert(words: Sequence[str], type_: Any) -> Any:
    """Converts the words after a flag to its value. Raises ValueError with the expected form."""
    if type_ is PassThrough:
        return PassThrough.read(words)
    origin, args = get_origin(type_), get_args(type_)
    if origin in (Union, UnionType):
        if NoneType in args and len(words) == 1 and words[0].lower() in _NONE:
            return None
        if len(words) == 1 and words[0] in (word for arg in args[1:] for word in get_args(arg)):
            return words[0]
        return convert(words, next(arg for arg in args if arg is not NoneType))
    if origin is tuple and len(words) == 1 and not isinstance(words, Listed):
        words = words[0].split(",")
    if origin is tuple and args[-1] is Ellipsis:
        if not words:
            raise ValueError("expects at least one value")
        return tuple(convert([word], args[0]) for word in words)
    if origin is tuple:
        if len(words) != len(args):
            raise ValueError(f"expects {len(args)} values ({_describe(type_)}), got {len(words)}")
        return tuple(convert([word], arg) for word, arg in zip(words, args, strict=True))
    if type_ is bool and not words:
        return True
    if len(words) != 1:
        raise ValueError(f"expects one value ({_describe(type_)}), got {len(words) or 'none'}")
    if origin is Annotated:
        value = convert(words, args[0])
        if isinstance(args[1], TemplateText):
            return args[1].read(value)
        if value not in args[1]:
            raise ValueError(f"must be {args[1]}")
        return value
    return _convert_word(words[0], type_)


def to_words(value: Any) -> tuple[str, ...]:
    """Returns the words of a value, from which `convert` restores it."""
    if isinstance(value, tuple):
        return tuple(word for item in value for word in to_words(item))
    if isinstance(value, Mapping):
        return (json.dumps(value),)
    return (str(value).lower() if isinstance(value, bool) else str(value),)


def _convert_word(word: str, type_: Any) -> Any:
    if get_origin(type_) is Literal:
        if word not in get_args(type_):
            raise ValueError(f"expects one of {', '.join(get_args(type_))}")
        return word
    if type_ is bool:
        if word.lower() not in _TRUE + _FALSE:
            raise ValueError("expects true or false")
        return word.lower() in _TRUE
    if type_ is int:
        return _integer(word)
    if type_ is float:
        return _number(word)
    return word


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        number = _number(word, "expects a whole number")
        if not number.is_integer():  # "1e6" is whole, "1.5" and "inf" are not
            raise ValueError("expects a whole number") from None
        return int(number)


def _number(word: str, expected: str = "expects a number") -> float:
    try:
        number = float(word.replace(".inf", "inf"))  # YAML writes infinity with a dot
    except ValueError:
        raise ValueError(expected) from None
    if number != number:
        raise ValueError(expected)
    return number


def _describe(type_: Any) -> str:
    origin, args = get_origin(type_), get_args(type_)
    if origin in (Union, UnionType):
        return " | ".join("None" if arg is NoneType else _describe(arg) for arg in args)
    if origin is Annotated:
        return args[1].values if isinstance(args[1], OneOf) else _describe(args[0])
    if origin is Literal:
        return "{" + ",".join(args) + "}"
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"{_describe(args[0])} ..."
        return " ".join(_describe(arg) for arg in args)
    return {int: "INT", float: "FLOAT", str: "TEXT", bool: "BOOL", PassThrough: "JSON"}[type_]


def _choices(type_: Any) -> Iterator[str]:
    if isinstance(type_, OneOf):
        yield from type_.names
    elif type_ is bool:
        yield from ("true", "false")
    elif get_origin(type_) is Literal:
        yield from get_args(type_)
    else:
        for arg in get_args(type_):
            yield from _choices(arg)


def _summary(type_: Any) -> str:
    """Returns the summaries of a type's named choices; "" for types without named choices."""
    if isinstance(type_, OneOf):
        return type_.summary
    return "".join(_summary(arg) for arg in get_args(type_))


def _walk(config_type: type, prefix: str) -> Iterator[Field]:
    hints = get_type_hints(config_type, include_extras=True)
    for field in fields(config_type):
        type_ = hints[field.name]
        if is_dataclass(type_):
            yield from _walk(type_, f"{prefix}{field.name}.")
        elif get_origin(type_) is not Mapping:  # keys of mappings are options, see options.py
            type_, mark = _without_mark(type_)
            yield Field(key=prefix + field.name, type=type_, owner=config_type, on_resume=mark)


def _without_mark(type_: Any) -> tuple[Any, OnResume]:
    """Splits a type into the one of the values and the flag's mark."""
    if get_origin(type_) is not Annotated or not isinstance(get_args(type_)[-1], OnResume):
        return type_, OnResume()
    base, *others, mark = get_args(type_)
    return Annotated[(base, *others)] if others else base, mark


@cache
def _docstrings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Returns the docstrings under the fields of a module's classes, by class and field."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _read_docstrings(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _read_docstrings(declaration: ast.ClassDef) -> Mapping[str, str]:
    docs = {}
    for line, below in pairwise(declaration.body):
        match line, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a tree of mappings to {dotted key: value}."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found
