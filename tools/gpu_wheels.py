"""Collects the wheels that `benchmarks/gpu.py` needs on a machine with torch and transformers but no index.

    python3 tools/gpu_wheels.py --python 3.12 DIR

Writes about 6 MB of wheels for Linux on x86-64 to DIR. If vLLM is installed here, one wheel contains its file
that packs weights. Copy DIR and the project to the other machine, and run there

    python3 -m pip install --no-index --no-deps --target DIR/site DIR/*.whl
    PYTHONPATH=DIR/site python3 benchmarks/gpu.py --budget 540

This program needs pip and an index.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
PACKED_TENSOR = "vllm/distributed/weight_transfer/packed_tensor.py"
"""File of vLLM that packs weights. It needs only torch."""
SMALL = ("annotated-types", "typing-inspection", "dill", "multiprocess", "xxhash")
"""Needs of pydantic besides pydantic-core, which it pins, and of datasets besides pyarrow and pandas."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument(
        "--python", default="3.12", help="Python version of the other machine (default: %(default)s)"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME",
        help="another package to collect, such as pytest",
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if list(options.folder.glob("*.whl")):
        parser.error(
            f"{options.folder} already has wheels, and pip fails if a package has two; name an empty folder"
        )
    gather(options.folder, options.python, options.also)
    carry_packing(options.folder)
    wheels = sorted(options.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:6.2f} MB  in {len(wheels)} wheels")


def gather(folder: Path, python: str, also: list[str]) -> None:
    """Writes the wheels to `folder`. hjson and DeepSpeed have no wheels and are built here, without compiled
    parts; DeepSpeed compiles these at first use."""
    for name in ("hjson", requirement("deepspeed")):
        pip("wheel", "--no-deps", "--wheel-dir", str(folder), name)
    download(folder, python, "pydantic", requirement("datasets"), *SMALL, *also)
    (pydantic,) = folder.glob("pydantic-*.whl")
    download(folder, python, pinned_by(pydantic, "pydantic-core"))


def carry_packing(folder: Path) -> None:
    """Writes a wheel with one file of the installed vLLM."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        print("note: vLLM is not installed here, so the stage ipc will be skipped on the other machine")
        return
    name = "vllm_packed_tensor-0"
    files = {
        PACKED_TENSOR: Path(vllm.origin).parents[1].joinpath(PACKED_TENSOR).read_text(),
        f"{name}.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm-packed-tensor\nVersion: 0\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def requirement(package: str) -> str:
    """Returns the requirement of a package in pyproject.toml."""
    found = re.search(rf'"({package}[=<>~!][^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert found, f"pyproject.toml asks for no {package}"
    return found[1]


def pinned_by(wheel: Path, package: str) -> str:
    """Returns the requirement of a package that a wheel pins, such as `pydantic-core==2.1`."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = content.read(name).decode()
    found = re.search(rf"^Requires-Dist: ({package}==[^;\s]+)", metadata, re.MULTILINE)
    assert found, f"{wheel.name} pins no {package}"
    return found[1]


def download(folder: Path, python: str, *names: str) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ("--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms)
    pip("download", "--no-deps", *target, "--dest", str(folder), *names)


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]]
    if subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"}).returncode != 0:
        sys.exit(f"error: pip {' '.join(words)} failed; see its output above")


if __name__ == "__main__":
    main()
