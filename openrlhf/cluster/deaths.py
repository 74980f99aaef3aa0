"""Which process of a run has died, in words for people."""

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
"""Seconds in which the processes of a run answer whether they live."""
NAMES = {
    "EngineActor": "a vLLM engine",
    "PolicyWorker": "a rank of the policy",
    "CriticWorker": "a rank of the critic",
    "FrozenWorker": "a rank of the reference or teacher",
    "RewardWorker": "a rank of the reward models",
}


@contextmanager
def naming_the_dead(members: Sequence[ActorHandle] = ()) -> Iterator[None]:
    """Where an error inside follows from the death of a process, RuntimeError says which process and where
    its log is. `members`: the processes that are asked where the error itself does not say."""
    try:
        yield
    except RayError as error:
        told = _failed_engines(error) or _death_in(error) or _death_among(members)
        if told is None:
            raise
        raise RuntimeError(told) from error


def in_words(error: RayError) -> str:
    """What became of the process that an error comes from: how it died, or what it raised."""
    cause = _cause(error)
    return _death_in(error) or f"{type(cause).__name__}: {cause}"


def _cause(error: BaseException | None) -> BaseException | None:
    """What the task raised, also where it waited for a task that raised it."""
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def _engine(text: str) -> str:
    """`text`: what Ray says of an actor whose vLLM process has died."""
    (*_, (pid, ip)) = re.findall(r"EngineActor[^\n]*?pid=(\d+), ip=([^,)]+)", text) or [("?", "?")]
    return _lines(NAMES["EngineActor"], f"the process that computes for process {pid} on {ip}", pid)


def _failed_engines(error: BaseException) -> str | None:
    """What a weight sync says of them."""
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
    """Ranks that wait for a dead one often fail before it is known to be dead."""
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
    """`pid`: of the process whose log tells more."""
    return (
        f"{name} died: {which} was killed (out of memory?) or crashed.\n"
        f"Its log is {_log(pid)}; OPENRLHF_DEBUG=1 shows all that Ray says."
    )


def _log(pid: str) -> str:
    """The file, or where it is on another machine."""
    node = ray._private.worker._global_node
    folder = Path(node.get_logs_dir_path() if node else "/tmp/ray/session_latest/logs")
    here = sorted(folder.glob(f"worker-*-{pid}.err"))
    return str(here[0] if here else folder / f"worker-*-{pid}.err")
