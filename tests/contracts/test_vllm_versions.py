"""The next release of vLLM has every name that the engine imports, every option that it sets, and every field
of an answer that it reads. It cannot run here: it needs another torch, and has no build for CPUs."""

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEXT = "0.33.0"


def imported(package: Path) -> Iterator[tuple[str, str]]:
    """Yields (module of vLLM, name) for each import in a package."""
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module or "", alias.name) for alias in node.names)


def names_of(module: str, wheel: zipfile.ZipFile) -> set[str]:
    """Returns the names that a module defines or imports anywhere, and its submodules; empty without it."""
    path, files = module.replace(".", "/"), set(wheel.namelist())
    (file,) = [f for f in (f"{path}.py", f"{path}/__init__.py") if f in files] or [""]
    if not file:
        return set()
    names = {
        f.removeprefix(f"{path}/").split("/")[0].removesuffix(".py") for f in files if f.startswith(path)
    }
    for node in ast.walk(ast.parse(wheel.read(file))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def fields_of(module: str, classes: set[str], wheel: zipfile.ZipFile) -> set[str]:
    """Returns the annotated fields of classes of a module."""
    tree = ast.parse(wheel.read(module.replace(".", "/") + ".py"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    assert len(found) == len(classes)
    inside = [statement for node in found for statement in node.body]
    return {s.target.id for s in inside if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}


def options_that_the_engine_sets() -> set[str]:
    tree = ast.parse((ROOT / "openrlhf" / "backends" / "vllm" / "engine.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if c.args and ast.unparse(c.args[0]) == "vllm.AsyncEngineArgs"]
    return {keyword.arg for keyword in call.keywords if keyword.arg}


def fields_that_the_engine_reads() -> set[str]:
    text = (ROOT / "openrlhf" / "backends" / "vllm" / "requests.py").read_text()
    return set(re.findall(r"\banswer\.(\w+)", text))


@pytest.mark.slow
def test_the_next_vllm_has_the_names(tmp_path: Path) -> None:
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"vllm=={NEXT}", "-d", str(tmp_path)]
    if subprocess.run(get, timeout=900, check=False).returncode:
        pytest.skip(f"no index has vllm {NEXT}")
    (file,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        used = set(imported(ROOT / "openrlhf"))
        assert len(used) > 20
        missing = {(module, name) for module, name in used if name not in names_of(module, wheel)}
        options = fields_of("vllm.engine.arg_utils", {"EngineArgs", "AsyncEngineArgs"}, wheel)
        answer = fields_of("vllm.outputs", {"CompletionOutput"}, wheel)
    assert missing == set()
    own = options_that_the_engine_sets()
    assert len(own) > 20 and own <= options
    assert answer >= fields_that_the_engine_reads() >= {"token_ids", "weight_versions"}
