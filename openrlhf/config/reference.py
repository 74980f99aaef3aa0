"""What every flag means, for people: `--help`, and `python -m openrlhf.config.reference` for
docs/flags.md."""

import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

from openrlhf.config.fields import Field, fields_of, to_words, values_of
from openrlhf.config.parse import SECRETS, Command
from openrlhf.config.sections import OptimConfig

_ORDER = (
    *("model", "actor", "critic", "ref", "reward", "data", "rollout", "vllm"),
    *("train", "algo", "eval", "optim", "ds", "ckpt", "logger", "other"),
)
"""Sections as people need them."""

_WIDTH = 110


def help_text(command: Command, config: Any, word: str) -> str:
    """Every flag with `word` in its present or old name, with its value in `config`. "" without any."""
    values, defaults = values_of(config), values_of(command.config_type())
    blocks = []
    for title, doc, fields in _sections(command, word):
        lines = [f"{title}: {doc}" if doc else title]
        for field in fields:
            lines += _help_of(field, values[field.key], defaults[field.key])
        blocks.append("\n".join(lines))
    if not blocks:
        return ""
    head = _head(command) + "\n\n" if not word else ""
    return head + "\n\n".join(blocks) + "\n"


def markdown(command: Command) -> str:
    """One table for each section."""
    values = values_of(command.config_type())
    values["logger.wandb.run_name"] = f"{command.name}_<month, day>T<hour>:<minute>"
    old_names = _old_names(command)
    lines = [f"## openrlhf {command.name}", "", command.summary]
    for title, doc, fields in _sections(command, ""):
        lines += ["", f"### {title}", ""] + ([doc, ""] if doc else [])
        lines += ["| flag | old spelling | values | default | meaning |", "|---|---|---|---|---|"]
        for field in fields:
            old = " ".join(f"`--{name}`" for name in old_names.get(field.key, ()))
            cells = (f"`--{field.key}`", old, field.values, _shown(field, values[field.key]), field.help)
            lines.append(
                "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"
            )
    others = [(old, flag) for old, flag in command.old_flags.items() if not flag.to]
    if others:
        lines += ["", "### Old flags without a new name", ""]
        lines += [
            f"* `--{old}`: {'refused' if flag.removed else 'ignored'}: {flag.removed or flag.ignored}"
            for old, flag in others
        ]
    return "\n".join(lines) + "\n"


def _head(command: Command) -> str:
    return textwrap.dedent(f"""\
        usage: openrlhf {command.name} [--config FILE ...] [--section.flag VALUE ...]

        {command.summary}

          --config FILE ...   YAML with the same names, nested or dotted; the command line is on top
          --print_config      print the whole configuration as YAML, and stop
          --help [WORD]       all flags, or those with WORD in their present or old name

        A flag that switches something on takes no value, or true or false. "-" and "_" are the same.""")


def _sections(command: Command, word: str) -> Iterator[tuple[str, str, list[Field]]]:
    """Title, description and flags of each section that has a flag with `word` in its name."""
    old_names = _old_names(command)
    hints = get_type_hints(command.config_type)
    groups: dict[str, list[Field]] = {name: [] for name in _ORDER}
    for field in fields_of(command.config_type).values():
        if any(word in name for name in (field.key, *old_names.get(field.key, ()))):
            groups[_group(field)].append(field)
    shared = fields_of(OptimConfig)
    for name, fields in groups.items():
        if fields:
            fields.sort(
                key=lambda field: field.key.partition(".")[2] in shared
            )  # what is special comes first
            yield (
                name,
                (hints[name].__doc__ or "").replace("\n", " ") if _is_section(name, hints) else "",
                fields,
            )


def _is_section(name: str, hints: dict[str, Any]) -> bool:
    return name in hints and hasattr(hints[name], "__dataclass_fields__")


def _group(field: Field) -> str:
    top = field.key.partition(".")[0]
    if top in _ORDER and "." in field.key:
        return top
    return "other" if top in ("local_rank", "use_ms") else "optim"


def _old_names(command: Command) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for old, flag in command.old_flags.items():
        for key in flag.to:
            names.setdefault(key, []).append(old)
    return names


def _help_of(field: Field, value: Any, default: Any) -> list[str]:
    words = "" if field.is_bool else f" {field.values}"
    state = "" if value == "" else f" ({'default' if value == default else 'now'}: {_shown(field, value)})"
    help_lines = textwrap.wrap(field.help, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return [f"  --{field.key}{words}{state}", *help_lines]


def _shown(field: Field, value: Any) -> str:
    if field.key in SECRETS and value is not None:
        return "***"
    if field.is_bool:
        return "on" if value else "off"
    return " ".join(
        word if word.isprintable() and word.strip() == word != "" else repr(word) for word in to_words(value)
    )


if __name__ == "__main__":
    from openrlhf.config.commands import PPO, SFT

    print("# Flags\n\nGenerated by `python -m openrlhf.config.reference`.\n")
    print("\n".join(markdown(command) for command in (SFT, PPO)), end="")
