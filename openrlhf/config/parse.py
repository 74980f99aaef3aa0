"""Parsing of command lines, YAML files and old flags into configurations.

Files given with `--config` are read from left to right, and later ones override earlier ones. The command
line overrides all files, wherever `--config` stands in it; files override the environment variables that a
command reads. All problems are listed at once, and the process exits with code 2.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Generic, NoReturn, TypeVar

from openrlhf.config.command import SECRETS, Command, Explicit, Problem, Source
from openrlhf.config.fields import (
    Field,
    Listed,
    convert,
    find_flag,
    flag_values,
    list_flags,
    tables,
    to_words,
    with_values,
)
from openrlhf.config.help import help_text
from openrlhf.config.old_flags import OTHER_NAMES, OldFlag, Words
from openrlhf.config.options import PREFIX, option_defaults, option_fields
from openrlhf.config.pass_through import PassThrough, to_text, yaml_to_json
from openrlhf.errors import REDACTED, ErrorCode, UsageError, describe, notify, readable, while_read

ConfigT = TypeVar("ConfigT")

Resolve = Callable[[ConfigT, Explicit, Sequence[int]], Mapping[str, Any]]
Plan = Callable[[ConfigT, Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Invocation(Generic[ConfigT]):
    config: ConfigT
    explicit: Explicit
    remarks: Sequence[str]
    """Problems that are not fatal. `parse` prints them."""


def parse(
    command: Command[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    resolve: Resolve[ConfigT] = lambda config, explicit, cluster: {},
    inspect: Callable[[ConfigT], Sequence[ValueError]] = lambda config: [],
    plan: Plan[ConfigT] = lambda config, cluster: "",
    raises: bool = False,
) -> Invocation[ConfigT]:
    """Parses the command line (default: sys.argv). Exits with 0 after `--help`, `--print_config`,
    `--print_command` and `--print_plan`, with 2 if there are problems.

    `resolve` returns values of unset flags that follow from the available hardware or the model; `inspect`
    returns problems beyond the flags. Both may import libraries, so they are called only if the flags are
    valid.
    `plan` returns the text of `--print_plan` and raises ValueError if the run does not fit.

    `raises`: raise UsageError for problems instead of exiting.

    `resolve` and `plan` get the number of GPUs of each node of the cluster described to `--print_plan`; an
    empty sequence stands for the actual cluster."""
    line = _read_argv(sys.argv[1:] if argv is None else argv)
    variables = _read_variables(command)
    settings, problems = _read_files(line.files, command.config_type)
    problems += line.problems
    chosen, renamed, hints, more = _translate([*variables, *settings, *line.settings], command)
    hints += _say_who_wins(variables, chosen)
    known = {key: flag for key in chosen if (flag := find_flag(command.config_type, key))}
    values, bad = _convert(chosen, known)
    config = with_values(command.config_type(), values)
    selected = command.selected(config)
    options, wrong = _read_options(chosen, selected, bad)
    values, bad = values | options, bad | wrong
    config = with_values(config, option_defaults(selected) | options)
    if line.help is not None and NO_OPTIONS not in bad:
        _show_help(command, config, line.help)
    explicit = {key: setting.source for key, setting in chosen.items()}
    problems += more + list(bad.values())
    notes = [*_in_one_line(renamed), *hints]
    found = [problem for problem in command.problems(config, explicit) if problem.key not in bad]
    refused, remarks = _told(found, config, explicit)
    if problems or (refused and not line.printed):
        _refuse([*problems, *refused], command, notes + remarks, raises)
    resolved = resolve(config, explicit, line.cluster)
    config = with_values(config, resolved)
    found = command.problems(config, explicit) + command.placed(config, explicit)
    if resolved:
        flags = " ".join(_spelled(key, value) for key, value in resolved.items())
        notes.append(f"auto-selected for this hardware or model: {flags}")
    refused, remarks = _told(found, config, explicit)
    notes += remarks
    if "print_config" in line.printed:
        write(to_yaml(config))
    if "print_command" in line.printed:
        write(to_command(command, values))
    unfit: Sequence[ValueError] = refused
    if "print_plan" in line.printed and not unfit:
        unfit = _print_plan(command, config, line.cluster, plan)
    if not unfit and not line.printed:
        unfit = inspect(config)
    if unfit:
        _refuse(unfit, command, notes, raises)
    for note in notes:
        notify(f"note: {note}")
    if line.printed:
        sys.exit(0)
    return Invocation(config=config, explicit=explicit, remarks=remarks)


def _told(found: Sequence[Problem], config: Any, explicit: Explicit) -> tuple[list[UsageError], list[str]]:
    """Returns the fatal problems as errors, and the others as remarks."""
    told = [(problem.fatal, _to_error(problem, config, explicit)) for problem in found]
    return [error for fatal, error in told if fatal], [str(error) for fatal, error in told if not fatal]


def to_yaml(config: Any, *, defaults: bool = True) -> str:
    """Returns the configuration as YAML, from which `--config` restores the same values. A secret key is
    written as True, which stands for the key in the environment.

    defaults: False to leave out flags that have their default value."""
    import yaml  # late: `--help` needs none

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    Dumper.add_representer(
        tuple,
        lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True),
    )
    Dumper.add_representer(PassThrough, yaml.SafeDumper.represent_dict)
    tree: dict[str, Any] = {}
    left_out = {} if defaults else flag_values(type(config)())
    for key, value in flag_values(config).items():
        if key in left_out and left_out[key] == value:
            continue
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = "True" if key in SECRETS and value is not None else value
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def to_command(command: Command, values: Mapping[str, Any]) -> str:
    """Returns the command that sets these flags by their current names, one per line."""
    lines = [f"openrlhf {command.name}"]
    for key, value in values.items():
        lines.append(_spelled(key, "True" if key in SECRETS and value is not None else value))
    return " \\\n    ".join(lines) + "\n"


def _spelled(key: str, value: Any) -> str:
    """Returns a flag and its value, quoted for a shell."""
    return shlex.join(to_arguments(key, () if value is True else to_words(value)))


def to_arguments(key: str, words: Words) -> list[str]:
    """Returns the arguments of a command line for a flag. A first word that looks like a flag stands behind
    an equals sign."""
    if words and _FLAG.fullmatch(words[0]):
        return [f"--{key}={words[0]}", *words[1:]]
    return [f"--{key}", *words]


def write(text: str) -> None:
    """Writes to stdout, whose reader may have closed it (`--help | head`)."""
    with while_read():
        sys.stdout.write(text)


def suggest(name: str, command: Command) -> list[str]:
    """Returns up to three current flags, best first: those with the meaning that `name` has in other
    libraries, else those whose current or old name is close to `name`."""
    fields = list_flags(command.config_type)
    named = OTHER_NAMES.get(name) or OTHER_NAMES.get(name.rpartition(".")[2], "")
    if meant := [key for key in named.split("|") if key in fields]:
        return meant[:1]
    keys: dict[str, list[str]] = {}
    for key, spelling in _spellings(command, flat="." not in name):
        keys.setdefault(spelling, []).append(key)
    near = get_close_matches(name, keys, n=len(keys))
    return list(dict.fromkeys(key for spelling in near for key in keys[spelling]))[:3]


def _spellings(command: Command, *, flat: bool) -> list[tuple[str, str]]:
    """Returns pairs of a current flag and one of its spellings."""
    fields = list_flags(command.config_type)
    pairs = [(key, key) for key in fields]
    pairs += [(key, old) for old, flag in command.old_flags.items() for key in flag.to]
    if flat:
        pairs += [(key, field.name) for key, field in fields.items()]
    return pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """A flag's name and words as they were written."""

    name: str
    words: Words
    shown: str
    """Name as written, with file and line."""
    source: Source = field(default_factory=Source)


@dataclass(kw_only=True, slots=True)
class _Line:
    """A command line."""

    settings: list[_Setting] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    problems: list[UsageError] = field(default_factory=list)
    help: str | None = None
    """Word that `--help` searches for; "": all flags; None: no `--help`."""
    printed: set[str] = field(default_factory=set)
    """Flags that ask for text in place of a run: print_config, print_command, print_plan."""
    cluster: Sequence[int] = ()
    """Number of GPUs of each node of the cluster described to `--print_plan`."""


_RENAMED = " is now "
_MOST_LISTED = 3
"""Largest number of old spellings that are listed one by one."""
MAX_OPEN = 100
"""Largest number of brackets of a YAML file that are open at once."""

_NODES = re.compile(r"([1-9]\d{0,3})x(\d{1,3})")
_FLAG = re.compile(r"--(?P<name>[A-Za-z_][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)


def _read_argv(argv: Sequence[str]) -> _Line:
    """Splits a command line into flags with the words up to the next flag. `-5` and text that merely starts
    with dashes are words."""
    line, i = _Line(), 0
    while i < len(argv):
        word, i = ("--help" if argv[i] == "-h" else argv[i]), i + 1
        flag = _FLAG.fullmatch(word)
        if flag is None:
            line.problems.append(_invalid("unexpected; flags start with --", _show(word)))
            continue
        words = [] if flag["value"] is None else [flag["value"]]
        while i < len(argv) and not _FLAG.fullmatch(argv[i]) and argv[i] != "-h":
            words.append(argv[i])
            i += 1
        name = flag["name"].replace("-", "_")
        if name == "help":
            line.help = " ".join(words)
        elif name in ("print_config", "print_command", "print_plan"):
            line.printed.add(name)
            if name == "print_plan":
                nodes = [_NODES.fullmatch(word) for word in words]
                line.cluster = [int(node[2]) for node in nodes if node for _ in range(int(node[1]))]
                if not all(nodes):
                    text = "expects NODESxGPUS, such as 2x8, or nothing"
                    line.problems.append(_invalid(text, "--print_plan", *words))
        elif name == "config":
            line.files += words
            if not words:
                line.problems.append(_invalid("expects the name of a YAML file", "--config"))
        else:
            line.settings.append(_Setting(name=name, words=tuple(words), shown="--" + flag["name"]))
    return line


def _print_plan(
    command: Command, config: ConfigT, cluster: Sequence[int], plan: Plan[ConfigT]
) -> list[ValueError]:
    """Prints the plan and returns problems."""
    if not command.has_plan:
        text = "only ppo places processes on a cluster; remove it"
        return [UsageError(ErrorCode.UNSUPPORTED, text, flag="--print_plan")]
    try:
        write(plan(config, cluster))
    except ValueError as error:
        return [error]
    return []


def _read_variables(command: Command) -> list[_Setting]:
    found = {key: (name, os.environ.get(name)) for key, name in command.variables.items()}
    return [
        _Setting(
            name=key,
            words=(value,),
            shown=f"the variable {name}: --{key}",
            source=Source(file=f"the variable {name}"),
        )
        for key, (name, value) in found.items()
        if value
    ]


def _say_who_wins(variables: Sequence[_Setting], chosen: Mapping[str, _Setting]) -> list[str]:
    lines = []
    for setting in variables:
        winner, variable = chosen[setting.name], setting.source.file
        if winner is setting:
            lines.append(f"{variable} sets --{setting.name} {_show(*setting.words)}")
        elif winner.words != setting.words:
            lines.append(
                f"{winner.shown} {_show(*winner.words)} overrides {variable}, {_show(*setting.words)}"
            )
    return lines


def _read_files(files: Sequence[str], config_type: type) -> tuple[list[_Setting], list[UsageError]]:
    sections = {key.rpartition(".")[0] for key in list_flags(config_type)} - {""} | {PREFIX.rstrip(".")}
    sections |= {section.rpartition(".")[0] for section in sections} - {""} | {*tables(config_type)}
    settings, problems = [], []
    opened = _open_flags(config_type)
    for file in files:
        some, wrong = _read_yaml(file, sections, tables(config_type), opened)
        settings += some
        problems += wrong
    return settings, problems


def _open_flags(config_type: type) -> tuple[str, ...]:
    """Returns the beginnings of names that go on with the options of another library, such as
    `vllm.engine_args.`."""
    return tuple(f"{key}." for key, field in list_flags(config_type).items() if field.type is PassThrough)


def _read_yaml(
    path: str, sections: set[str], names: Container[str], opened: tuple[str, ...]
) -> tuple[list[_Setting], list[UsageError]]:
    """Reads the settings of a file with nested, dotted or flat keys, in order, and its problems. Values stay
    text: `5e-7` becomes a number only for a flag that takes one. `names`: tables, see `tables`; `opened`: see
    `_open_flags`."""
    import yaml  # late: `--help` needs none

    settings: list[_Setting] = []
    problems: list[UsageError] = []

    def visit(node: yaml.Node, prefix: str) -> None:
        where = f"{path}:{node.start_mark.line + 1}"
        if not isinstance(node, yaml.MappingNode):
            if node.tag != "tag:yaml.org,2002:null":
                name = prefix.rstrip(".") or "the file"
                problems.append(_invalid(f"{name} must be a mapping of keys to values", where))
            return
        for key, value in node.value:
            where = f"{path}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                problems.append(_invalid("a key must be a name", where))
                continue
            name = prefix + key.value.replace("-", "_")
            if prefix[:-1] in names:  # a datasource
                name = prefix + re.sub(r"\W+", "_", key.value)
            if name in sections or (name.partition(".")[0] in names and isinstance(value, yaml.MappingNode)):
                visit(value, name + ".")
            elif (words := _yaml_words(value, f"{name}.".startswith(opened))) is None:
                text = "expects a value or a list of values"
                problems.append(_invalid(text, f"{where}: {_show(name)}"))
            else:
                shown = f"{where}: {_show(prefix + key.value)}"
                settings.append(_Setting(name=name, words=words, shown=shown, source=Source(file=where)))

    try:
        with open(path, encoding="utf-8") as file:
            _check_brackets(file.read())
            file.seek(0)
            node = yaml.compose(file, yaml.SafeLoader)
    except (OSError, UnicodeEncodeError) as error:
        text = getattr(error, "strerror", None) or "no file can have this name"
        return [], [UsageError(ErrorCode.NOT_FOUND, text, flag="--config", value=_show(path))]
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        text = f"not YAML: {' '.join(str(error).split())[:200]}"
        return [], [UsageError(ErrorCode.UNREADABLE, text, flag="--config", value=_show(path))]
    if node is not None:
        visit(node, "")
    return settings, problems


def _check_brackets(text: str) -> None:
    """Raises RecursionError if more brackets are open than a configuration needs: the parser would take a
    second to find that out."""
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    if max(accumulate(steps.get(letter, 0) for letter in text), default=0) > MAX_OPEN:
        raise RecursionError(f"more than {MAX_OPEN} brackets are open at once")


def _yaml_words(node: Any, is_open: bool) -> Words | None:
    """Returns the words of a YAML value; None for a value that no flag takes: a mapping, an empty list, a
    list of lists. `is_open`: True for options of another library, which have values of all kinds."""
    if is_open and node.id != "scalar":
        return (yaml_to_json(node),)
    if isinstance(node.value, str):
        return ("None",) if node.tag == "tag:yaml.org,2002:null" else (node.value,)
    if node.id == "sequence" and node.value and all(isinstance(item.value, str) for item in node.value):
        return Listed(item.value for item in node.value)
    return None


def _translate(
    settings: Sequence[_Setting], command: Command
) -> tuple[dict[str, _Setting], dict[str, str], list[str], list[UsageError]]:
    """Resolves settings to the last one of each flag. Returns these, the old spellings with their current
    names, hints on spellings with another or no effect, and problems."""
    fields = list_flags(command.config_type)
    has_options = bool(command.selected(command.config_type()))
    opened = _open_flags(command.config_type)
    said = {setting.name: setting.words for setting in settings}
    chosen: dict[str, _Setting] = {}
    renamed: dict[str, str] = {}
    hints: list[str] = []
    problems: list[UsageError] = []

    def opening(name: str) -> str | None:
        return next((start for start in opened if f"{name}.".startswith(start)), None)

    def choose(key: str, setting: _Setting) -> None:
        if start := opening(key):
            choose_option(start, setting)
            return
        before = chosen.get(key)
        if before and _same_file(before, setting) and before.words != setting.words:
            text = f"already set to another value in {before.source.file}"
            problems.append(UsageError(ErrorCode.CONFLICT, text, flag=setting.shown))
        chosen.pop(key, None)  # keeps the order of the last settings
        chosen[key] = setting

    def choose_option(start: str, setting: _Setting) -> None:
        """Adds options to those that the flag has by now."""
        key, name = start.removesuffix("."), setting.name.removeprefix(start)
        words = setting.words if setting.name == key else (to_text(name, setting.words),)
        before = chosen.pop(key, setting)
        all_words = words if before is setting else (*before.words, *words)
        chosen[key] = replace(setting, words=all_words)

    for setting in settings:
        of_value = command.old_flags.get(" ".join([setting.name, *setting.words]))
        old = of_value or command.old_flags.get(setting.name)
        is_option = (has_options and setting.name.startswith(PREFIX)) or opening(setting.name)
        is_current = is_option or find_flag(command.config_type, setting.name)
        if is_current and of_value is None:
            choose(setting.name, setting)
        elif old is not None:
            try:
                new, text = _translate_old(setting, old, said)
            except UsageError as error:
                problems.append(error)
                continue
            if text.startswith(_RENAMED):
                renamed[setting.shown] = text
            else:
                hints.append(f"{setting.shown}{text}")
            for key, words in new.items():
                source = Source(file=setting.source.file, old=setting.shown, shared=len(new) > 1)
                choose(key, _Setting(name=key, words=words, shown=setting.shown, source=source))
        elif (key := _positive(setting.name, fields)) is not None:
            words = {"": "false", "true": "false", "false": "true"}.get(" ".join(setting.words).lower(), "?")
            choose(key, _Setting(name=key, words=(words,), shown=setting.shown, source=setting.source))
        else:
            near = [key if setting.source.file else f"--{key}" for key in suggest(setting.name, command)]
            remedy = f"did you mean {' or '.join(near)}?" if near else "see --help"
            if entry := tables(command.config_type).get(table := setting.name.partition(".")[0]):
                remedy = f"{table}.NAME has {', '.join(list_flags(entry))}"
            text = f"there is no such flag; {remedy}"
            problems.append(UsageError(ErrorCode.UNKNOWN_FLAG, text, flag=setting.shown))
    return chosen, renamed, hints, problems


def _same_file(one: _Setting, other: _Setting) -> bool:
    files = [setting.source.file.rpartition(":")[0] for setting in (one, other)]
    return files[0] == files[1] != ""


def _translate_old(
    setting: _Setting, old: OldFlag, said: Mapping[str, Words]
) -> tuple[Mapping[str, Words], str]:
    """Translates an old flag to the words of current flags and a hint. Raises UsageError for one that cannot
    be translated."""
    if old.removed:
        raise UsageError(ErrorCode.UNKNOWN_FLAG, old.removed, flag=setting.shown)
    if old.bare:
        try:
            convert(setting.words, bool)
        except ValueError:
            raise _invalid("takes no value", setting.shown, *setting.words) from None
    if old.ignored:
        return {}, f" does nothing: {old.ignored}"
    new = old.translate(setting.words, said)
    if not new:
        return {}, " does nothing here"
    changed = any(words != setting.words for words in new.values())
    return new, _RENAMED + " ".join(
        f"--{key}{' ' + _show(*words) if changed else ''}" for key, words in new.items()
    )


def _in_one_line(renamed: Mapping[str, str]) -> list[str]:
    """Returns remarks on old spellings: the current name of each, or a single remark if there are many."""
    if len(renamed) <= _MOST_LISTED:
        return [f"{shown}{text}" for shown, text in renamed.items()]
    first = ", ".join(list(renamed)[:_MOST_LISTED])
    return [
        f"{len(renamed)} flags have old names ({first}, ...); --print_command prints the command with the "
        "current ones"
    ]


def _positive(name: str, fields: Mapping[str, Field]) -> str | None:
    """Returns the flag `a.b` that `a.no_b` switches off; None for other names."""
    section, _, last = name.rpartition(".")
    key = f"{section}.{last[3:]}" if section else last[3:]
    return key if last.startswith("no_") and key in fields and fields[key].may_be_off else None


def _convert(
    chosen: Mapping[str, _Setting], fields: Mapping[str, Field]
) -> tuple[dict[str, Any], dict[str, UsageError]]:
    """Converts settings to values. Returns values and problems, both by key."""
    values: dict[str, Any] = {}
    bad: dict[str, UsageError] = {}
    for key, setting in chosen.items():
        if key not in fields:  # an option, see _read_options
            continue
        try:
            if fields[key].type is str and setting.words in (("None",), ("null",)):
                raise ValueError("expects a text; remove it for the default")
            values[key] = convert(setting.words, fields[key].type)
        except ValueError as error:
            words = ("***" if key in SECRETS else word for word in setting.words)
            bad[key] = _invalid(str(error), setting.shown, *words)
        if any("://" in word and REDACTED in word for word in setting.words):
            text = f"{REDACTED} stands for a secret in files of a run; give the flag again, with the secret"
            bad[key] = _invalid(text, setting.shown, *setting.words)
    return values, bad


NO_OPTIONS = PREFIX + "*"
"""Key of a problem because of which no option of any class can be read."""


def _read_options(
    chosen: Mapping[str, _Setting], selected: Mapping[str, type], bad: Container[str]
) -> tuple[dict[str, Any], dict[str, UsageError]]:
    """Converts settings of options. Returns values and problems, both by key. `selected`: maps flags to
    classes; `bad`: flags with invalid words, so that the options of their classes are unknown."""
    said = {key: setting for key, setting in chosen.items() if key.startswith(PREFIX)}
    try:
        fields = option_fields(selected)
    except UsageError as error:
        return {}, {NO_OPTIONS: error}
    known = {key: setting for key, setting in said.items() if key in fields}
    values, wrong = _convert(known, fields)
    if not any(key in bad for key in selected):
        there = ", ".join(f"{field.name} (of {field.owner.__name__})" for field in fields.values())
        there = f"available: {there}" if there else "they have no options"
        for key in (key for key in said if key not in known):
            text = f"none of the selected classes has this option; {there}"
            wrong[key] = UsageError(ErrorCode.UNKNOWN_FLAG, text, flag=said[key].shown)
    return values, wrong


def _to_error(problem: Problem, config: Any, explicit: Explicit) -> UsageError:
    """Returns a problem as an error with the flag's value, and with the file where the flag was set."""
    value, source = flag_values(config)[problem.key], explicit.get(problem.key, Source())
    silent = value is None or value is True or value == "" or problem.key in SECRETS
    words = "" if silent else _show(*to_words(value))
    if words and problem.key not in explicit and value == flag_values(type(config)()).get(problem.key):
        words += " (default)"
    place = f"{source.file}: " if source.file else ""
    return UsageError(problem.code, problem.text, flag=f"{place}--{problem.key}", value=words)


def _invalid(text: str, shown: str, *words: str) -> UsageError:
    """Returns the error for the value `words` of a flag, shown as it was written."""
    return UsageError(ErrorCode.INVALID_VALUE, text, flag=shown, value=_show(*words))


def _show(*words: str) -> str:
    """Formats words for printing: shortened, without control characters."""
    text = " ".join(word if word and word.isprintable() else repr(word) for word in words)
    return text if len(text) <= 120 else text[:117] + "..."


def _refuse(
    problems: Sequence[ValueError], command: Command, notes: Sequence[str] = (), raises: bool = False
) -> NoReturn:
    if raises:
        code = getattr(problems[0], "code", ErrorCode.INVALID_VALUE)
        raise UsageError(code, readable("\n".join(describe(problem) for problem in problems)))
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [*(f"note: {note}" for note in notes), *(f"error: {describe(problem)}" for problem in problems)]
    explain = f"`openrlhf {command.name} --help WORD` explains flags, `openrlhf explain CODE` errors."
    end = f"{count}; nothing was started. {explain}"
    notify(readable("\n".join([*lines, end])))
    sys.exit(2)


def _show_help(command: Command, config: Any, word: str) -> NoReturn:
    text = help_text(command, config, word.lstrip("-").replace("-", "_"))
    if not text:
        near = suggest(word, command)
        hint = f"; similar: {' '.join(f'--{key}' for key in near)}" if near else ""
        text = f"no flag has this in its name{hint}"
        _refuse([UsageError(ErrorCode.UNKNOWN_FLAG, text, flag="--help", value=_show(word))], command)
    write(text)
    sys.exit(0)
