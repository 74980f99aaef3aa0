"""Every command in the documentation parses, and every page that it links to exists."""

import re
import shlex
from pathlib import Path

import pytest

from openrlhf.cli.main import COMMANDS
from openrlhf.config.commands import PPO, SFT
from openrlhf.config.parse import parse
from openrlhf.config.reference import page

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
TARGETS = {
    target for line in (ROOT / "Makefile").read_text().splitlines() if (target := line.partition(":")[0])
}
FILES = re.compile(r"[\w/.-]+\.(?:jsonl|json|parquet|yaml|py)")


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for doc in PAGES:
        for block in BLOCK.findall(doc.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.append((f"{doc.name}: {' '.join(words[:4])}", words))
    return found


@pytest.mark.parametrize(("name", "words"), commands(), ids=[name for name, _ in commands()])
def test_command_is_understood(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in words:  # what the reader has, and this machine has not
        if FILES.fullmatch(word):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).write_text("def reward_func(queries, prompts, labels): ...")
    Path("ckpt/sft").mkdir(parents=True, exist_ok=True)
    Path("ckpt/sft/config.json").write_text("{}")
    match words:
        case ["make", target]:
            assert target in TARGETS
        case ["pip", "install", *_]:
            extras = re.findall(r"\[([\w,]+)\]", " ".join(words))
            assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
        case ["python", "-m", "openrlhf.cli.train_sft", *flags] | ["openrlhf", "sft", *flags]:
            parse(SFT, flags)
        case ["python", "-m", "openrlhf.cli.train_ppo_ray", *flags] | ["openrlhf", "ppo", *flags]:
            parse(PPO, flags)
        case ["openrlhf", command, *_]:
            assert command in COMMANDS
        case _ if "benchmarks/" in " ".join(words):
            script = next(word for word in words if word.startswith("benchmarks/"))
            assert (ROOT / script).exists()
        case _:
            pytest.fail(f"{name}: nothing checks this command")


def test_links_lead_somewhere() -> None:
    links = [
        (doc, link)
        for doc in PAGES
        for link in re.findall(r"\]\(([^)#]+)\)", doc.read_text())
        if "://" not in link
    ]
    assert links
    assert not [(doc.name, link) for doc, link in links if not (doc.parent / link).exists()]


def test_reference_of_flags_is_current() -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == page(SFT, PPO)


def test_structure_names_every_module() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    modules = {p for p in (ROOT / "openrlhf").rglob("*.py") if p.parent.name not in ("cli", "tasks")}
    names = {p.name for p in modules} - {"__init__.py"}
    assert not {name for name in names if f"`{name}`" not in text}
