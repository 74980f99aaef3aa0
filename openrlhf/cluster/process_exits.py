"""Turns the death of a process of a run into a readable error with the process's role and log."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from openrlhf.backends.rollout import EngineDied
from openrlhf.backends.weight_sync.client import EnginesFailedError
from openrlhf.errors import ErrorCode, RunError

DEATHS = (RayActorError, OutOfMemoryError)
"""Ray's errors about a process that is gone; in the second one Ray's memory monitor ended it."""
PATIENCE = 5.0
"""Seconds that processes have to prove that they are alive."""
NAMES = {
    "EngineActor": "a vLLM engine",
    "PolicyWorker": "a rank of the policy",
    "CriticWorker": "a rank of the critic",
    "FrozenWorker": "a rank of the reference or teacher",
    "RewardWorker": "a rank of the reward models",
}


@contextmanager
def explaining_exits(members: Callable[[], Sequence[ActorHandle]] = list) -> Iterator[None]:
    """Converts a RayError raised inside, if the death of a process caused it, to a RunError that names the
    process and its log. `members`: returns the processes that are checked if the error does not name the dead
    one."""
    try:
        yield
    except RayError as error:
        cause = find_cause(error)
        if isinstance(cause, EnginesFailedError):
            raise RunError(cause.code, cause.text) from error
        death = _death_in(error) or next(map(_described, dead_among(members()).values()), None)
        if death is None:
            raise
        raise death from error


def is_lost_process(error: Exception) -> bool:
    """Tells whether an error follows from the end of a process of the run, or of Ray."""
    if isinstance(error, RunError):
        return error.code in (ErrorCode.ENGINE_FAILED, ErrorCode.WORKER_FAILED)
    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


def is_death(error: BaseException) -> bool:
    """Tells whether an engine's error means that its process is gone or unusable."""
    cause = find_cause(error)
    if isinstance(cause, RunError):
        return cause.code is ErrorCode.ENGINE_FAILED and not isinstance(cause, EnginesFailedError)
    return isinstance(cause, DEATHS)


def describe_cause(error: BaseException) -> str:
    """Returns a description of an error's cause: the death of a process, or the exception that a process
    raised."""
    cause = find_cause(error)
    if type(cause) is RunError or (isinstance(cause, EngineDied) and error is cause):
        return cause.text
    return str(_death_in(error) or f"{type(cause).__name__}: {cause}")


def find_cause(error: BaseException | None) -> BaseException | None:
    """Returns the original exception of a failed task, or of a task on which it depended."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def _death_in(error: BaseException | None) -> RunError | None:
    """Returns an error for the process whose death caused `error`; None if it has another cause."""
    cause = find_cause(error)
    if isinstance(cause, EngineDied):  # Ray's message names the actor, not the dead child process
        (*_, (pid, ip)) = re.findall(r"EngineActor[^\n]*?pid=(\d+), ip=([^,)]+)", str(error)) or [("?", "?")]
        return _death("EngineActor", f"the process that computes for process {pid} on {ip}", pid)
    if isinstance(cause, DEATHS) and not getattr(cause, "actor_init_failed", False):
        return _described(cause)
    return None


def dead_among(members: Sequence[ActorHandle]) -> dict[int, RayError]:
    """Returns index -> death of the dead processes among `members`. Ranks that wait for a dead rank often
    fail before Ray notices its death."""
    refs: dict[ray.ObjectRef, int] = {member.__ray_ready__.remote(): i for i, member in enumerate(members)}
    answered = ray.wait([*refs], num_returns=len(refs), timeout=PATIENCE)[0] if refs else []
    deaths: dict[int, RayError] = {}
    for ref in answered:
        try:
            ray.get(ref, timeout=PATIENCE)
        except DEATHS as death:
            deaths[refs[ref]] = death
    return deaths


def _described(death: RayError) -> RunError:
    if isinstance(death, OutOfMemoryError):
        return _ended_by_ray(str(death))
    said = dict(re.findall(r"^\s*(class_name|pid|ip): (\S+)", str(death), re.MULTILINE))
    actor, pid, where = (said.get(key, "") for key in ("class_name", "pid", "ip"))
    text = f"process {pid} on {where or 'an unknown machine'}" if pid else str(death).splitlines()[0]
    return _death(actor, text, pid)


def _ended_by_ray(said: str) -> RunError:
    """Returns the error for a process that Ray's memory monitor ended. `said`: the monitor's report."""
    actor, pid = _found(r"Selected to kill: .*?task name=(\w+).*?pid=(\d+)", said) or ("", "?")
    where, used, limit = _found(r"\(IP: ([^,)]+).*? was (\S+) used / (\S+)", said) or ("?", "?", "?")
    largest = re.findall(r"^\d+\t[\d.]+\t.*", said, re.MULTILINE)[:3]
    table = "\n".join(["pid\tGB\tcommand", *largest])
    reason = (
        f"Ray ended process {pid} on {where}, whose memory was full ({used} of {limit}). The largest "
        f"processes:\n{table}\nEnd those of others, or make the run smaller: `openrlhf plan` estimates its "
        "memory. OPENRLHF_DEBUG=1 shows Ray's whole error."
    )
    return _death(actor, reason, "")


def _found(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    return match.groups() if match else ()


def _death(actor: str, reason: str, pid: str) -> RunError:
    """Returns the error for a dead process. `actor`: name of the actor's class; `pid`: the process whose log
    the message names; `reason`: description of the process, or of its end if `pid` is unknown."""
    if pid:
        reason += f" was killed (out of memory?) or crashed.\nIts log is {_log(pid)}; "
        reason += "OPENRLHF_DEBUG=1 shows Ray's whole error."
    code = ErrorCode.ENGINE_FAILED if actor == "EngineActor" else ErrorCode.WORKER_FAILED
    return RunError(code, f"{NAMES.get(actor, 'a process of the run')} died: {reason}")


def _log(pid: str) -> str:
    """Returns the path of a process's stderr log, or a glob pattern if the log is on another machine."""
    folder = logs_folder()
    here = sorted(folder.glob(f"worker-*-{pid}.err"))
    return str(here[0] if here else folder / f"worker-*-{pid}.err")


def logs_folder() -> Path:
    """Returns the folder of Ray's logs on this machine."""
    node = ray._private.worker._global_node
    return Path(node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs")
