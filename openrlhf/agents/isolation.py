"""The program that a sandbox starts: it enters namespaces of its own, runs Python code in an isolated child
process and reports the exit code.

The command is `python -I -S isolation.py REPORT`, with a `Task` as JSON on stdin. The code writes to the
program's stdout and stderr. The file descriptor REPORT receives the line "started" and a line with the code's
exit code (negative: the signal), or the line "refused" with the reason. SIGTERM ends the code and all
processes that it started. The program imports only the standard library, since nothing else may be visible.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any, NoReturn, TypedDict


class Task(TypedDict):
    python: str
    code: str
    stdin: str
    environment: dict[str, str]
    visible: dict[str, str]
    """Paths that the code may read, each with the real path of its file or folder."""
    disk: int
    """Size of HOME, the only writable folder, in bytes."""
    limits: dict[str, int]
    """Limits by their names in the module `resource`."""


HOME = "/sandbox"
ROOT = "/tmp"
"""Mount point of the code's file system, visible to this process and its children only."""
NOBODY = 65534
LIBC = ctypes.CDLL(None, use_errno=True)

# <sched.h>: mount, cgroup, uts, ipc, pid, net; user
NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
USER_NAMESPACE = 0x10000000
# <sys/mount.h>
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
# <sys/prctl.h>
PARENT_DEATH_SIGNAL, SECCOMP, NO_NEW_PRIVILEGES = 1, 22, 38


def main() -> None:
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    task: Task = json.load(sys.stdin)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    try:
        _call("prctl", PARENT_DEATH_SIGNAL, signal.SIGTERM)
        user = _separate()
        if not (first := os.fork()):
            _be_first_process(task, user, report)
    except Exception as error:
        _refuse(report, error)
    if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
        os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)  # returns once the namespace has no processes left


def _call(function: str, *arguments: Any) -> None:
    """Calls a function of libc. Raises OSError with its name if it fails."""
    if getattr(LIBC, function)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _refuse(report: int, error: Exception) -> NoReturn:
    os.write(report, f"refused {error}\n".encode())
    os._exit(1)


def _separate() -> int:
    """Creates namespaces for the child processes and returns the user id under which the code runs: an
    otherwise unused id if started by the machine's root, else NOBODY in a new user namespace."""
    _write("/proc/self/oom_score_adj", "1000")  # the OOM killer ends the code first
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        is_root = os.geteuid() == 0 and file.read().split() == ["0", "0", "4294967295"]
    if is_root:
        _call("unshare", NAMESPACES)
        return 2_000_000_000 + os.getpid()
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NAMESPACES | USER_NAMESPACE)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
    _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    return NOBODY


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _be_first_process(task: Task, user: int, report: int) -> NoReturn:
    """Becomes the first process of the PID namespace, with which all its other processes end."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # by default a first process ignores SIGINT from inside
    try:
        _call("prctl", PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _leave_the_file_system(task, user)
        if not (child := os.fork()):
            _run(task, user, report)
    except Exception as error:
        _refuse(report, error)
    ended, status = os.wait()  # bounded: the sandbox's owner kills it after `seconds`
    while ended != child:  # the first process also reaps orphans
        ended, status = os.wait()  # bounded: the sandbox's owner kills it after `seconds`
    os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _leave_the_file_system(task: Task, user: int) -> None:
    """Changes root into a file system of the read-only visible paths and a writable HOME."""
    devices = {path: path for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")}
    visible = sorted((task["visible"] | devices).items())
    opened = [(path, os.open(real_path, os.O_PATH)) for path, real_path in visible]
    _mount("", "/", RECURSIVE | PRIVATE)
    _mount("tmpfs", ROOT, NOSUID, "size=1m,mode=755", kind="tmpfs")
    os.mkdir(ROOT + HOME)
    options = f"size={task['disk']},nr_inodes=4096,mode=700,uid={user},gid={user}"
    _mount("tmpfs", ROOT + HOME, NOSUID | NODEV, options, kind="tmpfs")
    for path, descriptor in opened:
        _show(f"/proc/self/fd/{descriptor}", ROOT + path)
        if path not in devices:
            _protect(ROOT + path, AT_RECURSIVE)
    for path in (ROOT + "/tmp", ROOT + "/dev/shm"):
        if not os.path.lexists(path):
            os.symlink(HOME, path)
    _protect(ROOT)
    os.chroot(ROOT)  # a process without capabilities cannot leave it or create user namespaces in it
    os.chdir(HOME)


def _mount(source: str, target: str, flags: int, options: str = "", kind: str = "") -> None:
    arguments = source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    try:
        _call("mount", *arguments)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({target})") from None


def _show(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
    _mount(source, target, BIND | RECURSIVE)


def _protect(path: str, flags: int = 0) -> None:
    attributes = struct.pack("QQQQ", READ_ONLY | NOSUID | NODEV, 0, 0, 0)
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))


def _run(task: Task, user: int, report: int) -> NoReturn:
    """Drops privileges, sets the limits and replaces this process by the code."""
    os.setsid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _write("main.py", task["code"])
    _write("stdin", task["stdin"])
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.unlink("stdin")
    if user == NOBODY:
        task["limits"]["RLIMIT_NPROC"] += 2  # this program's two processes belong to the same user
    for name, value in task["limits"].items():
        _limit(getattr(resource, name), value)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _refuse_system_calls()
    os.write(report, b"started\n")
    os.execve(task["python"], [task["python"], "-s", "-B", "main.py"], task["environment"])


def _limit(which: int, value: int) -> None:
    _, largest = resource.getrlimit(which)
    value = value if largest == resource.RLIM_INFINITY else min(value, largest)
    resource.setrlimit(which, (value, value))


class Machine:
    """System call numbers of a processor architecture."""

    def __init__(self, audit: int, socket: int, refused: tuple[int, ...]) -> None:
        """`audit`: the AUDIT_ARCH constant. `socket`: the number of socket(). `refused`: the numbers of
        ptrace, process_vm_readv, process_vm_writev, unshare, setns, keyctl, add_key, request_key, bpf,
        perf_event_open, userfaultfd, memfd_create, shmget, msgget and semget."""
        everywhere = (425, 447)  # io_uring_setup, memfd_secret
        self.audit, self.socket = audit, socket
        self.refused = (*refused, *everywhere)


MACHINES = {
    "x86_64": Machine(
        0xC000003E, 41, (101, 310, 311, 272, 308, 250, 248, 249, 321, 298, 323, 319, 29, 68, 64)
    ),
    "aarch64": Machine(
        0xC00000B7, 198, (117, 270, 271, 97, 268, 219, 217, 218, 280, 241, 282, 279, 194, 186, 190)
    ),
}
"""Architectures by name. The refused calls reach memory outside the limits, kernel internals or other
processes."""


def _refuse_system_calls() -> None:
    """Installs a seccomp filter for this process and its children. Only Unix-domain sockets are allowed."""
    machine = MACHINES[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    refused, kill, allowed, unix = 0x50000 | 1, 0x80000000, 0x7FFF0000, 1
    program = [(load, 0, 0, 4), (equal, 1, 0, machine.audit), (answer, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 1 << 30), (answer, 0, 0, refused)]  # x86_64's second table
    for number in machine.refused:
        program += [(equal, 0, 1, number), (answer, 0, 0, refused)]
    program += [(equal, 0, 3, machine.socket), (load, 0, 0, 16), (equal, 1, 0, unix), (answer, 0, 0, refused)]
    program += [(answer, 0, 0, allowed)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _call("prctl", SECCOMP, 2, header, 0, 0)


if __name__ == "__main__":
    main()
