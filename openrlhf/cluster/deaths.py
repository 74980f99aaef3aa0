"""Readable errors for a dead process of a run: which process it was, and where its log is."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from openrlhf.backends.rollout import EngineDied
from openrlhf.backends.weight_sync.client import EnginesFailedError

PATIENCE = 5.0
"""Seconds that processes have to answer whether they are alive."""
NAMES = {
    "EngineActor": "a vLLM engine",
    "PolicyWorker": "a rank of the policy",
    "CriticWorker": "a rank of the critic",
    "FrozenWorker": "a rank of the reference or teacher",
    "RewardWorker": "a rank of the reward models",
}


@contextmanager
def naming_the_dead(members: Sequence[ActorHandle] = ()) -> Iterator[None]:
    """Turns a RayError inside that follows from the death of a process into a RuntimeError with the process
    and its log. `members`: processes to ask whether they are alive when the error does not name the dead
    one."""
    try:
        yield
    except RayError as error:
        told = _failed_engines(error) or _death_in(error) or _death_among(members)
        if told is None:
            raise
        raise RuntimeError(told) from error


def in_words(error: RayError) -> str:
    """Describes an error by its cause: how the process died, or the exception that it raised."""
    cause = _cause(error)
    return _death_in(error) or f"{type(cause).__name__}: {cause}"


def _cause(error: BaseException | None) -> BaseException | None:
    """Returns the exception that a task raised, also one that came from a task it depended on."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def _engine(text: str) -> str:
    """Describes a dead vLLM process. `text`: Ray's error from the actor that drove it."""
    (*_, (pid, ip)) = re.findall(r"EngineActor[^\n]*?pid=(\d+), ip=([^,)]+)", text) or [("?", "?")]
    return _lines(NAMES["EngineActor"], f"the process that computes for process {pid} on {ip}", pid)


def _failed_engines(error: BaseException) -> str | None:
    """Returns the message of a weight sync in which engines failed, else None."""
    cause = _cause(error)
    return str(cause) if isinstance(cause, EnginesFailedError) else None


def _death_in(error: BaseException | None) -> str | None:
    cause = _cause(error)
    if isinstance(cause, EngineDied):
        return _engine(str(error))
    if isinstance(cause, RayActorError) and not cause.actor_init_failed:
        return _described(cause)
    return None


def _death_among(members: Sequence[ActorHandle]) -> str | None:
    """Asks `members` which of them is dead: ranks that wait for a dead one often fail before Ray knows that
    it died."""
    refs = [member.__ray_ready__.remote() for member in members]
    answered = ray.wait(refs, num_returns=len(refs), timeout=PATIENCE)[0] if refs else []
    for ref in answered:
        try:
            ray.get(ref)
        except RayActorError as death:
            return _described(death)
    return None


def _described(death: RayActorError) -> str:
    said = dict(re.findall(r"^\s*(class_name|pid|ip): (\S+)", str(death), re.MULTILINE))
    name = NAMES.get(said.get("class_name", ""), "a process of the run")
    if "pid" not in said:
        return f"{name} died: {str(death).splitlines()[0]}"
    return _lines(name, f"process {said['pid']} on {said.get('ip', 'an unknown machine')}", said["pid"])


def _lines(name: str, which: str, pid: str) -> str:
    """Formats the message. `pid`: the process whose log it names."""
    return (
        f"{name} died: {which} was killed (out of memory?) or crashed.\n"
        f"Its log is {_log(pid)}; OPENRLHF_DEBUG=1 shows all that Ray says."
    )


def _log(pid: str) -> str:
    """Returns the path of a process's stderr log; a pattern if the log is on another machine."""
    node = ray._private.worker._global_node
    folder = Path(node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs")
    here = sorted(folder.glob(f"worker-*-{pid}.err"))
    return str(here[0] if here else folder / f"worker-*-{pid}.err")
