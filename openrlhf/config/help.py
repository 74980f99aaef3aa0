"""The text of `--help`."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, get_type_hints

from openrlhf.config.command import SECRETS, Command
from openrlhf.config.fields import Field, flag_values, list_flags, tables, to_words
from openrlhf.config.options import option_defaults, option_fields
from openrlhf.config.sections import OptimConfig

_ORDER = (
    *("command", "model", "actor", "critic", "ref", "teacher", "reward", "data", "tasks", "rollout", "csft"),
    *("vllm", "train", "algo", "eval", "optim", "ds", "ckpt", "logger", "other"),
)
"""Sections in the order in which users need them."""

_WIDTH = 110


def help_text(command: Command, config: Any, word: str) -> str:
    """Lists the flags with `word` in their current or old names, with their values in `config`; "" if there
    are none."""
    selected = command.selected(config)
    values, defaults = flag_values(config), flag_values(command.config_type()) | option_defaults(selected)
    blocks = []
    for title, doc, fields in sections(command, word, option_fields(selected)):
        lines = [f"{title}: {doc}" if doc else title]
        for field in fields:
            lines += _format_help(field, values.get(field.key), defaults.get(field.key))
        blocks.append("\n".join(lines))
    if not blocks:
        return ""
    head = _head(command) + "\n\n" if not word else ""
    return head + "\n\n".join(blocks) + "\n"


def _head(command: Command) -> str:
    plan = "print the placement on this cluster, or on 2 nodes of 8 GPUs, and exit"
    plan = f"\n          --print_plan [2x8]  {plan}" if command.has_plan else ""
    return textwrap.dedent(f"""\
        usage: openrlhf {command.name} [--config FILE ...] [--section.flag VALUE ...]

        {command.summary}

          --config FILE ...   YAML with the same names, nested or dotted; the command line overrides it
          --print_config      print the whole configuration as YAML, and exit
          --print_command     print the command with current flag names, and exit{plan}
          --help [WORD]       print all flags, or those with WORD in their current or old name, and exit

        A switch takes no value, or true or false. "-" and "_" in names mean the same.""")


def sections(
    command: Command, word: str, options: Mapping[str, Field] = {}
) -> Iterator[tuple[str, str, list[Field]]]:
    """Yields title, description and flags of each section that has a flag or an option with `word` in its
    name."""
    names = old_names(command)
    hints = get_type_hints(command.config_type)
    groups: dict[str, list[Field]] = {name: [] for name in _ORDER}
    entries = tables(command.config_type)
    of_tables = [
        replace(field, key=f"{table}.NAME.{key}")
        for table, entry in entries.items()
        for key, field in list_flags(entry).items()
    ]
    for field in (*list_flags(command.config_type).values(), *of_tables, *options.values()):
        if any(word in name for name in (field.key, *names.get(field.key, ()))):
            groups[_group(field)].append(field)
    shared = list_flags(OptimConfig)
    for name, fields in groups.items():
        if fields:
            # Flags of this section alone come first.
            fields.sort(key=lambda field: field.key.partition(".")[2] in shared)
            section = entries.get(name) or hints.get(name)
            doc = section.__doc__ if is_dataclass(section) else None
            yield name, " ".join((doc or "").split()), fields


def _group(field: Field) -> str:
    top = field.key.partition(".")[0]
    if top in _ORDER and "." in field.key:
        return top
    if top in ("local_rank", "use_ms"):
        return "other"
    return "optim" if field.key in list_flags(OptimConfig) else "command"


def old_names(command: Command) -> dict[str, list[str]]:
    """Returns flag -> its old names. Those of an option that is passed through are of its flag."""
    names: dict[str, list[str]] = {}
    known = list_flags(command.config_type)
    for old, flag in command.old_flags.items():
        for key in flag.to:
            names.setdefault(key if key in known else key.rpartition(".")[0], []).append(old)
    return names


def _format_help(field: Field, value: Any, default: Any) -> list[str]:
    words = "" if field.is_bool else f" {field.values}"
    state = "" if value == "" else f" ({'default' if value == default else 'now'}: {shown(field, value)})"
    help_lines = textwrap.wrap(field.help, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return [f"  --{field.key}{words}{state}", *help_lines]


def shown(field: Field, value: Any) -> str:
    if field.key in SECRETS and value is not None:
        return "***"
    if field.is_bool:
        return "on" if value else "off"
    return " ".join(
        word if word.isprintable() and word.strip() == word != "" else repr(word) for word in to_words(value)
    )
