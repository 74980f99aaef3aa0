"""Steps of a trainer of RL, with groups that answer at once and remember their requests."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fake_trainer import (
    EVAL_PROMPTS,
    LOG_PROB,
    PROMPTS,
    REF_LOG_PROB,
    VALUE,
    Done,
    Model,
    Rollout,
    Trained,
    config_of,
    fit,
    metrics_of,
    trainer_of,
    with_critic,
)
from records import batch_of, record_of, trajectory
from refusals import refused

from openrlhf.checkpoint.folder import UNFINISHED
from openrlhf.config.ppo import Failure, KLConfig, PPOConfig
from openrlhf.data.prompt_sampler import PromptDataset, PromptSampler
from openrlhf.errors import ErrorCode, RunError
from openrlhf.loop.rl import PPOTrainer
from openrlhf.observability.hooks.base import Hook, Step
from openrlhf.observability.journal import journal_steps, read_journal, read_table
from openrlhf.training import schedule
from openrlhf.training.outputs import begin_forward, with_outputs
from openrlhf.types import Outcome, Prompt, Purpose, Trajectory, runs


def test_the_order_of_a_run(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path, save_steps=2, best_metric_key="none", save_hf=True))
    fit(trainer)
    trainer.observer.close()
    ids = [p.prompt_id for p in PromptSampler(PromptDataset(PROMPTS), seed=1).next_batch(6)]
    step = [["policy 4", "reference 4", "update policy 4"]] * 3
    assert trainer.policy.calls == [
        *["sync 0", "evaluate"],
        *[f"generate {ids[0:2]}", *step[0], "sync 1"],
        *[f"generate {ids[2:4]}", *step[1], "sync 2", "evaluate"],
        *["save policy global_step2", "export global_step2_hf"],
        *[f"generate {ids[4:6]}", *step[2], "sync 3", "evaluate"],
    ]
    assert trainer.step == 3
    assert trainer.checkpoints.find().tag == "global_step2"


def test_samples_are_requested_when_the_engines_have_the_weights(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path), eval_prompts=[])
    calls = trainer.policy.calls

    class Sync(Done):
        def result(self) -> dict:
            calls.append("synced")
            return {}

    def sync(policy: Trained, version: int) -> Sync:
        trainer.rollout.version = version
        return Sync()

    trainer.rollout.sync = sync
    fit(trainer)
    order = [call.split()[0] for call in calls if call.startswith(("synced", "generate"))]
    assert order == ["synced", "generate"] * 3 + ["synced"]


def test_what_a_run_writes(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path), score=lambda prompt, version: version / 4)
    fit(trainer)
    metrics = metrics_of(tmp_path)
    assert list(metrics) == [0, 1, 2, 3]
    assert [s for s in metrics if "eval/math_score_mean" in metrics[s]] == [0, 2, 3]
    assert [metrics[s]["eval/math_score_mean"] for s in (0, 2, 3)] == [0, 0.5, 0.75]
    first = metrics[1]
    assert first["rollout/reward_mean"] == 0.5 and first["rollout/num_samples"] == 4
    assert first["rollout/failed_ratio"] == 0
    assert first["rollout/response_length_mean"] == 2.5
    assert metrics[3]["rollout/staleness_max"] == 0
    assert first["policy/loss"] == 0.25
    assert first["kl/mean"] == pytest.approx(LOG_PROB - REF_LOG_PROB)
    assert first["mismatch/abs_diff_max"] == 0
    rollouts = tmp_path / "run" / "rollouts"
    assert sorted(journal_steps(rollouts)) == [1, 2, 3]
    assert sorted(journal_steps(rollouts, "eval")) == [0, 2, 3]
    # step s samples with the weights of s - 1 updates
    for s in (1, 2, 3):
        sampled = read_journal(journal_steps(rollouts)[s])
        assert {v for t in sampled for v, _ in t.weight_versions} == {s - 1}


def test_what_the_policy_learns_from(tmp_path):
    """Each prompt has rewards 0 and 1 under RLOO, and a KL of 0.5 on every action with coefficient 0.1."""
    trainer = trainer_of(tmp_path, config_of(tmp_path), total_steps=1)
    fit(trainer)
    ((batch, schedule, kl_coef),) = trainer.policy.updates
    assert kl_coef == 0.1
    assert batch.num_actions.tolist() == [2, 3, 2, 3]
    assert [sorted(i for rank in step for i in rank) for step in schedule] == [[0, 1, 2, 3]]
    assert [len(rank) for step in schedule for rank in step] == [2, 2]
    losing, winning = (batch.select([i]) for i in (0, 1))
    assert_close(losing.advantages, [-1 - 0.1, -1 - 0.05])
    assert_close(winning.advantages, [1 - 0.15, 1 - 0.1, 1 - 0.05])
    assert_close(winning.log_probs, [LOG_PROB] * 3)
    assert_close(winning.ref_log_probs, [REF_LOG_PROB] * 3)


@pytest.mark.parametrize("shuffle", ["sample", "group"])
def test_samples_of_a_prompt_stay_together_where_the_flag_says_so(tmp_path, shuffle):
    config = config_of(tmp_path)
    given = []

    class Keeping(Hook):
        def scheduled(self, step: Step) -> None:
            given.append(step.groups)

    trainer = trainer_of(
        tmp_path,
        replace(config, train=replace(config.train, shuffle=shuffle)),
        total_steps=1,
        eval_prompts=[],
        hooks=[Keeping()],
    )
    fit(trainer)
    (groups,) = given
    if shuffle == "sample":
        assert groups is None
    else:
        assert len(set(groups)) == len(groups) // config.rollout.n_samples_per_prompt > 1


def test_a_policy_that_differs_from_its_own_reference_stops_its_first_step(tmp_path):
    config = config_of(tmp_path)
    config = replace(config, train=replace(config.train, verify_steps=1))
    trainer = trainer_of(tmp_path, config, total_steps=1, eval_prompts=[])
    with pytest.raises(RunError, match="kl/log_ratio_mean"):
        fit(trainer)


@pytest.mark.parametrize(("lr", "grad_norm"), [(1e-4, 0.5), (0.99e-4, 0.5), (1e-4, 0.0)])
def test_a_policy_that_an_update_changed_is_not_its_reference(tmp_path, lr, grad_norm):
    trainer = trainer_of(tmp_path, config_of(tmp_path), total_steps=2, eval_prompts=[])
    trainer.reference.log_prob, update = LOG_PROB, trainer.policy.update

    def measured(*args) -> Done:
        updated = update(*args).result()
        return Done(updated._replace(metrics=updated.metrics | {"lr": lr, "grad_norm": grad_norm}))

    trainer.policy.update = measured
    if lr < 1e-4 or grad_norm == 0:
        fit(trainer)  # in bf16 its log-probs may still be those of the reference
        return
    with refused(ErrorCode.BROKEN_INVARIANT) as refusal:
        fit(trainer)
    assert refusal.value.text.startswith("step 2: the number of 10 actions")


def test_an_evaluation_by_late_weights_stops_the_run(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path), total_steps=2)
    trainer.rollout.sync = lambda policy, version: Done({})
    with refused(ErrorCode.BROKEN_INVARIANT) as refusal:
        fit(trainer)
    assert "the version of the weights that answered evaluation prompt 0 is -1" in refusal.value.text


def test_passes_in_one_order_stop_the_run(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    config = replace(
        config,
        rollout=replace(config.rollout, batch_size=16, n_samples_per_prompt=2),
        train=replace(config.train, verify_steps=1, max_epochs=2),
        algo=replace(config.algo, kl=KLConfig(init_coef=0.0)),
    )
    prompts = PromptSampler(PromptDataset([Prompt(prompt_id=i, text=f"{i}") for i in range(64)]), seed=1)
    train = lambda name: trainer_of(tmp_path / name, config, eval_prompts=[], prompts=prompts)
    fit(train("right"))
    right = schedule.training_schedule
    once = lambda *args, epochs, **options: right(*args, epochs=1, **options) * epochs
    monkeypatch.setattr(schedule, "training_schedule", once)
    with refused(ErrorCode.BROKEN_INVARIANT) as refusal:
        fit(train("wrong"))
    assert "the order of the policy's samples is that of another pass" in refusal.value.text
    same = lambda *args, seed, **options: right(*args, seed=0, **options)
    monkeypatch.setattr(schedule, "training_schedule", same)
    with refused(ErrorCode.BROKEN_INVARIANT) as refusal:
        fit(train("the same"))
    assert refusal.value.text.startswith("step 2: ")


def test_log_probs_that_the_update_computes_are_known_after_it(tmp_path):
    """A step is one optimizer step without KL in its reward: no log-probs are asked for before."""
    config = config_of(tmp_path)
    config = replace(
        config, algo=replace(config.algo, kl=KLConfig(init_coef=0.1, use_loss=True, estimator="k2"))
    )
    trainer = trainer_of(tmp_path, config, total_steps=1, eval_prompts=[])
    fit(trainer)
    assert trainer.policy.calls[2:] == ["reference 4", "update policy 4", "sync 1"]
    metrics = metrics_of(tmp_path)[1]
    assert metrics["kl/mean"] == pytest.approx((LOG_PROB - REF_LOG_PROB) ** 2 / 2)
    assert metrics["kl/log_ratio_mean"] == pytest.approx(LOG_PROB - REF_LOG_PROB)
    assert metrics["mismatch/ess"] == 1 and metrics["mismatch/abs_diff_max"] == 0
    assert {f"timing/{phase}" for phase in ("generate", "logprobs", "sync", "step_total")} <= metrics.keys()
    journal = read_table(journal_steps(tmp_path / "run" / "rollouts")[1])
    assert {x for sample in journal["log_probs"].to_pylist() for x in sample} == {LOG_PROB}


@pytest.mark.parametrize("train_batch", [4, 2])
def test_a_clip_that_counts_from_the_sampler_asks_for_no_log_probs(tmp_path, train_batch):
    """No log-probs are asked for, however many optimizer steps a step makes. The first one reports the
    log-probs of its samples, before it changes the policy."""
    config = config_of(tmp_path)
    advantage = replace(config.algo.advantage, proximal_policy="rollout")
    config = replace(
        config,
        algo=replace(config.algo, advantage=advantage, kl=KLConfig(init_coef=0.0)),
        train=replace(config.train, batch_size=train_batch),
    )
    trainer = trainer_of(tmp_path, config, total_steps=1, eval_prompts=[])
    fit(trainer)
    assert trainer.policy.calls[2:] == ["update policy 4", "sync 1"]
    ((batch, schedule, _),) = trainer.policy.updates
    assert batch.log_probs is None and len(schedule) == 4 // train_batch
    assert metrics_of(tmp_path)[1]["mismatch/abs_diff_max"] == 0
    journal = read_table(journal_steps(tmp_path / "run" / "rollouts")[1])
    assert (None not in journal["log_probs"].to_pylist()) == (train_batch == 4)


def test_the_policy_is_told_how_stale_its_samples_are(tmp_path, monkeypatch):
    """The first half of each answer is one update older than the second, which is of the newest weights."""
    monkeypatch.setattr(PPOConfig, "largest_staleness", 1)
    trainer = trainer_of(tmp_path, config_of(tmp_path), total_steps=2, eval_prompts=[])
    sampled = trainer.rollout.sampled

    def across_a_sync(prompt: Prompt, i: int, reward: float | None) -> Trajectory:
        t = sampled(prompt, i, reward)
        newest = trainer.rollout.version
        return replace(t, weight_versions=runs([max(newest - 1, 0)] + [newest] * (t.num_actions - 1)))

    trainer.rollout.sampled = across_a_sync
    fit(trainer)
    first, second = (batch.staleness for batch, _, _ in trainer.policy.updates)
    assert first is None
    assert second is not None and second.tolist() == [1, 0, 1, 0, 0] * 2
    first, second = (metrics_of(tmp_path)[step] for step in (1, 2))
    assert first["rollout/staleness_max"] == 0 and second["rollout/staleness_max"] == 1
    assert not any("_staleness_" in name for name in first)
    assert second["mismatch/kl_staleness_0"] == second["mismatch/kl_staleness_1"] == 0


def test_a_step_whose_update_fails_can_be_looked_at(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path), eval_prompts=[])

    def fails(*_: object) -> None:
        raise FloatingPointError("grad_norm is nan")

    trainer.policy.update = fails
    with pytest.raises(FloatingPointError):
        trainer.fit()
    trainer.observer.close()
    table = read_table(journal_steps(tmp_path / "run" / "rollouts")[1])
    assert len(table) == 4 and table["advantages"].null_count == 4


def test_the_output_of_each_model_is_a_column_of_its_own():
    policy, critic, teacher, reference = (Model([], "", log_prob) for log_prob in (-1, -2, -3, -4))
    sampled = batch_of([trajectory(1.0, [2, 3])])
    columns = lambda batch: (batch.log_probs, batch.values, batch.teacher_log_probs, batch.ref_log_probs)
    passes = begin_forward(sampled, (policy, critic, teacher, reference))
    found = columns(with_outputs(sampled, passes, step=1))
    assert [column.tolist() for column in found] == [[-1, -1], [-2, -2], [-3, -3], [-4, -4]]
    assert columns(with_outputs(sampled, [None] * 4, step=1)) == (None, None, None, None)


@pytest.mark.parametrize("name", ["policy", "reference"])
def test_log_probs_that_are_not_finite_are_not_learned_from(tmp_path, name: str) -> None:
    trainer = trainer_of(tmp_path, config_of(tmp_path), eval_prompts=[])
    model = getattr(trainer, name)
    model.log_prob = float("nan")
    with refused(ErrorCode.NOT_FINITE, told=f"outputs of the {name}"):
        trainer.fit()
    assert trainer.policy.updates == [] and trainer.rollout.version == 0


def test_without_a_reference(tmp_path):
    config = config_of(tmp_path)
    config = replace(config, algo=replace(config.algo, kl=KLConfig(init_coef=0.0)))
    trainer = trainer_of(tmp_path, config, total_steps=1)
    fit(trainer)
    assert not any("reference" in call for call in trainer.policy.calls)
    ((batch, _, kl_coef),) = trainer.policy.updates
    assert kl_coef == 0 and batch.ref_log_probs is None


def test_failed_samples_are_dropped_and_counted(tmp_path):
    trainer = trainer_of(
        tmp_path, config_of(tmp_path), total_steps=1, reward=lambda p, i: None if i else 1.0, eval_prompts=[]
    )
    fit(trainer)
    assert trainer.policy.calls[2:] == ["policy 2", "reference 2", "update policy 2", "sync 1"]
    metrics = metrics_of(tmp_path)[1]
    assert metrics["rollout/failed_ratio"] == 0.5
    assert metrics["rollout/reward_error_count"] == 2
    assert metrics["rollout/reward_mean"] == 1  # the mean over samples with a reward
    assert metrics["rollout/num_samples"] == 4
    journal = read_journal(journal_steps(tmp_path / "run" / "rollouts")[1])
    assert [t.outcome for t in journal] == [Outcome.OK, Outcome.REWARD_ERROR] * 2


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_too_many_failures_stop_the_run(tmp_path, ratio):
    config = config_of(tmp_path)
    config = replace(config, reward=replace(config.reward, max_failed_ratio=ratio))
    failing = {0.5: lambda p, i: 1.0 if p.prompt_id == PROMPTS[0].prompt_id else None, 1.0: lambda p, i: None}
    trainer = trainer_of(tmp_path, config, reward=failing[ratio])
    limit = {"flag": "--reward.max_failed_ratio", "value": f"{ratio:g}"}
    with refused(ErrorCode.REWARDS_FAILED, **limit) as error:
        fit(trainer)
    assert re.search(r"^step \d: ([34]) of 4 .* \1 of them .*\nno opinion$", error.value.text)
    assert not trainer.policy.updates


def test_a_failure_that_ends_the_run(tmp_path):
    """A single failure ends the run, and only one of its kind. The journal has the samples."""
    config = config_of(tmp_path)
    failing = lambda p, i: None if (p.prompt_id, i) == (0, 1) else 1.0

    def trainer_with(*stop_on: Failure) -> PPOTrainer:
        rollout = replace(config.rollout, stop_on=stop_on)
        return trainer_of(tmp_path, replace(config, rollout=rollout), total_steps=3, reward=failing)

    stopped = trainer_with("timed_out", "reward_error")
    outcome = {"flag": "--rollout.stop_on", "value": "reward_error"}
    with refused(ErrorCode.REWARDS_FAILED, **outcome) as error:
        fit(stopped)
    assert error.value.text.endswith("\nno opinion")
    record_of(stopped.observer).journal.close()
    assert read_journal(journal_steps(tmp_path / "run" / "rollouts")[stopped.step + 1])
    fit(trainer_with("timed_out", "env_error"))


def test_samples_that_ran_out_of_tokens_are_compared_and_not_trained_on(tmp_path):
    config = config_of(tmp_path)
    config = replace(config, rollout=replace(config.rollout, mask_truncated=True))
    assert not config.skips_old_log_probs
    trainer = trainer_of(tmp_path, config, total_steps=1)
    trainer.rollout.truncated = {1}
    fit(trainer)
    ((batch, schedule, _),) = trainer.policy.updates
    assert len(batch) == 4
    assert sorted(i for step in schedule for rank in step for i in rank) == [0, 2]
    trainer = trainer_of(tmp_path, config, total_steps=1)
    trainer.rollout.truncated = {0, 1}
    with refused(ErrorCode.EPISODES_FAILED, flag="--rollout.mask_truncated"):
        fit(trainer)


def test_policy_and_critic_learn_from_the_same_experiences(tmp_path):
    trainer = trainer_of(tmp_path, with_critic(tmp_path), total_steps=2)
    fit(trainer)
    step = ["policy 4", "critic 4", "reference 4", "update critic 4", "update policy 4"]
    calls = [call for call in trainer.policy.calls if not call.startswith(("generate", "evaluate", "sync"))]
    assert calls == [*step, *step, "save critic global_step2", "save policy global_step2"]
    for (one, *_), (other, *_) in zip(trainer.policy.updates, trainer.critic.updates, strict=True):
        assert one is other
    first = trainer.policy.updates[0][0].select([0])
    assert_close(first.values, [VALUE] * 2)
    # reward 0 and a KL of 0.5 with coefficient 0.1 on both actions: G = -0.1, -0.05
    assert_close(first.returns, [-0.1, -0.05])
    assert metrics_of(tmp_path)[2]["critic/loss"] == 0.25


def test_the_critic_warms_up_alone(tmp_path):
    trainer = trainer_of(tmp_path, with_critic(tmp_path, freezing_steps=2), total_steps=3)
    fit(trainer)
    updates = [call for call in trainer.policy.calls if call.startswith("update")]
    assert updates == ["update critic 4", "update critic 4", "update critic 4", "update policy 4"]
    assert len(trainer.policy.updates) == 1  # the warm-up kept no batch for it


@pytest.mark.parametrize("ahead", [0, 1])
def test_weights_that_the_warm_up_leaves_alone_keep_their_version(tmp_path, ahead):
    """Each batch is sampled with the weights that there were `ahead` steps before its own."""
    config = with_critic(tmp_path, freezing_steps=2)
    config = replace(config, train=replace(config.train, async_enable=ahead > 0, async_queue_size=ahead))
    whole = trainer_of(tmp_path, config, total_steps=5, eval_prompts=[])
    sample_when_asked(whole.rollout)
    fit(whole)
    resumed = trainer_of(
        tmp_path,
        config,
        total_steps=5,
        eval_prompts=[],
        resume="global_step2",
        saved=whole.policy.saved,
        critic=whole.critic,
    )
    sample_when_asked(resumed.rollout)
    shutil.rmtree(tmp_path / "critic" / UNFINISHED)  # step 4 is saved again
    fit(resumed)
    syncs = [[c for c in run.policy.calls if c.startswith("sync")] for run in (whole, resumed)]
    assert syncs == [[f"sync {v}" for v in (0, 0, 0, 1, 2, 3)], [f"sync {v}" for v in (0, 1, 2, 3)]]
    staleness = [metrics_of(tmp_path)[step]["rollout/staleness_max"] for step in range(1, 6)]
    assert staleness == [0, 0, 0, ahead, ahead]
    for run in (whole, resumed):
        first, *later = [update[0].staleness for update in run.policy.updates]
        assert first is None
        assert all((s is not None and set(s) == {1}) if ahead else s is None for s in later)


def sample_when_asked(rollout: Rollout) -> None:
    """Samples with the weights of the request's time, also where the answer is taken after a sync."""
    submit, sampled, versions = rollout.submit, rollout.sampled, {}

    def submitted(prompts: Sequence[Prompt], purpose: Purpose) -> None:
        versions.update({(p.epoch, p.prompt_id): rollout.version for p in prompts})
        submit(prompts, purpose)

    def of_then(prompt: Prompt, i: int, reward: float | None) -> Trajectory:
        t, version = sampled(prompt, i, reward), versions[prompt.epoch, prompt.prompt_id]
        return replace(t, weight_versions=runs([version] * t.num_actions))

    rollout.submit, rollout.sampled = submitted, of_then


def assert_close(found: np.ndarray, expected: list[float]) -> None:
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected, rel=1.3e-6, abs=1e-5)


@pytest.mark.parametrize(("eval_prompts", "steps"), [([], 2), (EVAL_PROMPTS, -1), (EVAL_PROMPTS, 0)])
def test_without_evaluation(tmp_path, eval_prompts, steps):
    config = config_of(tmp_path)
    config = replace(config, eval=replace(config.eval, steps=steps))
    trainer = trainer_of(tmp_path, config, eval_prompts=eval_prompts)
    fit(trainer)
    assert "evaluate" not in trainer.policy.calls
    assert list(metrics_of(tmp_path)) == [1, 2, 3]


def test_an_evaluation_before_the_first_step_alone(tmp_path):
    config = config_of(tmp_path)
    config = replace(config, eval=replace(config.eval, steps=-1, eval_at_start=True))
    trainer = trainer_of(tmp_path, config)
    fit(trainer)
    assert trainer.policy.calls[:2] == ["sync 0", "evaluate"]
    assert trainer.policy.calls.count("evaluate") == 1
    assert list(metrics_of(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [-1, 1])
def test_a_run_that_evaluates_only_trains_and_saves_nothing(tmp_path, steps):
    """A resumed one evaluates the checkpoint's weights, whatever the step."""
    config = config_of(tmp_path / "trained", save_steps=2)
    trained = trainer_of(tmp_path / "trained", config)
    fit(trained)
    config = replace(config, eval=replace(config.eval, steps=steps, eval_only=True))
    for resume, version in ((None, 0), ("global_step2", 2)):
        path = tmp_path / f"{resume}"
        only = trainer_of(path, config, resume=resume, saved=trained.policy.saved, score=lambda p, v: v / 10)
        fit(only)
        calls = [call for call in only.policy.calls if not call.startswith("resume")]
        assert calls == [f"sync {version}", "evaluate"]
        (metrics,) = metrics_of(path).values()
        assert metrics["eval/math_score_mean"] == version / 10


def filtering(config: PPOConfig) -> PPOConfig:
    algo = replace(config.algo, dynamic_filtering_enable=True, dynamic_filtering_max_batches=20)
    return replace(config, algo=algo)


def test_a_filtered_run_trains_on_full_batches_and_ends_with_its_prompts(tmp_path):
    """Half of the prompts teach something: of 16 steps 8 are left."""
    trainer = trainer_of(
        tmp_path,
        filtering(config_of(tmp_path)),
        total_steps=16,
        reward=lambda p, i: float(i) if p.prompt_id % 2 else 0.0,
    )
    fit(trainer)
    metrics = metrics_of(tmp_path)
    assert trainer.step == 8 and list(metrics) == list(range(9))
    assert [c for c in trainer.policy.calls if c.startswith("update")] == ["update policy 4"] * 8
    assert "eval/math_score_mean" in metrics[8]
    assert sum(metrics[s]["rollout/num_prompts"] for s in range(1, 9)) <= 32
    for s, path in journal_steps(tmp_path / "run" / "rollouts").items():
        assert {t.prompt.prompt_id % 2 for t in read_journal(path)} == {1}
        assert metrics[s]["rollout/kept_ratio"] == 2 / metrics[s]["rollout/num_prompts"]


def test_a_run_whose_last_prompts_are_rejected_is_evaluated_at_its_end(tmp_path):
    trainer = trainer_of(
        tmp_path,
        filtering(config_of(tmp_path)),
        total_steps=16,
        reward=lambda p, i: float(i) if p.epoch == 0 and p.prompt_id < 6 else 0.0,
    )
    fit(trainer)
    metrics = metrics_of(tmp_path)
    assert trainer.step == 3 and list(metrics) == [0, 1, 2, 3]
    assert "eval/math_score_mean" in metrics[3] and "policy/loss" in metrics[3]
    last = read_journal(journal_steps(tmp_path / "run" / "rollouts", "filtered")[4])
    assert len(last) > 0 and {t.reward for t in last} == {0.0}


def test_groups_that_wait_are_in_the_checkpoint(tmp_path):
    config = config_of(tmp_path, save_steps=1, best_metric_key="none")
    config = replace(config, rollout=replace(config.rollout, vllm_generate_batch_size=6))
    first = trainer_of(tmp_path, config, total_steps=1)
    fit(first)
    second = trainer_of(tmp_path, config, total_steps=4, resume="global_step1", saved=first.policy.saved)
    fit(second)
    ids = [p.prompt_id for p in PromptSampler(PromptDataset(PROMPTS), seed=1).next_batch(8)]
    assert [c for c in first.policy.calls if c.startswith("generate")] == [f"generate {ids[:6]}"]
    assert [c for c in second.policy.calls if c.startswith("generate")] == [f"generate {ids[6:]}"]
    trained = [read_journal(path) for path in journal_steps(tmp_path / "run" / "rollouts").values()]
    assert [t.prompt.prompt_id for step in trained for t in step[::2]] == ids


def test_what_filtering_leaves_out_can_be_looked_at(tmp_path):
    config = config_of(tmp_path)
    config = replace(config, algo=replace(config.algo, dynamic_filtering_enable=True))
    (first,) = PromptSampler(PromptDataset(PROMPTS), seed=1).next_batch(1)
    trainer = trainer_of(
        tmp_path,
        config,
        total_steps=1,
        eval_prompts=[],
        reward=lambda p, i: 0.0 if p.prompt_id == first.prompt_id else float(i),
    )
    fit(trainer)
    rollouts = tmp_path / "run" / "rollouts"
    trained, filtered = (read_journal(journal_steps(rollouts, name)[1]) for name in ("step", "filtered"))
    assert {t.prompt.prompt_id for t in filtered} == {first.prompt_id} and len(filtered) == 2
    assert first.prompt_id not in {t.prompt.prompt_id for t in trained} and len(trained) == 4
    assert metrics_of(tmp_path)[1]["rollout/kept_ratio"] == 2 / 3


def test_evaluation_has_the_order_of_its_prompts(tmp_path):
    """The order in which samples arrive does not matter."""
    trainer = trainer_of(tmp_path, config_of(tmp_path), total_steps=1)
    fit(trainer)
    journal = read_journal(journal_steps(tmp_path / "run" / "rollouts", "eval")[0])
    assert [(t.prompt.prompt_id, t.sample_index) for t in journal] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_sample_that_is_not_learned_from_makes_steps_smaller_and_not_fewer(tmp_path):
    """Two optimizer steps are planned for four samples, and half of those fail."""
    config = config_of(tmp_path)
    config = replace(config, train=replace(config.train, batch_size=2, max_epochs=2))
    trainer = trainer_of(tmp_path, config, total_steps=1, reward=lambda p, i: None if i else 1.0)
    fit(trainer)
    ((_, schedule, _),) = trainer.policy.updates
    seen = [[i for rank in step for i in rank] for step in schedule]
    assert [len(step) for step in seen] == [1, 1, 1, 1]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == [0, 1]
