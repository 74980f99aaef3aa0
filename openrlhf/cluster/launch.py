"""Joins or starts a Ray cluster, and checks that a run fits it before anything is loaded."""

import atexit
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import ray
import torch
from ray._common.utils import get_default_ray_temp_dir, get_ray_address_file
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import (
    AuthenticationTokenLoader,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.utils import read_ray_address
from ray.core.generated import gcs_service_pb2
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import RayError
from ray.runtime_env import RuntimeEnv

from openrlhf.cluster import environment
from openrlhf.cluster.layout import Layout, Nodes, compute_layout, total
from openrlhf.cluster.process_reaper import start_process_reaper
from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ErrorCode, UsageError, counted, notify
from openrlhf.files import socket_folder, unwritable
from openrlhf.observability.hooks.load import call
from openrlhf.plugins import entry_points

OBJECT_STORE_BYTES = 512 << 20
"""Size of Ray's object store in bytes on a machine without a GPU. Ray's default would be a third of the
memory."""

ANSWER_SECONDS = 5.0
"""Seconds that a cluster has to answer."""

WORKERS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Waiting OpenMP threads sleep instead of spinning on cores that other processes need.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Default environment variables of every worker. Variables that the user sets take precedence."""

LONGEST_PATH = 43
"""Maximum bytes of the path of Ray's folder: the addresses of its sockets have 64 more, and at most 107."""

_folders: list[str] = []
"""The folder of Ray's session, if it is not where Ray has it by default."""

_warmers: list[Any] = []
"""Objects of the entry points `openrlhf.attached.cluster`, which prepare the start of workers."""


def start_ray(backends: Sequence[str] = ()) -> None:
    """Joins the cluster that RAY_ADDRESS names, or one that `ray start` started on this machine and that is
    still alive. Without one, starts Ray on this machine. Prints on stderr which cluster it is. `backends`:
    training backend and engine of the workers, if they are known."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if not sys.stderr.isatty():
        _disable_colours()
    # a job's variables are set in this process already
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    if address := cluster_address():
        _join(address)
    else:
        _start_here(backends)


@contextmanager
def naming_logs() -> Iterator[None]:
    """Prints the folder of Ray's logs on stderr if a RayError is raised inside."""
    try:
        yield
    except RayError:
        node = ray._private.worker._global_node
        if node is not None:
            notify(f"logs of Ray and of every worker on this machine: {node.get_logs_dir_path()}")
        raise


def stop_ray() -> None:
    """Leaves the cluster, and ends it if `start_ray` started it. After an error its logs stay."""
    ray.shutdown()
    cool_down()
    while _folders and sys.exc_info()[0] is None:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def cluster_address() -> str | None:
    """Returns host:port of the cluster to join; None if Ray must be started. Raises UsageError if RAY_ADDRESS
    is not host:port, or names a cluster that does not answer."""
    named = os.environ.get("RAY_ADDRESS", "")
    if named == "local":
        return None
    if "://" in named:
        text = (
            "a run joins a cluster by host:port, with the port of `ray start --head` (6379).\n"
            f"For `ray job submit` use --address {named}, and unset RAY_ADDRESS."
        )
        raise UsageError(ErrorCode.CLUSTER, text, flag="RAY_ADDRESS", value=named)
    address = _last_started() if named in ("", "auto") else named
    if address and _is_alive(address):
        return address
    if named:
        text = (
            "no Ray cluster answers at this address.\nStart one there with `ray start --head`, set another "
            "host:port, or `unset RAY_ADDRESS` to start Ray on this machine."
        )
        raise UsageError(ErrorCode.CLUSTER, text, flag="RAY_ADDRESS", value=named)
    return None


def available_nodes() -> Nodes:
    """Returns the resources of each node of the running cluster, which this process joins if there is one.
    Otherwise returns the resources of this machine. Never starts a cluster."""
    if not ray.is_initialized():
        if cluster_address() is None:
            return [{"GPU": torch.cuda.device_count(), "CPU": len(os.sched_getaffinity(0))}]
        start_ray()
    return [node["Resources"] for node in living_nodes()]


def living_nodes() -> list[dict[str, Any]]:
    """Returns Ray's records of the live nodes of the joined cluster, this process's own node first."""
    here = ray.get_runtime_context().get_node_id()
    living = [node for node in ray.nodes() if node["Alive"]]
    return sorted(living, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))


def node_names() -> dict[str, str]:
    """Returns Ray's node id -> "address (host name)" of each live node, for messages."""
    return {n["NodeID"]: f"{n['NodeManagerAddress']} ({n['NodeManagerHostname']})" for n in living_nodes()}


def free_gpus() -> list[float]:
    """Returns the free GPUs of each node that has GPUs."""
    free = ray._private.state.available_resources_per_node()
    nodes = [node for node in living_nodes() if node["Resources"].get("GPU")]
    return [free.get(node["NodeID"], {}).get("GPU", 0.0) for node in nodes]


def cluster_has_gpus() -> bool:
    """Returns True if any node of the cluster, or this machine without a cluster, has a GPU."""
    return total(available_nodes(), "GPU") > 0


def _join(address: str) -> None:
    ray.init(**_common_options())
    nodes = available_nodes()
    gpus, free, cores = total(nodes, "GPU"), sum(free_gpus()), total(nodes, "CPU")
    taken = f" ({free:g} of them free)" if free < gpus else ""
    count = counted(len(nodes), "node")
    notify(f"joined the Ray cluster at {address}: {count}, {counted(gpus, 'GPU')}{taken}, {cores} CPU cores")
    if ignored := _ignored_by_ray():
        known = sorted(field for field in RuntimeEnv.known_fields if not field.startswith("_"))
        notify(
            f"note: --runtime-env-json: Ray ignores {', '.join(ignored)}; it reads {', '.join(known)}. "
            'Packages are installed on every node before `ray start`, or named under "pip".'
        )


def _ignored_by_ray() -> list[str]:
    """Returns the fields of `--runtime-env-json` of `ray job submit` that Ray ignores; empty outside of a
    job."""
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
    return sorted((job.get("runtime_env") or {}).keys() - RuntimeEnv.known_fields)


def _start_here(backends: Sequence[str]) -> None:
    on_gpu = torch.cuda.is_available()
    options = _common_options() | {"_temp_dir": _place_of_session()}
    _use_own_token()
    store = None if on_gpu else OBJECT_STORE_BYTES
    _stay_on_loopback()
    start_process_reaper()
    # Workers that Ray starts in advance lack the variables of a run's processes: none of them would be used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with ExitStack() as held:
        if not on_gpu:
            _start_warmers(backends)
            for warmer in _warmers:
                held.enter_context(warmer.starts_workers())
        ray.init(address="local", include_dashboard=on_gpu, object_store_memory=store, **options)
    gone = None if os.environ.get("RAY_ADDRESS") else _last_started()
    reason = f"{get_ray_address_file(None)} names a cluster that is gone ({gone}): " if gone else ""
    notify(f"{reason}started Ray on this machine")


def _place_of_session() -> str | None:
    """Returns a folder for Ray's session that no other user can enter; None if Ray's own place will do."""
    usual = get_default_ray_temp_dir()
    too_long = len(os.fsencode(usual)) > LONGEST_PATH and f"sockets need at most {LONGEST_PATH} bytes"
    if not (reason := unwritable(usual) or too_long):
        return None
    _folders.append(tempfile.mkdtemp(prefix="ray-", dir=socket_folder()))
    notify(f"note: Ray's folder is {_folders[-1]}, not {usual}: {reason}")
    return f"{_folders[-1]}/r"  # Ray opens it to all users


def warm_up(backends: Sequence[str]) -> None:
    """Lets attached packages prepare the start of workers, on a machine without the device files of a GPU on
    which `start_ray` will probably start Ray. `backends`: see `start_ray`."""
    has_devices = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    is_alone = os.environ.get("RAY_ADDRESS", "local") == "local" and _last_started() is None
    if is_alone and not has_devices and not ray.is_initialized():
        _start_warmers(backends)


def _start_warmers(backends: Sequence[str]) -> None:
    """Calls what the entry points name, with the backends and the default variables of workers. It returns an
    object with a context `starts_workers` around the start of Ray, and with `stop`; or None."""
    if not _warmers:
        points = entry_points(group="openrlhf.attached.cluster")
        _warmers.extend(filter(None, (call(point, backends, WORKERS) for point in points)))
        atexit.register(cool_down)


def cool_down() -> None:
    """Ends what `warm_up` has started."""
    while _warmers:
        _warmers.pop().stop()


def _common_options() -> dict[str, Any]:
    own = {name: os.environ.get(name, value) for name, value in WORKERS.items()}
    runtime_env = {"env_vars": environment.forwarded() | own}
    return {"runtime_env": runtime_env, "log_to_driver": True, "logging_level": "ERROR"}


def _stay_on_loopback() -> None:
    """Makes 127.0.0.1 the address of this machine for Ray, as on systems where it starts no clusters. All of
    its ports, and those of ranks and engines, then listen there alone."""
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # of the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False


def _use_own_token() -> None:
    """Sets an authentication token for this cluster only. Otherwise Ray would write one to ~/.ray, and every
    later `ray start` of this user would require it."""
    tokens = AuthenticationTokenLoader.instance()
    if not tokens.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        tokens.reset_cache()


def _disable_colours() -> None:
    """Removes colours from Ray's tracebacks, which Ray would write into files, too."""
    colours = ray.exceptions.colorama.Fore
    colours.CYAN = colours.RESET = ""


def _last_started() -> str | None:
    """Returns the address of the last cluster that `ray start` started on this machine, which may be gone;
    None without one."""
    return read_ray_address() or None


def _is_alive(address: str) -> bool:
    """Returns True if a cluster answers at `address`. Raises UsageError if it rejects this user's token."""
    answer = _ask(address)
    if answer is grpc.StatusCode.UNAUTHENTICATED:
        logging.getLogger("ray").setLevel(logging.ERROR)  # otherwise Ray warns that a token exists
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        if _ask(address) is answer:
            text = (
                "this Ray cluster requires its token.\nPut the output of `ray get-auth-token` on its head "
                "node into ~/.ray/auth_token or RAY_AUTH_TOKEN; RAY_AUTH_MODE must not be disabled."
            )
            raise UsageError(ErrorCode.CLUSTER, text, value=address)
    return answer in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)


def _ask(address: str) -> grpc.StatusCode:
    channel = init_grpc_channel(address, GLOBAL_GRPC_OPTIONS)  # bypasses proxies, like Ray's own channels
    with closing(channel):
        request = gcs_service_pb2.CheckAliveRequest()  # pyrefly: ignore[missing-attribute]  made when imported
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(request, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def check_resources(config: PPOConfig) -> Layout:
    """Returns the placement of the run in the cluster, or on this machine. Raises UsageError if it does not
    fit."""
    return compute_layout(config, available_nodes())
