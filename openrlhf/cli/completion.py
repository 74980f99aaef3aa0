"""Prints a script with which bash, zsh or fish completes commands, flags and values of `openrlhf`. The script
contains all lists, so that completing does not start Python."""

import argparse
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from openrlhf.cli.main import COMMANDS, reader_of
from openrlhf.config.command import Command
from openrlhf.config.commands import COMMANDS as CONFIGURED
from openrlhf.config.fields import list_flags
from openrlhf.errors import short_errors
from openrlhf.tools.command_line.arguments import ArgumentParser
from openrlhf.tools.command_line.run_files import TRAINING

INSTALL = """
Install the script once, and again after an upgrade:

  bash   openrlhf completion bash > ~/.local/share/bash-completion/completions/openrlhf
  zsh    openrlhf completion zsh > ~/.zfunc/_openrlhf
         (in ~/.zshrc, before compinit: fpath+=~/.zfunc)
  fish   openrlhf completion fish > ~/.config/fish/completions/openrlhf.fish

bash needs the package bash-completion for this folder; without it, add the script to ~/.bashrc.
"""

TRAINED = tuple(command.name for command in TRAINING)
"""Names of the commands that train."""
WORDS = {
    **dict.fromkeys(("plan", "check", "rehearse", "verify"), TRAINED),
    "data": ("preview",),
    "data preview": tuple(name for name in TRAINED if name != "ppo"),
    "agent": ("try", "record"),
    "completion": ("bash", "zsh", "fish"),
    "schema": TRAINED,
}
"""Words so far -> the words that may follow, besides names of files."""
LIKE_PPO = ("plan", "check", "rehearse", "verify", "agent")
"""Commands that also take the flags of ppo, unless the line names another training command."""


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    """The flag without dashes."""
    summary: str
    values: tuple[str, ...] = ()
    """Allowed values; empty if any value is allowed or the flag takes none."""
    takes_value: bool = True


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="openrlhf completion",
        description=f"{__doc__}\n{INSTALL}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=WORDS["completion"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    with short_errors():
        shell = make_parser().parse_args(argv).shell
        print({"bash": bash, "zsh": zsh, "fish": fish}[shell](summaries(), flags_of_commands()), end="")


def summaries() -> dict[str, str]:
    """Returns command -> summary, in the order of `openrlhf --help`."""
    return {name: summary for name, (_, summary) in COMMANDS.items()}


def flags_of_commands() -> dict[str, list[Flag]]:
    """Returns command -> flags, from its configuration or from its module's `make_parser`."""
    configured = {command.name: command for command in CONFIGURED}
    found = {}
    for name in COMMANDS:
        if name in configured:
            found[name] = _flags_of_configuration(configured[name])
        elif name == "data":
            found[name] = [Flag("samples", "number of samples"), Flag("no_color", "no colours", (), False)]
        else:
            parser = parser_of(name)
            found[name] = _flags_of_parser(parser) if parser else []
    return found


def parser_of(name: str) -> argparse.ArgumentParser | None:
    """Returns the parser of a command; None if it has none."""
    module, _ = reader_of(name)
    maker = getattr(module, f"{name}_parser", None) or getattr(module, "make_parser", None)
    return maker() if maker else None


def _flags_of_configuration(command: Command) -> list[Flag]:
    fields = list_flags(command.config_type).values()
    flags = [Flag(field.key, _first_sentence(field.help), field.choices) for field in fields]
    flags += [
        Flag("config", "YAML file of flags"),
        Flag("help", "list the flags, or those with a word in their name"),
        Flag("print_config", "print the configuration and exit", (), False),
        Flag("print_command", "print the command with current flag names and exit", (), False),
    ]
    if command.has_plan:
        flags.append(Flag("print_plan", "print the placement and exit"))
    return sorted(flags, key=lambda flag: flag.name)


def _flags_of_parser(parser: argparse.ArgumentParser) -> list[Flag]:
    flags = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags += [flag for inner in action.choices.values() for flag in _flags_of_parser(inner)]
        for option in action.option_strings:
            if option.startswith("--"):
                values = tuple(map(str, action.choices or ()))
                flags.append(Flag(option[2:], _first_sentence(action.help or ""), values, action.nargs != 0))
    return flags


def _first_sentence(text: str) -> str:
    return re.split(r"[.;:] ", " ".join(text.split()), maxsplit=1)[0].rstrip(".")


BASH = """\
# Completion of openrlhf for bash, printed by `openrlhf completion bash`.
_openrlhf() {{
    local IFS=$' \t\n' found="" other="" name
    local word=${{COMP_WORDS[COMP_CWORD]}} flag=${{COMP_WORDS[COMP_CWORD-1]}}
    local line="${{COMP_WORDS[*]:1:COMP_CWORD-1}}"
    [[ $word == "=" ]] && word=""
    [[ $flag == "=" ]] && flag=${{COMP_WORDS[COMP_CWORD-2]}}
    case $line in
{words}
    esac
    for name in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
        case $name in
            {training}) other=$name ;;
        esac
    done
    case ${{COMP_WORDS[1]}} in
        {like_ppo}) : ${{other:=ppo}} ;;
    esac
    for name in "${{COMP_WORDS[1]}}" $other; do
        if [[ $word == -* ]]; then
            case $name in
{flags}
            esac
        else
            case "$name $flag" in
{values}
            esac
        fi
    done
    COMPREPLY=($(compgen -W "$found" -- "$word"))
}}
complete -o default -F _openrlhf openrlhf
"""


def bash(commands: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    """Returns the script for bash 3.2 and later. If it finds nothing, bash completes names of files."""
    spelled = {name: [f"--{flag.name}" for flag in found] for name, found in flags.items()}
    return BASH.format(
        words="\n".join(
            f'        "{line}") found={shlex.quote(" ".join(words))} ;;'
            for line, words in {"": commands, **WORDS}.items()
        ),
        training="|".join(TRAINED),
        like_ppo="|".join(LIKE_PPO),
        flags="\n".join(
            f'                {name}) found="$found {" ".join(words)}" ;;' for name, words in spelled.items()
        ),
        values="\n".join(
            f"                {pattern}) found={shlex.quote(' '.join(values))} ;;"
            for pattern, values in _cases(flags)
        ),
    )


ZSH = """\
#compdef openrlhf
# Completion of openrlhf for zsh, printed by `openrlhf completion zsh`.
_openrlhf() {{
    local -a found
    local flag=$words[CURRENT-1] line="$words[2,CURRENT-1]" other="" name
    case $line in
        "") found=({commands}); _describe command found; return ;;
{words}
    esac
    for name in $words[3,CURRENT-1]; do
        case $name in
            {training}) other=$name ;;
        esac
    done
    case $words[2] in
        {like_ppo}) : ${{other:=ppo}} ;;
    esac
    if [[ $PREFIX == --*=* ]]; then
        flag=${{PREFIX%%=*}}
        compset -P "*="
    elif [[ $PREFIX == -* ]]; then
        for name in $words[2] $other; do
            case $name in
{flags}
            esac
        done
        _describe -o flag found
        return
    fi
    for name in $words[2] $other; do
        case "$name $flag" in
{values}
        esac
    done
    compadd -a found || _files
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _openrlhf "$@"
else
    compdef _openrlhf openrlhf
fi
"""


def zsh(commands: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    """Returns the script for zsh, which also describes commands and flags."""
    described = {
        name: " ".join(shlex.quote(f"--{flag.name}:{flag.summary}") for flag in found)
        for name, found in flags.items()
    }
    return ZSH.format(
        commands=" ".join(shlex.quote(f"{name}:{summary}") for name, summary in commands.items()),
        words="\n".join(f'        "{line}") found=({" ".join(words)}) ;;' for line, words in WORDS.items()),
        training="|".join(TRAINED),
        like_ppo="|".join(LIKE_PPO),
        flags="\n".join(f"                {name}) found+=({words}) ;;" for name, words in described.items()),
        values="\n".join(
            f"            {pattern}) found=({' '.join(values)}) ;;" for pattern, values in _cases(flags)
        ),
    )


def _cases(flags: Mapping[str, Sequence[Flag]]) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Yields (pattern, values): the pattern of a shell's `case` that matches `COMMAND --FLAG` for all flags
    with these values."""
    patterns = defaultdict(list)
    for name, found in flags.items():
        for flag in found:
            if flag.values:
                patterns[flag.values].append(f'"{name} --{flag.name}"')
    for values, names in patterns.items():
        yield "|".join(names), values


FISH = """\
# Completion of openrlhf for fish, printed by `openrlhf completion fish`.
function __openrlhf_takes_flags_of
    __fish_seen_subcommand_from $argv; and return
    contains ppo $argv; and __fish_seen_subcommand_from {like_ppo}
    and not __fish_seen_subcommand_from {training}
end
"""


def fish(commands: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    """Returns the script for fish, which also describes commands and flags."""
    lines = [FISH.format(like_ppo=" ".join(LIKE_PPO), training=" ".join(TRAINED))]
    for name, summary in commands.items():
        lines.append(f"complete -c openrlhf -f -n __fish_use_subcommand -a {name} -d {shlex.quote(summary)}")
    for line, words in WORDS.items():
        so_far = line.split()
        seen = "__fish_seen_subcommand_from"
        is_here = f"{seen} {so_far[-1]}; and not {seen} {' '.join(words)}"
        lines.append(f"complete -c openrlhf -n {shlex.quote(is_here)} -a {shlex.quote(' '.join(words))}")
    owners = defaultdict(list)
    for name, found in flags.items():
        for flag in found:
            owners[flag].append(name)
    for flag, names in owners.items():
        condition = shlex.quote(f"__openrlhf_takes_flags_of {' '.join(names)}")
        value = f" -x -a {shlex.quote(' '.join(flag.values))}" if flag.values else " -r" * flag.takes_value
        lines.append(
            f"complete -c openrlhf -n {condition} -l {flag.name}{value} -d {shlex.quote(flag.summary)}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
