"""Hostile code, run for real: it is stopped, reads no secrets and leaves nothing behind."""

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
from namespaces import needs_namespaces
from refusals import refused

from openrlhf.agents import isolation
from openrlhf.agents.sandbox import ENVIRONMENT, SYSTEM, Sandbox, SandboxResult, SandboxUnavailable
from openrlhf.errors import ErrorCode
from openrlhf.rollout.executors import check_agent_file

pytestmark = [pytest.mark.processes, needs_namespaces]
DENIED = "Operation not permitted"


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], set[str]]]:
    """Returns a function that gives the numbers of the processes of this test's sandboxes; checks that none
    is left."""
    program = tmp_path / "isolation.py"
    program.write_bytes(Path(isolation.__file__).read_bytes())
    monkeypatch.setattr(isolation, "__file__", str(program))
    monkeypatch.setitem(ENVIRONMENT, "OF_TEST", str(program))

    def processes() -> set[str]:
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended
                words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                if str(program).encode() in words:
                    found.add(folder.name)
        return found

    mounts = Path("/proc/self/mountinfo").read_text()
    yield processes
    assert not processes() and Path("/proc/self/mountinfo").read_text() == mounts


def run(code: str, **limits) -> SandboxResult:
    return Sandbox(**({"seconds": 20} | limits)).run(dedent(code))


def errors_of(*attempts: str, before: str = "") -> list[str]:
    """Returns the sandbox's answer to each of the expressions; "done" if it allows one."""
    code = f"""
import ctypes, os, socket, sys
{before}
for attempt in {list(attempts)!r}:
    try:
        eval(attempt)
        print("done:", attempt)
    except OSError as error:
        print(error.strerror or type(error).__name__)
"""
    result = run(code)
    assert result.status == "ok", result.text
    return result.stdout.splitlines()


def test_a_program_reads_stdin_and_returns_its_output() -> None:
    code = "import sys\nprint(int(input()) ** 2)\nprint('é', file=sys.stderr)"
    result = Sandbox().run(code, stdin="7\n")
    assert (result.status, result.exit_code) == ("ok", 0)
    assert (result.stdout, result.stderr, result.text) == ("49\n", "é\n", "49\né")
    assert Sandbox().run("").text == "[no output]"


def test_an_error_has_a_traceback() -> None:
    result = Sandbox().run("x = 1\nprint(x)\nx / 0")
    assert (result.status, result.exit_code, result.stdout) == ("error", 1, "1\n")
    assert 'File "/sandbox/main.py", line 3' in result.stderr
    assert result.text.endswith("ZeroDivisionError: division by zero")
    assert run("exit(3)").exit_code == 3


def test_the_standard_library_and_what_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("answer = 42")
    tmp_path.chmod(0o755)
    code = """
        import ctypes, decimal, hashlib, json, multiprocessing, random, sqlite3, threading
        from concurrent.futures import ProcessPoolExecutor
        if __name__ == "__main__":
            import mine
            with ProcessPoolExecutor(2) as pool:
                print(list(pool.map(abs, [-1, -2])), mine.answer)
    """
    result = run(code, import_from=(str(tmp_path),))
    assert (result.status, result.stdout) == ("ok", "[1, 2] 42\n"), result.text
    assert "No module named 'mine'" in run("import mine").stderr
    assert run("open('/tmp/a', 'w').write('b'); print(open('/sandbox/a').read())").stdout == "b\n"


def test_folders_that_are_not_there() -> None:
    with refused(ErrorCode.NOT_FOUND, flag="import_from"):
        Sandbox(import_from=("/nowhere",))


DEAF = """
import signal, time
for number in {*range(1, 65)} - {9, 19, 32, 33}:
    signal.signal(number, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("while True: pass", "timeout", "[stopped: out of time]"),
        (DEAF, "timeout", "deaf\n[stopped: out of time]"),
        ("import os, time\nos.close(1), os.close(2)\ntime.sleep(60)", "timeout", "[stopped: out of time]"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "[killed by signal 9]"),
        ("import os; os.abort()", "killed", "[killed by signal 6]"),
        ("import ctypes; ctypes.string_at(0)", "killed", "[killed by signal 11]"),
    ],
)
def test_endings(code: str, status: str, text: str) -> None:
    result = run(code, seconds=1 if status == "timeout" else 20)
    assert (result.status, result.text) == (status, text)
    assert (result.exit_code is None) == (status == "timeout")


def test_infinite_output() -> None:
    result = run("import sys\nwhile True: sys.stdout.write('ha' * 5000)", output=100_000)
    assert (result.status, result.stdout) == ("output", "ha" * 50_000)
    assert result.text.endswith("output]")


def test_memory_beyond_the_limit_raises_memory_error() -> None:
    assert "MemoryError" in run("x = bytearray(10 << 30)").stderr
    assert "MemoryError" in run("x = []\nwhile True: x.append(bytearray(1 << 20))", memory=128 << 20).stderr


def test_a_fork_bomb() -> None:
    """The code may have few processes, and all end with the first."""
    code = """
        import os, time
        children = 0
        try:
            while True:
                if not os.fork():
                    time.sleep(600)
                children += 1
        except BlockingIOError:
            print(children)
    """
    assert run(code, processes=8).stdout == "7\n"
    for_ever = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(for_ever, seconds=1).status == "timeout"


def test_threads_count_as_processes() -> None:
    code = """
        import threading, time
        started = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
                started += 1
        except RuntimeError:
            print(started, flush=True)
    """
    assert run(code, processes=4, memory=2 << 30).stdout == "3\n"


def test_orphans_end_with_it() -> None:
    code = """
        import os, time
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.close(1), os.close(2)
                time.sleep(600)
            os._exit(0)
        print("gone")
    """
    result = run(code)
    assert (result.status, result.stdout) == ("ok", "gone\n"), result.text


def test_other_processes_cannot_be_killed() -> None:
    """Neither processes of the machine nor the first process of its own namespace can be killed."""
    assert os.strerror(errno.ESRCH) in run(f"import os; os.kill({os.getpid()}, 9)").stderr
    ignored = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    killed = errors_of("os.kill(1, 15)", "os.kill(0, 15)", "os.kill(-1, 15)", "os.kill(1, 9)", before=ignored)
    assert len(killed) == 4  # it goes on, and `errors_of` sees it end


def test_no_network() -> None:
    families = ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG")
    assert errors_of(*(f"socket.socket(socket.{family})" for family in families)) == [DENIED] * 6


def test_what_listens_on_this_machine_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0a-sandbox-of-the-tests")
        local.listen()
        found = errors_of(
            f"socket.create_connection({server.getsockname()!r}, timeout=5)",
            "socket.socket(socket.AF_UNIX).connect('\\0a-sandbox-of-the-tests')",
            "socket.getaddrinfo('example.org', 80)",
        )
        assert found == [DENIED, "Connection refused", "Temporary failure in name resolution"]
        for listening in (server, local):
            listening.settimeout(0.1)
            with pytest.raises(TimeoutError):
                listening.accept()


def test_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code sees no secrets of the environment, of files, of other processes, or of open descriptors."""
    monkeypatch.setenv("API_KEY", "secret")
    (tmp_path / "key").write_text("secret")
    assert run("import os; print(*sorted(os.environ))").stdout.split() == [
        *("HOME", "LANG", "OF_TEST", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH")
    ]
    paths = ["/proc/1/environ", "/proc/self/environ", "/etc/passwd", "/etc/hostname", str(tmp_path / "key")]
    found = errors_of(*(f"open({path!r}).read()" for path in (*paths, __file__)))
    assert found == ["No such file or directory"] * 6
    assert set(errors_of(*(f"os.fstat({number})" for number in range(4, 64)))) == {"Bad file descriptor"}


def test_nothing_is_written_but_in_its_folder() -> None:
    shown = ("'/'", "'/dev'", "'/lib'", "os.__file__", "sys.executable")
    assert set(errors_of(*(f"os.chmod({path}, 0o777)" for path in shown))) == {"Read-only file system"}
    links = (
        "os.symlink('/etc/passwd', 'passwd') or open('passwd')",
        "os.symlink('/', 'root') or open('root/../../etc/passwd')",
        "os.link('/dev/null', 'null')",
        "os.mknod('disk', 0o60600, os.makedev(8, 0))",
    )
    missing = "No such file or directory"
    assert errors_of(*links) == [missing, missing, "Invalid cross-device link", DENIED]


def test_a_disk_of_its_own() -> None:
    large = run("file = open('a', 'wb')\nwhile True: file.write(bytes(1 << 20))", disk=8 << 20)
    assert os.strerror(errno.ENOSPC) in large.stderr
    many = run("n = 0\nwhile True:\n    open(f'{n}', 'w').close()\n    n += 1")
    assert os.strerror(errno.ENOSPC) in many.stderr


def test_the_code_is_nobody_and_cannot_change_its_user() -> None:
    assert errors_of("os.setuid(0)", "os.chroot('/')", "os.setgroups([0])", "os.nice(-1)") == [DENIED] * 4
    code = """
        import ctypes, os
        libc, new_user = ctypes.CDLL(None, use_errno=True), 0x10000000 | 17
        clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        if not (child := libc.syscall(clone, new_user, 0, 0, 0, 0)):
            os._exit(0)
        print(os.getuid() == 0, os.getgroups(), child, os.strerror(ctypes.get_errno()))
    """
    assert run(code).stdout.split(" ", 1)[0] == "False"
    assert run(code).stdout.endswith(f"-1 {DENIED}\n")


def test_system_calls_that_no_limit_counts() -> None:
    numbers = isolation.MACHINES[os.uname().machine].refused
    code = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for number in {numbers}:
            print(libc.syscall(number, 0, 0, 0, 0, 0), os.strerror(ctypes.get_errno()))
    """
    assert run(code).stdout == f"-1 {DENIED}\n" * len(numbers)


def test_concurrent_programs_do_not_mix() -> None:
    """Each prints its own output, in a folder of its own."""
    sandbox = Sandbox(seconds=60)

    async def all_of_them() -> list[SandboxResult]:
        codes = (f"open('a', 'x')\nprint({i})" for i in range(16))
        return await asyncio.gather(*map(sandbox.run_async, codes))

    assert [result.text for result in asyncio.run(all_of_them())] == list(map(str, range(16)))
    with ThreadPoolExecutor(2) as threads:
        assert [result.text for result in threads.map(sandbox.run, ["print(1)"] * 2)] == ["1"] * 2


def test_the_python_tool_returns_the_output() -> None:
    assert asyncio.run(Sandbox().python("print(1 + 1)")) == "2"


def test_the_code_ends_with_its_parent(nothing_is_left: Callable[[], set[str]]) -> None:
    """The parent is killed by kill -9."""
    code = f"""
        from openrlhf.agents import isolation
        from openrlhf.agents.sandbox import ENVIRONMENT, Sandbox
        ENVIRONMENT["OF_TEST"] = isolation.__file__ = {isolation.__file__!r}
        sandbox = Sandbox(seconds=60)
        print("made", flush=True)
        sandbox.run("import time; time.sleep(50)")
    """
    with subprocess.Popen([sys.executable, "-c", dedent(code)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"made\n"
        wait_until(lambda: len(nothing_is_left()) == 4)  # the code, and two processes that isolate it
        process.kill()
    wait_until(lambda: not nothing_is_left())


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_code_that_kills_its_sandbox_is_killed() -> None:
    """A death after the code has started is the code's doing; before that the sandbox has failed."""
    sandbox, program = Sandbox(seconds=7), Path(isolation.__file__)
    program.write_text("import os, sys\nos.write(int(sys.argv[1]), b'started\\n')\nos.kill(os.getpid(), 9)")
    result = sandbox.run("")
    assert (result.status, result.exit_code) == ("killed", -9)
    program.write_text("raise RuntimeError('no')")
    with pytest.raises(SandboxUnavailable, match=r"RuntimeError: no"):
        sandbox.run("")


def test_on_another_system_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openrlhf.agents.sandbox.sys.platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="darwin"):
        Sandbox(seconds=9)


@pytest.mark.skipif(os.geteuid() != 0, reason="root, who may give rights up")
def test_where_the_kernel_says_no_nothing_runs(tmp_path: Path) -> None:
    """A container without CAP_SYS_ADMIN is such a place: an agent with a sandbox is refused before its run
    starts."""
    code = """
        from openrlhf.agents import isolation
        from openrlhf.agents.base import AgentExecutorBase
        from openrlhf.agents.sandbox import Sandbox
        drop_from_bounding_set, sys_admin = 24, 21
        isolation._call("prctl", drop_from_bounding_set, sys_admin)
        SANDBOX = Sandbox()
        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label):
                return {"reward": 1}
    """
    (tmp_path / "agent.py").write_text(dedent(code))
    refusal = "SandboxUnavailable: .* unshare: Operation not permitted"
    with pytest.raises(ValueError, match=refusal):
        check_agent_file(str(tmp_path / "agent.py"), "--train.agent_func_path")


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"),
    reason="root, and a Python that all may start",
)
def test_a_user_who_is_not_root() -> None:
    """The user is isolated by a namespace of users, in which each sandbox counts its own processes. The
    user's files are not the code's."""
    python = os.path.realpath("/usr/bin/python3")
    code = """
        import os, time
        os.kill(1, 2), os.kill(1, 15)
        print(os.getuid(), os.listdir("/sandbox"), os.path.exists("/proc"))
        children = 0
        try:
            while True:
                if not os.fork():
                    time.sleep(600)
                children += 1
        except BlockingIOError:
            print(children)
        for attempt in (lambda: open("/own/file", "w"), lambda: os.chroot("/")):
            try:
                attempt()
            except OSError as error:
                print(error.strerror)
    """
    with tempfile.TemporaryDirectory() as own:
        os.chown(own, 54321, 54321)
        visible = {path: os.path.realpath(path) for path in (*SYSTEM, python)} | {"/own": own}
        task = Sandbox()._task(dedent(code), "") | {"python": python, "visible": visible}
        told, ended = as_user(54321, python, json.dumps(task))
    assert (told, ended.stderr) == ("started\n0\n", "")
    assert ended.stdout == f"65534 ['main.py'] False\n7\nRead-only file system\n{DENIED}\n"


def as_user(user: int, python: str, task: str) -> tuple[str, subprocess.CompletedProcess[str]]:
    """Returns the report of isolation.py, and the output of its code."""
    reader, report = os.pipe()
    with open(reader) as told:
        ended = subprocess.run(
            [python, "-I", "-S", "-c", Path(isolation.__file__).read_text(), str(report)],
            input=task,
            capture_output=True,
            text=True,
            timeout=60,
            env={},
            pass_fds=[report],
            user=user,
            group=user,
            extra_groups=[],
        )
        os.close(report)
        return told.read(), ended
