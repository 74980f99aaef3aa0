"""A process that the warm server forks is the one that the interpreter would have run."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import popen_spawn_posix, spawn
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from openrlhf.files import socket_folder
from openrlhf.warm_workers import server as program
from openrlhf.warm_workers.interpreter import NUMBER
from openrlhf.warm_workers.server import (
    BACKENDS,
    READ_AT_IMPORT,
    WarmServer,
    fork_cores,
    list_modules,
    take_environment,
    worker_command,
)

pytestmark = pytest.mark.processes
FORK = "--multiprocessing-fork"
"""Argument of processes that multiprocessing spawns, which the server forks."""


@pytest.fixture(scope="module")
def server() -> Iterator[WarmServer]:
    """Starts a server that has imported a few modules."""
    started = WarmServer(["setproctitle", "torch._dynamo"], {})
    yield started
    started.stop()
    assert started.process.returncode == 0 and not started.interpreter.parent.exists()


def start(server: WarmServer, code: str, **options) -> subprocess.Popen:
    """Starts code as multiprocessing does; reads its output as text."""
    command = [server.interpreter, "-c", code, FORK]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def output(server: WarmServer, code: str, status: int = 0, **options) -> str:
    """Returns what the code prints."""
    process = start(server, code, **options)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == status, text
    return text.strip()


def test_arguments_variables_folder_and_status(server: WarmServer, tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.argv, os.environ['A'], 'HOME' in os.environ, os.getcwd(), os.getppid(), "
        "os.getpriority(os.PRIO_PROCESS, 0)); sys.exit(7)"
    )
    found = output(server, f"{code}", 7, env={"A": "1"}, cwd=tmp_path, preexec_fn=lambda: os.nice(3))
    nice = os.getpriority(os.PRIO_PROCESS, 0) + 3
    assert found == f"['-c', '{FORK}'] 1 False {tmp_path} {os.getpid()} {nice}"


def test_it_is_forked_from_the_server_that_has_imported(server: WarmServer) -> None:
    found = output(server, "import os; print(open('/proc/self/stat').read().rpartition(')')[2].split()[1])")
    assert int(found) == server.process.pid


def test_open_files_keep_their_numbers(server: WarmServer) -> None:
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    code = f"import os; [os.write(fd, str(i).encode()) for i, fd in enumerate({list(writers)})]"
    output(server, code, pass_fds=writers)
    assert [os.read(fd, 1) for fd in readers] == [b"0", b"1", b"2"]
    for number in (*readers, *writers):
        os.close(number)


def test_a_core_that_multiprocessing_spawns(server: WarmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes start with an interpreter of their own, also while a core starts."""
    monkeypatch.setattr(spawn, "get_executable", spawn.get_executable)
    monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", popen_spawn_posix.Popen._launch)
    fork_cores(str(server.interpreter))
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in ("EngineCore", "reward"):
        theirs = context.Queue()
        process = context.Process(target=put_parents, args=(theirs,), name=name)
        process.start()
        found[name] = theirs.get(timeout=60)
        process.join()
        assert process.exitcode == 0 and spawn.get_executable() == spawn._python_exe
    own = os.getpid()
    assert found == {"EngineCore": (own, server.process.pid), "reward": (own, own)}


def test_an_executable_is_that_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bytes] = []

    def launch(*_) -> None:
        with ThreadPoolExecutor(1) as other:
            found.extend([spawn.get_executable(), other.submit(spawn.get_executable).result()])

    monkeypatch.setattr(spawn, "get_executable", spawn.get_executable)
    monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", launch)
    fork_cores("/warm")
    popen_spawn_posix.Popen._launch(None, SimpleNamespace(name="EngineCore_DP1"))
    assert found == [b"/warm", spawn._python_exe]


def put_parents(queue: multiprocessing.Queue) -> None:
    """Puts what seems to be this process's parent, and its real one."""
    queue.put((os.getppid(), psutil.Process().ppid()))


def test_the_title_of_a_process(server: WarmServer) -> None:
    code = "import setproctitle as s; s.setproctitle('core 1'); print(open('/proc/self/cmdline').read())"
    assert output(server, code).startswith("core 1\0")


def test_every_process_draws_other_numbers(server: WarmServer) -> None:
    code = "import numpy, random; print(numpy.random.random(), random.random())"
    numbers = " ".join(output(server, code) for _ in range(2)).split()
    assert len(set(numbers)) == 4


def test_libraries_have_the_settings_of_the_environment(server: WarmServer) -> None:
    code = (
        "import torch, warnings; print(torch.get_num_threads(), torch._dynamo.config.disable)\n"
        "warnings.warn('future', FutureWarning); warnings.warn('other', UserWarning)"
    )
    own = {"OMP_NUM_THREADS": "3", "TORCH_COMPILE_DISABLE": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    found = output(server, code, env=os.environ | own)
    assert found.startswith("3 True\n") and "other" in found and "future" not in found


def test_sigterm_reaches_the_process(server: WarmServer) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = start(server, code)
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 5
    process.stdout.close()


def test_sigterm_ends_a_process_without_a_handler(server: WarmServer) -> None:
    process = start(server, "import time; print('ready', flush=True); time.sleep(60)")
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()


@pytest.mark.parametrize("sent", [b"", NUMBER.pack(9), NUMBER.pack(3) + b"{}}"])
def test_a_request_that_breaks_off_leaves_the_server_as_it_was(server: WarmServer, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.interpreter.with_name("socket")))
        client.sendall(sent)
    found = output(server, "import psutil; print(psutil.Process().ppid())")
    assert int(found) == server.process.pid


def test_the_end_does_not_wait_for_imports() -> None:
    server = WarmServer(["time", "openrlhf.training.trained_worker", "openrlhf.backends.vllm.engine"], {})
    server.stop()
    assert server.process.returncode == -signal.SIGTERM and not server.interpreter.parent.exists()


def test_a_server_that_does_not_end_is_killed_and_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PATIENCE", 0.2)
    server = WarmServer([], {})
    server.process.kill()
    server.process.wait(30)
    deaf = ["sh", "-c", "trap '' TERM; echo; exec sleep 60"]  # as one on a machine that swaps
    server.process = subprocess.Popen(deaf, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.process.stdout and server.process.stdout.readline() == b"\n"
    server.stop()
    server.process.stdout.close()
    assert server.process.returncode == -signal.SIGKILL and not server.interpreter.parent.exists()


def test_a_variable_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(program, "WarmServer", lambda *about: started.append(about) or "server")
    monkeypatch.delenv("OPENRLHF_WARM_WORKERS", raising=False)
    assert program.start(["torch"], {"A": "1"}) == program.start((), {}) == "server"
    assert started == [(list_modules(["torch"]), {"A": "1"}), (list_modules(tuple(BACKENDS)), {})]
    monkeypatch.setenv("OPENRLHF_WARM_WORKERS", "0")
    assert program.start(["torch"], {}) is None and len(started) == 2


def test_workers_have_the_defaults_that_the_user_does_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    server = WarmServer([], {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"})
    deadline, variables = time.monotonic() + 20, {}
    while not variables and time.monotonic() < deadline:  # a process has none while it is being started
        variables = psutil.Process(server.process.pid).environ()
    server.stop()
    assert (variables["OMP_WAIT_POLICY"], variables["TORCH_CPP_LOG_LEVEL"]) == ("ACTIVE", "ERROR")


def test_the_process_ends_with_the_program_that_stands_for_it(server: WarmServer) -> None:
    process = start(server, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout
    forked = psutil.Process(int(process.stdout.readline()))
    process.kill()
    forked.wait(30)
    process.communicate()


def test_the_status_of_a_killed_process(server: WarmServer) -> None:
    assert output(server, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9) == ""


def test_without_a_server_the_interpreter_runs_the_command() -> None:
    server = WarmServer(["no_such_module"], {})
    assert output(server, "print(1)") == "1"  # a library that is missing ends nothing
    server.process.kill()
    server.process.wait()
    assert output(server, "import sys; print(sys.executable)") == sys.executable
    for path in server.interpreter.parent.iterdir():
        path.unlink()
    server.interpreter.parent.rmdir()
    assert server.process.stdin
    server.process.stdin.close()


def test_files_of_the_current_folder_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "socket.py").write_text("raise OSError")
    monkeypatch.chdir(tmp_path)
    server = WarmServer(["json"], {})
    found = output(server, "import psutil; print(psutil.Process().ppid())", cwd="/")
    assert int(found) == server.process.pid
    server.stop()


def test_ray_takes_the_program_only_if_it_can_be_executed(server: WarmServer) -> None:
    own = sys.executable
    with server.starts_workers():
        assert sys.executable == str(server.interpreter)
    server.interpreter.chmod(0o600)
    with server.starts_workers():
        assert sys.executable == own
    server.interpreter.chmod(0o700)
    assert sys.executable == own


def test_other_commands_run_in_the_interpreter(server: WarmServer) -> None:
    ran = subprocess.run([server.interpreter, "-c", "import os; print(os.getppid())"], capture_output=True)
    assert int(ran.stdout) == os.getpid()


def test_a_workers_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("B", "b")
    context = '--serialized-runtime-env-context={"env_vars": {"A": "${B}c"}, "command_prefix": []}'
    command = ["setup_worker.py", context, "--language=PYTHON", "default_worker.py", "--node-id=1"]
    assert worker_command(command) == (["default_worker.py", "--node-id=1"], {"A": "bc"})


def test_what_is_imported_in_advance_starts_no_thread_and_no_ray() -> None:
    code = (
        "import sys; from pathlib import Path; from openrlhf.warm_workers.server import preload\n"
        f"preload({list_modules(tuple(BACKENDS))})\n"
        "print('ray' in sys.modules, *(p.read_text() for p in Path('/proc/self/task').glob('*/comm')))"
    )
    env = os.environ | READ_AT_IMPORT
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    has_ray, _, *others = ran.stdout.split()
    assert has_ray == "False" and not others


def test_its_socket_has_a_short_path_whatever_tmpdir_is(tmp_path: Path, monkeypatch) -> None:
    """The path of a socket has at most 107 bytes."""
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr("openrlhf.warm_workers.server.socket_folder", socket_folder.__wrapped__)
    started = WarmServer([], {})
    try:
        assert output(started, "print(1)") == "1"
    finally:
        started.stop()


@pytest.mark.parametrize(
    ("value", "threads"), [("3,2", 3), ("2", 2), ("", None), ("0", None), ("many", None)]
)
def test_threads_are_those_of_the_outermost_level(value, threads, monkeypatch) -> None:
    found: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", found.append)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    take_environment({**os.environ, "OMP_NUM_THREADS": value})
    assert found == ([] if threads is None else [threads])
