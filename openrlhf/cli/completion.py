"""Prints a script with which bash, zsh or fish completes commands, flags and values of `openrlhf`. The script
contains all lists, so that completing does not start Python."""

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
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
        print(script(make_parser().parse_args(argv).shell), end="")


def flags_of_commands() -> dict[str, list[Flag]]:
    """Returns command -> flags, from its configuration or from its module's `make_parser`."""
    configured = {command.name: command for command in CONFIGURED}
    found = {}
    for name in COMMANDS:
        if name in configured:
            found[name] = _flags_of_configuration(configured[name])
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
        Flag("print_config", "print the configuration and exit"),
        Flag("print_command", "print the command with current flag names and exit"),
    ]
    if command.has_plan:
        flags.append(Flag("print_plan", "print the placement and exit"))
    return sorted(flags, key=lambda flag: flag.name)


def _flags_of_parser(parser: argparse.ArgumentParser) -> list[Flag]:
    flags = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags += [flag for inner in action.choices.values() for flag in _flags_of_parser(inner)]
        if names := [option[2:] for option in action.option_strings if option.startswith("--")]:
            values = tuple(map(str, action.choices or ()))
            flags.append(Flag(names[0], _first_sentence(action.help or ""), values))
    return flags


def _first_sentence(text: str) -> str:
    return re.split(r"[.;:] ", " ".join(text.split()), maxsplit=1)[0].rstrip(".")


FIND = """\
BEGIN { FS = "\t" }
NR == 1 {
    line = $0
    count = split(line, words, " ")
    flag = words[count] == "=" ? words[count - 1] : words[count]
    for (i = 2; i <= count; i++) if (index(" TRAINED ", " " words[i] " ")) other = words[i]
    if (other == "" && index(" LIKE_PPO ", " " words[1] " ")) other = "ppo"
    next
}
NR == 2 { word = $0 == "=" ? "" : $0; next }
$2 !~ /^--/ { if ($1 == line) print $2 FS $3; next }
$1 != words[1] && $1 != other { next }
word ~ /^-/ { print $2 FS $3; next }
$2 == flag { count = split($4, values, " "); for (i = 1; i <= count; i++) print values[i] }
"""
"""Program of awk. It reads the words behind `openrlhf`, the word to complete, and the lines of `table`, and
prints what the word may be, each with its summary behind a tab."""

SCRIPTS = {
    "bash": r"""# Completion of openrlhf for bash, printed by `openrlhf completion bash`.
_openrlhf() {
    local IFS=$' \t\n' word=${COMP_WORDS[COMP_CWORD]} found
    found=$(printf '%s\n' "${COMP_WORDS[*]:1:COMP_CWORD-1}" "$word" TABLE | awk FIND)
    [[ $word == "=" ]] && word=""
    COMPREPLY=($(compgen -W "$(cut -f 1 <<< "$found")" -- "$word"))
}
complete -o default -F _openrlhf openrlhf
""",
    "zsh": r"""#compdef openrlhf
# Completion of openrlhf for zsh, printed by `openrlhf completion zsh`.
_openrlhf() {
    local line="$words[2,CURRENT-1]"
    local -a found
    if [[ $PREFIX == --*=* ]]; then
        line+=" ${PREFIX%%=*}"
        compset -P "*="
    fi
    found=(${(f)"$(printf '%s\n' "$line" "$PREFIX" TABLE | awk FIND)"})
    found=(${found/$'\t'/:})
    (( $#found )) && _describe word found || _files
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _openrlhf "$@"
else
    compdef _openrlhf openrlhf
fi
""",
    "fish": r"""# Completion of openrlhf for fish, printed by `openrlhf completion fish`.
function __openrlhf_found
    set -l line (commandline -opc)[2..]
    set -l word (commandline -ct)
    if string match -q -- '--*=*' $word
        set -f flag (string split -m 1 -- = $word)[1]
        set line $line $flag
        set word (string replace -r '^[^=]*=' '' -- $word)
    end
    set -l found (printf '%s\n' "$line" "$word" TABLE | awk FIND)
    set -q found[1]; or set found (__fish_complete_path $word)
    set -q flag; and set found $flag=$found
    string join \n -- $found
end
complete -c openrlhf -f -a '(__openrlhf_found)'
""",
}
"""Shell -> its script. It takes TABLE, and lets FIND choose. If that finds nothing, it completes names of
files."""


def script(shell: str) -> str:
    """Returns the script for a shell. zsh and fish show the summaries, too."""
    program = FIND.replace("TRAINED", " ".join(TRAINED)).replace("LIKE_PPO", " ".join(LIKE_PPO))
    text = SCRIPTS[shell].replace("FIND", shlex.quote(program))
    return text.replace("TABLE", shlex.quote("\n".join(table())))


def table() -> Iterator[str]:
    """Yields lines of the words so far, the next word, its summary; and lines of a command, its flag, the
    flag's summary and values. Tabs are between them."""
    commands = {name: summary for name, (_, summary) in COMMANDS.items()}
    for line, words in {"": commands, **WORDS}.items():
        yield from (f"{line}\t{word}\t{commands[word] if line == '' else ''}" for word in words)
    for name, flags in flags_of_commands().items():
        yield from (f"{name}\t--{flag.name}\t{flag.summary}\t{' '.join(flag.values)}" for flag in flags)


if __name__ == "__main__":
    main()
