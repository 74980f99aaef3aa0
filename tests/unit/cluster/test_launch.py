import json
import socket
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import refusals
import yaml
from ray.exceptions import ActorDiedError, RayTaskError, colorama
from refusals import refused

from openrlhf.cluster import environment, launch
from openrlhf.cluster.launch import cluster_address
from openrlhf.cluster.layout import resource_problems
from openrlhf.config.command import Source
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    KLConfig,
    PPOConfig,
    RefConfig,
    RewardConfig,
    TrainConfig,
    VllmConfig,
)
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop import rl_checks
from openrlhf.loop.machines import rank_counts


def config(
    actors=2, refs=2, engines=2, tensor_parallel=1, kl=0.01, estimator="rloo", reward=None, **train
) -> PPOConfig:
    return PPOConfig(
        critic=CriticConfig(num_gpus_per_node=3),
        reward=RewardConfig(model_name_or_path=reward, num_gpus_per_node=1),
        actor=ActorConfig(num_gpus_per_node=actors),
        ref=RefConfig(num_gpus_per_node=refs),
        vllm=VllmConfig(num_engines=engines, tensor_parallel_size=tensor_parallel),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(init_coef=kl)),
        train=TrainConfig(**train),
    )


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 6),
        ({"kl": 0.0}, 4),
        ({"colocate_actor_ref": True}, 4),
        ({"colocate_all": True}, 2),
        ({"tensor_parallel": 3}, 10),
        ({"estimator": "gae"}, 9),
        ({"estimator": "gae", "reward": "one,two"}, 10),
        ({"estimator": "gae", "reward": "one", "colocate_critic_reward": True}, 9),
        ({"estimator": "gae", "reward": "one", "colocate_all": True}, 2),
        ({"reward": "one", "colocate_critic_reward": True}, 7),
    ],
)
def test_exactly_enough_gpus_are_enough(changes, gpus):
    assert resource_problems(config(**changes), [{"GPU": gpus, "CPU": 1}]) == []
    (problem,) = resource_problems(config(**changes), [{"GPU": gpus - 1, "CPU": 1}])
    assert problem.code == ErrorCode.RESOURCES
    assert f"needs {gpus} GPUs" in problem.text and f"the cluster has {gpus - 1}." in problem.text


def test_the_text_names_every_flag():
    (problem,) = resource_problems(config(tensor_parallel=2), [{"GPU": 4.0, "CPU": 16.0}])
    needs = (
        "(--actor.num_nodes x --actor.num_gpus_per_node = 2, --ref.num_nodes x --ref.num_gpus_per_node = 2, "
        "--vllm.num_engines x --vllm.tensor_parallel_size = 4)"
    )
    assert needs in problem.text and "--train.colocate_all" in problem.text


def test_without_gpus_a_rank_needs_a_core():
    resources = [{"CPU": 4.0, "memory": 1e9}]
    assert resource_problems(config(actors=4, refs=4, engines=4), resources) == []
    problems = resource_problems(config(actors=8, refs=1, engines=9), resources)
    assert [(problem.flag, problem.value) for problem in problems] == [
        ("--actor.num_nodes x --actor.num_gpus_per_node", "= 8"),
        ("--vllm.num_engines x --vllm.tensor_parallel_size", "= 9"),
    ]
    assert all("4 CPU cores" in problem.text for problem in problems)


def test_two_ranks_run_on_any_machine():
    """Tests of two ranks need this on every machine."""
    assert resource_problems(config(), [{"CPU": 1.0}]) == []
    assert len(resource_problems(config(actors=3), [{"CPU": 1.0}])) == 1


def test_the_gpus_of_an_engine_are_on_one_node():
    nodes = [{"GPU": 6.0}, {"GPU": 6.0}]
    assert resource_problems(config(tensor_parallel=3), nodes) == []
    (problem,) = resource_problems(config(engines=1, tensor_parallel=8), nodes)
    assert (problem.flag, problem.value) == ("--vllm.tensor_parallel_size", "8")
    assert "6, 6 GPUs" in problem.text and "0 of 1 engines" in problem.text
    assert (
        len(resource_problems(config(actors=12, engines=3, tensor_parallel=4, colocate_all=True), nodes)) == 1
    )


def test_cores_keep_no_run_off_gpus():
    assert resource_problems(config(), [{"GPU": 6.0, "CPU": 1.0}]) == []


@pytest.fixture
def ray_folder(tmp_path, monkeypatch):
    """Returns the folder where `ray start` leaves the address of its cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


@pytest.fixture
def silent_port(monkeypatch):
    """Opens a port that listens and says nothing."""
    monkeypatch.setattr(launch, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_where_no_cluster_was_started_there_is_none(ray_folder):
    assert cluster_address() is None


def test_a_file_of_a_dead_cluster_is_passed_over(ray_folder, silent_port):
    (ray_folder / "ray_current_cluster").write_text(f"127.0.0.1:{silent_port}\n")
    start = time.monotonic()
    assert cluster_address() is None
    (ray_folder / "ray_current_cluster").write_text("127.0.0.1:1\n")
    assert cluster_address() is None
    assert time.monotonic() - start < 10


def test_a_named_cluster_that_is_dead_is_refused(ray_folder, silent_port, monkeypatch):
    for address in (f"127.0.0.1:{silent_port}", "127.0.0.1:1", "auto"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with refused(ErrorCode.CLUSTER, flag="RAY_ADDRESS", value=address) as refusal:
            cluster_address()
        assert "ray start --head" in refusal.value.text and "unset RAY_ADDRESS" in refusal.value.text


def test_the_address_of_the_dashboard_is_none_to_join(ray_folder, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with refused(ErrorCode.CLUSTER, flag="RAY_ADDRESS", value="http://127.0.0.1:8265") as refusal:
        cluster_address()
    assert "--address http://127.0.0.1:8265" in refusal.value.text


@pytest.mark.parametrize(
    ("nodes", "explicit", "expected"),
    [
        ([{"CPU": 4.0}], (), {"actor": 1, "ref": 1}),
        ([{"CPU": 4.0}], ("actor",), {"ref": 1}),
        ([{"CPU": 4.0}, {"GPU": 4.0}, {"GPU": 2.0}], (), {"actor": 2, "ref": 2}),
        ([{"GPU": 8.0}], (), {}),
        ([{"GPU": 16.0}], (), {}),
    ],
)
def test_ranks_that_nobody_counted_are_what_a_node_has(monkeypatch, nodes, explicit, expected):
    monkeypatch.setattr(launch, "available_nodes", lambda: nodes)
    said = {f"{role}.num_gpus_per_node": Source() for role in explicit}
    counts = rank_counts(config(actors=8, refs=8), said)
    assert counts == {f"{role}.num_gpus_per_node": count for role, count in expected.items()}


def test_where_all_ranks_are_counted_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(launch, "available_nodes", partial(pytest.fail, "the machine is looked at"))
    said = {"actor.num_gpus_per_node": Source()}
    assert rank_counts(config(colocate_all=True), said) == {}


def test_what_nobody_set_is_resolved_checked_and_shown(tmp_path, monkeypatch, capsys):
    """The batch divides among the ranks of the machine, and the printed configuration is the one that would
    run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("")
    argv = "--actor.model_name_or_path a/b --data.prompt_dataset c/d --reward.remote_url reward.py"
    argv = f"{argv} --rollout.batch_size 3 --train.batch_size 3 --rollout.n_samples_per_prompt 1".split()
    with pytest.raises(SystemExit):
        parse(PPO, [*argv, "--print_config"])
    (refusal,) = refusals.printed(capsys.readouterr().err)
    assert refusal.place == "--train.batch_size 3" and "the 8 " in refusal.text

    resolved = {"actor.num_gpus_per_node": 1}
    with pytest.raises(SystemExit) as stop:
        parse(PPO, [*argv, "--print_config"], resolve=lambda config, explicit, cluster: resolved)
    printed = capsys.readouterr()
    assert stop.value.code == 0
    assert yaml.safe_load(printed.out)["actor"]["num_gpus_per_node"] == 1
    assert printed.err.startswith("note: ") and printed.err.endswith(": --actor.num_gpus_per_node 1\n")


@pytest.mark.parametrize(("gpus", "told"), [(0, True), (1, False)])
def test_where_nobody_can_sleep_it_is_said_once(monkeypatch, capsys, gpus, told):
    monkeypatch.setattr(launch, "available_nodes", lambda: [{"GPU": gpus, "CPU": 2}])
    monkeypatch.setattr(rl_checks, "check_files", lambda *_, **options: None)
    asleep = config(actors=1, engines=1, colocate_all=True)
    asleep = replace(asleep, vllm=replace(asleep.vllm, enable_sleep=True))
    assert rl_checks.problems_outside(asleep) == []
    assert capsys.readouterr().err.startswith("note: --vllm.enable_sleep: ") == told


def never(*_):
    raise AssertionError("asked although the flags are wrong")


@pytest.mark.parametrize(
    "wrong",
    ["--actor.adam.lr fast", "--actor.adm.lr 1e-6", "--algo.kl.init_coef", "--eval.dataset gone.jsonl"],
)
def test_what_is_wrong_with_flags_is_said_before_anything_is_imported(monkeypatch, capsys, wrong):
    """Neither the cluster nor files are looked at: both need libraries."""
    argv = f"--data.prompt_dataset c/d --reward.remote_url http://r:1 {wrong}".split()
    with pytest.raises(SystemExit) as stop:
        parse(PPO, argv, resolve=never, inspect=never)
    places = {refusal.place for refusal in refusals.printed(capsys.readouterr().err)}
    assert stop.value.code == 2
    assert len(places) == 2 and "--actor.model_name_or_path" in places
    assert any(place.startswith(wrong.split()[0]) for place in places)


def test_where_things_run_is_checked_before_files(capsys):
    argv = ["--actor.model_name_or_path", "a/b", "--data.prompt_dataset", "c/d"]
    argv += ["--reward.remote_url", "http://r:1"]
    with pytest.raises(SystemExit):
        parse(PPO, [*argv, "--train.batch_size", "3"], inspect=never)
    (refusal,) = refusals.printed(capsys.readouterr().err)
    assert refusal.place == "--train.batch_size 3"
    with pytest.raises(SystemExit):
        parse(PPO, argv, inspect=lambda config: [UsageError(ErrorCode.RESOURCES, "too few GPUs")])
    (refusal,) = refusals.printed(capsys.readouterr().err)
    assert refusal.code == ErrorCode.RESOURCES


def test_what_a_user_sets_for_workers_stands(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert launch._common_options()["runtime_env"]["env_vars"]["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert launch._common_options()["runtime_env"]["env_vars"]["OMP_WAIT_POLICY"] == "ACTIVE"


def test_only_a_failure_of_a_worker_names_the_logs(monkeypatch, capsys):
    node = SimpleNamespace(get_logs_dir_path=lambda: "/tmp/ray/session/logs")
    monkeypatch.setattr(launch.ray._private.worker, "_global_node", node)
    with pytest.raises(ActorDiedError), launch.naming_logs():
        raise ActorDiedError
    assert " /tmp/ray/session/logs" in capsys.readouterr().err
    with pytest.raises(ValueError, match="a row"), launch.naming_logs():
        raise ValueError("a row")
    assert capsys.readouterr().err == ""


def test_processes_work_in_the_folder_of_their_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = launch._common_options()["runtime_env"]["env_vars"]
    monkeypatch.chdir("/")
    monkeypatch.setenv(environment.FOLDER, variables[environment.FOLDER])
    environment.enter()
    assert Path.cwd() == tmp_path
    monkeypatch.setenv(environment.FOLDER, str(tmp_path / "of another machine"))
    environment.enter()
    assert Path.cwd() == tmp_path


def test_a_trace_of_ray_has_no_colours_in_a_file(monkeypatch):
    trace = RayTaskError(
        "update", "Traceback (most recent call last):\nKeyError: 1", KeyError(1), "ray::update"
    )
    monkeypatch.setattr(colorama.Fore, "CYAN", "\x1b[36m")
    monkeypatch.setattr(colorama.Fore, "RESET", "\x1b[39m")
    assert str(trace).startswith("\x1b[36mray::update()\x1b[39m (pid=")
    launch._disable_colours()
    assert str(trace).startswith("ray::update() (pid=")


def test_what_ray_ignores_of_a_job_is_told(monkeypatch):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert launch._ignored_by_ray() == []
    given = {"setup_commands": ["pip install openrlhf"], "working_dir": "gcs://x.zip", "env_vars": {}}
    monkeypatch.setenv(launch.RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": given, "metadata": {}}))
    assert launch._ignored_by_ray() == ["setup_commands"]


def test_ray_leaves_a_folder_that_is_too_long_or_closed(tmp_path, monkeypatch, capsys):
    """Addresses have up to 64 bytes below Ray's folder: `/session_<time>_<process>/sockets/plasma_store`."""
    monkeypatch.setattr(launch, "_folders", [])
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setattr(launch, "unwritable", lambda place: None)
    assert launch._place_of_session() is None and launch._folders == []
    (long := tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    place = launch._place_of_session()
    (own,) = launch._folders
    session = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    assert len(f"{place}/{session}") <= 107 < len(f"{long}/ray/{session}")
    assert Path(own).stat().st_mode & 0o777 == 0o700 and Path(place).parent == Path(own)
    assert f"{own}, not {long}/ray" in capsys.readouterr().err
    monkeypatch.setattr(launch.ray, "shutdown", lambda: None)
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            launch.stop_ray()  # the message of the error names the logs
    assert Path(own).exists()
    launch.stop_ray()
    assert not Path(own).exists()
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setattr(launch, "unwritable", lambda place: "Read-only file system")
    assert launch._place_of_session() is not None
    launch.stop_ray()


def node(name: str, alive: bool = True, **resources: float) -> dict:
    return {"NodeID": name, "Alive": alive, "NodeManagerAddress": f"10.0.0.{name}", "Resources": resources}


def test_a_cluster_that_is_joined_is_told_with_its_resources(monkeypatch, capsys):
    """Another job holds a GPU and a half of the first machine; the machine without GPUs does not count."""
    nodes = [node("1", GPU=4.0, CPU=8.0), node("2", GPU=2.0, CPU=8.0), node("3", CPU=2.0)]
    free = {"1": {"GPU": 2.5, "CPU": 1.0}, "2": {"CPU": 8.0}, "3": {}}
    joined = []
    monkeypatch.setattr(launch.ray, "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(launch.ray, "init", lambda **options: joined.append(options))
    monkeypatch.setattr(launch.ray, "nodes", lambda: [*nodes, node("4", alive=False, GPU=8.0)])
    monkeypatch.setattr(launch.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "2"))
    monkeypatch.setattr(launch.ray._private.state, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(launch, "cluster_address", lambda: "10.0.0.1:6379")
    monkeypatch.setenv(
        launch.RAY_JOB_CONFIG_JSON_ENV_VAR, json.dumps({"runtime_env": {"pips": [], "pip": []}})
    )
    launch.start_ray()
    assert [known["NodeID"] for known in launch.living_nodes()] == ["2", "1", "3"], "this machine is first"
    assert launch.free_gpus() == [0.0, 2.5]
    (options,) = joined
    assert options["log_to_driver"] and "address" not in options
    said = capsys.readouterr().err
    assert "joined the Ray cluster at 10.0.0.1:6379: 3 nodes, 6 GPUs (2.5 of them free), 18 CPU cores" in said
    assert "Ray ignores pips; it reads " in said
    launch.start_ray()
    assert len(joined) == 1


def test_ray_starts_on_this_machine_without_another_cluster(monkeypatch, capsys):
    started, warmed = [], []

    class Warmer:
        def __init__(self, backends, variables):
            warmed.append(backends)
            assert variables is launch.WORKERS

        @contextmanager
        def starts_workers(self):
            warmed.append("before")
            yield
            warmed.append("after")

        def stop(self):
            warmed.append("stopped")

    def points(group):
        assert group == "openrlhf.attached.cluster"
        return [SimpleNamespace(load=lambda: Warmer), SimpleNamespace(load=lambda: lambda *_: None)]

    for name in ("_use_own_token", "_stay_on_loopback"):
        monkeypatch.setattr(launch, name, lambda: None)
    monkeypatch.setattr(launch, "start_process_reaper", lambda: started.append("reaper"))
    monkeypatch.setattr(launch, "entry_points", points)
    monkeypatch.setattr(launch, "_place_of_session", lambda: "/short")
    monkeypatch.setattr(launch, "cluster_address", lambda: None)
    monkeypatch.setattr(launch, "_last_started", lambda: "127.0.0.1:1")
    monkeypatch.setattr(launch.ray, "init", lambda **options: started.append(options))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    launch.start_ray(["torch", "vllm"])
    assert warmed == [["torch", "vllm"], "before", "after"]
    launch.cool_down()
    assert warmed.pop() == "stopped"
    reaper, options = started
    assert reaper == "reaper" and options["address"] == "local" and options["_temp_dir"] == "/short"
    assert options["object_store_memory"] == launch.OBJECT_STORE_BYTES and not options["include_dashboard"]
    said = capsys.readouterr().err
    assert "names a cluster that is gone (127.0.0.1:1): started Ray on this machine" in said
    monkeypatch.setenv("RAY_ADDRESS", "local")
    launch.start_ray(["torch"])
    assert capsys.readouterr().err == "started Ray on this machine\n"
    launch.cool_down()


def test_a_package_that_cannot_prepare_workers_is_named(monkeypatch):
    point = EntryPoint("wrong", "no_such_house:start", "openrlhf.attached.cluster")
    monkeypatch.setattr(launch, "entry_points", lambda group: [point])
    with refused(ErrorCode.USER_CODE, value="entry point openrlhf.attached.cluster: no_such_house:start"):
        launch._start_warmers(["torch"])
