"""CUDA builds of torchvision, torchaudio and torchcodec beside a CPU build of torch."""

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
NEEDS = {"cuda": b"\x7fELF libc10_cuda.so\0libc10.so\0", "cpu": b"\x7fELF libc10.so\0"}


def python(text: str, *packages: str) -> str:
    """Runs `text` after `import openrlhf`, without the imports of the environment's .pth files."""
    path = [str(ROOT), *map(str, packages)]
    begin = f"import sys; sys.path[:0] = {path}; import openrlhf"
    ran = subprocess.run([sys.executable, "-S", "-c", f"{begin}\n{text}"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("torch", "torchaudio", "found"), [("cpu", "cuda", False), ("cpu", "cpu", True), ("cuda", "cuda", True)]
)
def test_a_build_that_cannot_be_loaded_is_as_if_it_were_not_there(tmp_path, torch, torchaudio, found) -> None:
    for name, build in {"torch": torch, "torchaudio": torchaudio}.items():
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "lib" / f"_{name}.abi3.so").write_bytes(NEEDS[build])
    if torch == "cuda":
        (tmp_path / "torch" / "lib" / "libc10_cuda.so").touch()
    ask = "import importlib.util; print(importlib.util.find_spec('torchaudio') is not None)"
    assert python(ask, tmp_path) == str(found)


def test_without_torch_nothing_happens() -> None:
    assert python("print(openrlhf.__version__)") in (metadata.version("openrlhf"), "0+unknown")


def test_torchvision_resizes_images_whatever_its_build() -> None:
    resize = (
        "import torch, torchvision.transforms.v2.functional as F\n"
        "print(tuple(F.resize(torch.ones(3, 8, 8), [4, 2]).shape))"
    )
    assert python(resize, sysconfig.get_path("purelib")) == "(3, 4, 2)"


def test_datasets_may_be_imported_before() -> None:
    begin = f"import sys; sys.path[:0] = {[str(ROOT), sysconfig.get_path('purelib')]}"
    text = f"{begin}; import datasets, openrlhf; print(datasets.Dataset.from_list([{{'a': 1}}])[0])"
    ran = subprocess.run([sys.executable, "-S", "-c", text], capture_output=True, text=True)
    assert ran.stdout.strip() == "{'a': 1}", ran.stderr
