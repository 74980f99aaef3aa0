"""Weight syncs and replacements of all engines of a run. Engines' processes, the policy's ranks and Ray are
stand-ins that answer at once."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from refusals import refused

from openrlhf.algorithms.mismatch import PROBE
from openrlhf.backends.weight_sync.client import EnginesFailedError
from openrlhf.backends.weight_sync.stored_weights import EngineProbe, Limit
from openrlhf.cluster import engine_pool
from openrlhf.cluster.engine_pool import RESTARTS, EnginePool
from openrlhf.config.ppo import EvalConfig, PPOConfig, RolloutConfig, VllmConfig
from openrlhf.config.sections import LoraConfig
from openrlhf.errors import ErrorCode
from openrlhf.rollout import dispatch
from openrlhf.types import Prompt, PromptGroup

LOG_PROBS = torch.tensor([-1.0, -3.0, -2.0])


class Call:
    """A call of Ray that is done."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def future(self) -> "Call":
        return self

    def add_done_callback(self, function: Callable) -> None:
        """Never calls it: no engine of these tests finishes a group."""


class Policy:
    """The policy's ranks, and the engines' weights. The first sync fails with `errors`, one for each try."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls, self.log_probs = list(errors), [], LOG_PROBS

    def open_weight_sync(self, client: Any, backend: str) -> SimpleNamespace:
        self.calls.append(("open", client.engines, client.workers_per_engine, backend))
        return SimpleNamespace(result=lambda: None)

    def send_weights(
        self, version: int, probe: Any = None, adapter_seed: int | None = None
    ) -> SimpleNamespace:
        self.calls.append(("send", version, probe, adapter_seed))
        self.version, self.log_probs = version, LOG_PROBS * (1 + (adapter_seed or 0))

        def result() -> torch.Tensor | None:
            if self.errors:
                raise self.errors.pop(0)
            return None if probe is None else self.log_probs

        return SimpleNamespace(result=result)


class Member:
    """The process of an engine."""

    def __init__(self, run: "Run", name: str) -> None:
        self.run, self.name = run, name

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments: Any) -> Call:
            self.run.calls.append((self.name, method, *arguments))
            answer = None
            if method == "answer":
                policy = self.run.policy
                answer = EngineProbe(log_probs=policy.log_probs.tolist(), version=policy.version)
            return Call(answer)

        return SimpleNamespace(remote=remote)


class Pool(EnginePool):
    """A pool of a run, whose processes are `Member`s."""

    def __init__(self, run: "Run", config: PPOConfig) -> None:
        self.run = run
        super().__init__(config, SimpleNamespace(devices=SimpleNamespace()), on_gpu=False)

    def _create(self, index: int) -> Member:
        return self.run.create(index)


class Run:
    """A pool of two engines. `calls`: those of their processes; `policy`: the ranks that send weights."""

    def __init__(self, **sections: Any) -> None:
        self.calls: list[tuple] = []
        self.num_created = 0
        self.killed: list[str] = []
        self.policy = Policy()
        sections.setdefault("vllm", VllmConfig(num_engines=2, tensor_parallel_size=3, sync_check_steps=2))
        self.pool = Pool(self, PPOConfig(**sections))
        self.pool.check.probe, self.pool.check.limit = "probe", Limit(dtype="fp32", on_gpu=False)

    def create(self, number: int) -> Member:
        self.num_created += 1
        return Member(self, f"{number}.{self.num_created - 1}")

    def sync(self, version: int) -> dict[str, float]:
        """Returns the metrics of a sync, which has forgotten earlier calls."""
        self.calls.clear()
        self.policy.calls.clear()
        return self.pool.sync(self.policy, version).result(timeout=20)

    def asked(self) -> list[str]:
        return [name for name, method, *_ in self.calls if method == "answer"]


@pytest.fixture
def new_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**sections: Any) -> Run:
        runs.append(Run(**sections))
        return runs[-1]

    monkeypatch.setattr(ray, "kill", lambda member: member.run.killed.append(member.name))
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (list(refs), []))
    monkeypatch.setattr(
        ray, "get", lambda refs, timeout: [r.value for r in refs] if isinstance(refs, list) else refs.value
    )
    pauses = iter(range(1000))  # a sync that never ends is an error
    pause = lambda seconds: time.sleep(0.001 + 0 * next(pauses))
    monkeypatch.setattr(engine_pool, "POLL", 0.001)
    monkeypatch.setattr(engine_pool, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    yield make
    for run in runs:
        run.pool.close()


def test_the_first_sync_connects_all_engines_and_checks_them(new_run) -> None:
    run = new_run()
    metrics = run.sync(5)
    assert run.policy.calls == [("open", run.pool.members, 3, "gloo"), ("send", 5, "probe", None)]
    assert run.asked() == ["0.0", "1.1"] and run.pool.sent == (run.policy, 5)
    assert not metrics
    assert run.pool.check.take_metrics() == {PROBE: 0.0}


def test_later_syncs_are_checked_every_few_steps(new_run) -> None:
    run = new_run()
    probes = []
    for version in range(5):
        run.sync(version)
        probes += [call[2] for call in run.policy.calls if call[0] == "send"]
    assert probes == ["probe", None, "probe", None, "probe"]
    assert [call[0] for call in run.policy.calls] == ["send"], "the connection stays open"


def test_an_engine_with_other_weights_ends_the_run(new_run) -> None:
    run = new_run()
    run.pool.check._reason = lambda number: "of a test"
    answers = Policy.send_weights

    def send(policy: Policy, *arguments: Any) -> Any:
        pending = answers(policy, *arguments)
        trainer = pending.result()
        policy.log_probs = LOG_PROBS - 1  # of the engines
        return SimpleNamespace(result=lambda: trainer)

    run.policy.send_weights = send.__get__(run.policy)
    with refused(ErrorCode.WRONG_WEIGHTS):
        run.sync(1)


def test_engines_that_apply_adapters_get_two_random_ones_first(new_run) -> None:
    run = new_run(vllm=VllmConfig(num_engines=2, sync_check_steps=1))
    run.pool.options = replace(run.pool.options, lora=LoraConfig(rank=4))
    for version, seeds in ((1, [None, 1, 2, None]), (2, [None])):
        run.sync(version)
        assert [call[1:] for call in run.policy.calls if call[0] == "send"] == [
            (version, "probe", seed) for seed in seeds
        ]
        assert run.asked() == ["0.0", "1.1"] * len(seeds)


def test_an_engine_that_dies_in_a_sync_is_replaced(new_run) -> None:
    """The other engine gets the weights again, together with the new one."""
    run = new_run()
    failed = EnginesFailedError(7, {1: "gone"}, 2, dead=[1])
    run.policy = Policy(RayTaskError("send_weights", "Traceback ...", failed))
    assert run.sync(7) == {RESTARTS: 1.0}
    opened = [call[1] for call in run.policy.calls if call[0] == "open"]
    assert [[member.name for member in engines] for engines in opened] == [["0.0", "1.1"], ["0.0", "1.2"]]
    assert run.killed == ["1.1"] and run.pool.engines.all_serve and run.asked()[-2:] == ["0.0", "1.2"]


def test_an_error_of_a_living_engine_ends_the_run(new_run) -> None:
    run = new_run()
    failed = EnginesFailedError(7, {0: "a bad weight", 1: "gone"}, 2, dead=[1])
    run.policy = Policy(RayTaskError("send_weights", "Traceback ...", failed))
    with pytest.raises(RayTaskError):
        run.sync(7)
    assert run.pool.connected == [] and run.killed == []


def test_while_the_run_waits_for_samples_a_new_engine_gets_the_last_weights(new_run) -> None:
    run = new_run(rollout=RolloutConfig(timeout=0))
    run.sync(3)
    run.policy.calls.clear()
    run.pool.submit([Prompt(prompt_id=0, text="1 + 1 =", num_tokens=4)], "train")
    run.pool.give_up(0, run.pool.members[0], "it hangs")
    assert run.pool.watched == [None, run.pool.members[1]]
    with refused(ErrorCode.EPISODES_FAILED, flag="--rollout.timeout", told="1 train prompts are in flight"):
        run.pool.next_group("train", timeout=0.05)
    new = run.pool.members[0]
    assert run.policy.calls == [("open", [new], 3, "gloo"), ("send", 3, "probe", None)]
    assert run.pool.engines.all_serve and run.pool.watched == run.pool.members and new.name == "0.2"
    assert set(run.killed) == {"0.0"}
    run.pool.submit([Prompt(prompt_id=i, text="") for i in range(8)], "train")
    until = time.monotonic() + 10
    while ("0.2", "submit_groups") not in {call[:2] for call in run.calls}:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_an_evaluation_waits_while_prompts_sampled_ahead_finish(new_run, monkeypatch) -> None:
    clock = itertools.count(step=30)  # seconds; each look at it is later
    pool, prompt = new_run(rollout=RolloutConfig(timeout=100)).pool, Prompt(prompt_id=0, text="1 + 1 =")
    for module in (engine_pool, dispatch):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(engine_pool, "POLL", 0.001)
    finished = iter(["train"] * 8 + ["eval"])

    def finish_next() -> None:
        for purpose in itertools.islice(finished, 1):
            request = SimpleNamespace(purpose=purpose)
            pool.dispatcher._hand_out([(request, PromptGroup(prompt=prompt, trajectories=[]))])

    monkeypatch.setattr(pool, "_replace_dead", finish_next)
    pool.submit([prompt] * 2, "eval")
    assert pool.next_group("eval", timeout=100).prompt is prompt and next(clock) > 500
    with refused(ErrorCode.EPISODES_FAILED, flag="--rollout.timeout", told="1 eval prompts are in flight"):
        pool.next_group("eval", timeout=100)


def test_a_death_during_sampling_is_no_error_of_the_run(new_run) -> None:
    run = new_run()
    engine, error = SimpleNamespace(engine=run.pool.members[1]), RayActorError(error_msg="gone")
    assert run.pool.dispatcher._is_replaced(1, engine, error) and run.pool.engines.is_dead(1)
    assert not run.pool.dispatcher._is_replaced(0, engine, KeyError("of an episode"))


def test_other_sampling_flags_reach_engines_of_any_state(new_run) -> None:
    run = new_run(eval=EvalConfig(n_samples_per_prompt=1))
    run.sync(1)
    run.pool.engines.give_up(0, run.pool.members[0], "it hangs")
    run.calls.clear()
    run.pool.set_sampling({"eval.n_samples_per_prompt": 1})
    assert run.calls == []
    flags = {"eval.n_samples_per_prompt": 5, "eval.temperature": 0.2}
    run.pool.set_sampling(flags)
    assert run.calls == [(name, "set_sampling", flags) for name in ("0.0", "1.1")]
    assert run.pool.config.eval.n_samples_per_prompt == 5
    assert run.pool.num_samples == {"train": 1, "eval": 5}
