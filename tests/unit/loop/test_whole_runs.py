"""Whole runs of RL with numbered samples: which are learned from, and what a checkpoint continues."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from local_ranks import Run, config_of, engines_of, in_order, numbers_of, start_ranks_here
from refusals import refused

from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.cluster.layout import ENGINES, compute_layout
from openrlhf.cluster.placement import place
from openrlhf.config.ppo import KLConfig
from openrlhf.data.prompt_sampler import PromptDataset
from openrlhf.errors import ErrorCode
from openrlhf.loop.rl import PPOTrainer
from openrlhf.loop.rl_command import build_trainer
from openrlhf.observability.hooks.base import Step
from openrlhf.observability.hooks.memory import PhaseMemory
from openrlhf.observability.observer import Observer
from openrlhf.observability.rollout_metrics import RolloutMetrics
from openrlhf.rows import LossNorm
from openrlhf.tools.selftest.step_checks import StepChecks
from openrlhf.training.rl_data import RLData
from openrlhf.types import Prompt


@pytest.fixture(autouse=True)
def everything_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start_ranks_here(monkeypatch)


REWARDS = {"compared": (0.0, 1.0), "solved": (1.0, 1.0), "alone": (0.5, None)}
"""Rewards of the samples of a prompt; filtering does not keep those that are solved."""


@pytest.mark.processes
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_accepted_sample_is_learned_from_once_in_each_epoch(data):
    """Samples pass through filtering, batches that are sampled ahead, failures, a critic that warms up, a
    last rollout of fewer samples than ranks, and any number of ranks."""
    filters, num_prompts = data.draw(st.booleans(), "filters"), data.draw(st.integers(1, 9), "prompts")
    kinds = data.draw(
        st.lists(st.sampled_from(sorted(REWARDS)), min_size=num_prompts, max_size=num_prompts), "kinds"
    )
    accepted = [kind != "solved" or not filters for kind in kinds]
    assume(any(accepted))
    batch, episodes = data.draw(st.integers(1, 4), "batch"), data.draw(st.integers(1, 2), "episodes")
    epochs = data.draw(st.integers(1, 2), "epochs")
    frozen = data.draw(st.integers(0, min(2, -(-num_prompts // batch) * episodes - 1)), "frozen")
    config = config_of(
        batch=batch,
        at_a_time=data.draw(st.none() | st.integers(1, 9), "at a time"),
        train_batch=data.draw(st.integers(1, 8), "train batch"),
        num_episodes=episodes,
        max_epochs=epochs,
        filters=filters,
        estimator="gae",
        freezing_steps=frozen,
        dynamic_batch_enable=data.draw(st.booleans(), "dynamic"),
        max_tokens_per_gpu=data.draw(st.integers(1, 12), "budget"),
    )
    ranks = data.draw(st.integers(1, 4), "ranks")
    run = Run(config, num_prompts, lambda episode, prompt: REWARDS[kinds[prompt]], num_ranks=ranks)
    run.trainer.fit()

    groups = [(episode, prompt) for episode, prompt in run.asked if accepted[prompt]]
    assert sorted(run.asked) == list(itertools.product(range(config.train.num_episodes), range(num_prompts)))
    finished = [
        [run.number_of(e, p, i) for i, reward in enumerate(REWARDS[kinds[p]]) if reward is not None]
        for e, p in groups
    ]
    critic = run.learned(run.trainer.critic)
    assert in_order(critic) == sorted(epochs * [n for numbers in finished for n in numbers])
    assert all(any(ranks) for ranks in critic)  # no optimizer step is without a sample
    policy = run.learned(run.policy)
    warm_up, after = critic[: len(critic) - len(policy)], critic[len(critic) - len(policy) :]
    assert in_order(policy) == in_order(after)
    assert bool(warm_up) == (frozen > 0) and (len(policy) > 0) == (run.trainer.step > frozen)


def test_groups_that_were_accepted_when_the_prompts_ran_out_are_learned_from():
    """Three of five prompts teach something. The third one is alone in the last batch of two."""
    teaches = {0, 2, 4}
    run = Run(config_of(filters=True), 5, lambda episode, prompt: (0.0, float(prompt in teaches)))
    run.trainer.fit()
    steps = run.learned(run.policy)
    assert [len(ranks[0]) for ranks in steps] == [4, 2]
    assert in_order(steps) == sorted(run.number_of(0, p, i) for p in teaches for i in (0, 1))


def test_what_the_critic_warmed_up_on_is_kept_for_nobody():
    """The policy's workers hear nothing of the two steps in which only the critic learns, and then of the
    third step's samples alone."""
    run = Run(config_of(estimator="gae", freezing_steps=2), 6, lambda episode, prompt: (0.0, 1.0))
    run.trainer.fit()
    (handle,) = run.policy.workers
    (batch, *_), *more = [args for name, args in handle.sent if name == "update"]
    third = sorted(run.number_of(0, prompt, i) for _, prompt in run.asked[4:] for i in (0, 1))
    assert not more
    assert sorted(numbers_of(batch)) == third


def test_rates_of_filtering_count_prompts_and_not_samples():
    """The first of five prompts is kept; of the second one a sample failed; all the others are solved."""
    scores = {0: (0.0, 1.0), 1: (0.5, None)}
    run = Run(
        config_of(batch=2, filters=True, at_a_time=5),
        5,
        lambda episode, prompt: scores.get(prompt, (1.0, 1.0)),
    )
    run.trainer.collector.fill(step := Step(number=1, version=0))
    shares = {name: step.metrics[f"rollout/{name}_ratio"] for name in ("kept", "filtered_high")}
    assert shares == {"kept": 2 / 5, "filtered_high": 3 / 5}
    assert step.metrics["rollout/num_prompts"] == 5


@pytest.mark.processes
def test_a_coefficient_of_zero_loads_no_reference_and_trains_without_one():
    """GRPO without KL places no reference, asks for none and misses none; the loss is the policy's alone."""
    kl = KLConfig(init_coef=0.0, use_loss=True, estimator="k3")
    with_kl = replace(kl, init_coef=0.01)
    configs = [config_of(kl=one) for one in (kl, with_kl)]
    placed = [set(place(config, compute_layout(config, [{"CPU": 64}]))) for config in configs]
    assert placed == [{"actor", ENGINES}, {"actor", "ref", ENGINES}]
    run = Run(config_of(kl=kl, estimator="group_norm"), 2, lambda episode, prompt: (0.0, 1.0))
    run.trainer.fit()
    (row, *_) = engines_of(run.policy)[0].learned[0]
    assert run.trainer.reference is None and row.ref_log_probs is None
    objective = run.policy.workers[0].worker.objective(0.0)
    assert row.old_log_probs is None  # a step of one update
    log_probs = row.rollout_log_probs
    loss, metrics = objective(
        lambda row, temperature, with_entropy: SimpleNamespace(log_probs=log_probs, entropy=None),
        row,
        LossNorm(row.num_tokens, row.num_sequences),
    )
    assert "policy/kl_loss" not in metrics
    assert loss.item() == pytest.approx(-row.advantages.mean().item())


def folders_in(path: Path) -> dict[str, list[str]]:
    return {role: sorted(p.name for p in (path / role).glob("*_step*")) for role in ("_actor", "_critic")}


def test_the_old_best_is_there_until_the_new_one_is_complete(tmp_path):
    """The critic's part is written and the policy's is not: the best of both models is still the old one."""
    config = config_of(tmp_path, estimator="gae", evaluated=True, save_steps=100)
    run = Run(config, 8, lambda episode, prompt: (0.0, 1.0), evaluation=lambda version: version / 10)
    engines_of(run.policy)[0].dies_at = "best_global_step2"
    with refused(ErrorCode.NOT_WRITABLE, told=("_actor/.saving", "the disk is full")):
        run.trainer.fit()
    assert folders_in(tmp_path) == {role: ["best_global_step1"] for role in ("_actor", "_critic")}

    run = Run(config, 8, lambda episode, prompt: (0.0, 1.0), evaluation=lambda version: version / 10)
    run.trainer.fit()
    assert folders_in(tmp_path) == {role: ["best_global_step4"] for role in ("_actor", "_critic")}
    assert run.trainer.checkpoints.find().tag is None  # a run does not resume from the best


def test_latest_names_a_checkpoint_of_its_own_and_never_the_best(tmp_path):
    config = config_of(tmp_path, evaluated=True, save_steps=2)
    run = Run(config, 6, lambda episode, prompt: (0.0, 1.0), evaluation=lambda version: version / 10)
    run.trainer.fit()
    assert run.trainer.step == 3
    assert folders_in(tmp_path)["_actor"] == ["best_global_step3", "global_step2"]
    assert run.trainer.checkpoints.find().tag == "global_step2"


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(tmp_path):
    """The resumed run has the prompts, groups that wait, the order of every optimizer step on every rank, the
    coefficient of the KL as its controller has it, and the best evaluation so far."""
    scores = [0.1, 0.2, 0.9, 0.3, 0.5, 0.7, 0.8, 0.6]
    rewards = {0: (1.0, 1.0)}

    def run_in(path: Path, resume: bool = False) -> Run:
        config = config_of(
            path,
            estimator="gae",
            filters=True,
            at_a_time=5,
            train_batch=2,
            num_episodes=2,
            kl=KLConfig(init_coef=0.1, target=0.001),
            evaluated=True,
            save_steps=1,
        )
        return Run(
            config,
            8,
            lambda episode, prompt: rewards.get(prompt, (0.0, 1.0)),
            evaluation=lambda version: scores[version],
            num_ranks=2,
            resume=resume,
        )

    whole = run_in(tmp_path / "whole")
    whole.trainer.fit()
    first = run_in(tmp_path / "halves")
    first.trainer.total_steps = 3
    first.trainer.fit()
    second = run_in(tmp_path / "halves", resume=True)
    assert second.trainer.step == 3
    assert second.trainer.collector.state_dict()["groups"]  # some groups wait
    second.trainer.fit()

    def told(run: Run) -> list[float]:
        return [args[2] for name, args in run.policy.workers[0].sent if name == "update"]

    assert whole.trainer.step == second.trainer.step == 7
    assert first.asked + second.asked == whole.asked
    for role in ("policy", "critic"):
        one, other, both = (run.learned(getattr(run.trainer, role)) for run in (first, second, whole))
        assert one + other == both
    assert told(first) + told(second) == told(whole) and len(set(told(whole))) == 7
    assert second.trainer.best_metric == whole.trainer.best_metric == 0.9
    best = [p.name for p in (tmp_path / "halves" / "_actor").glob("best*")]
    assert best == ["best_global_step2"]


def test_a_run_that_may_resume_and_finds_nothing_starts_at_the_beginning(tmp_path):
    config = config_of(tmp_path / "ckpt", kl=KLConfig(init_coef=0.25), save_steps=1)
    config = replace(
        config,
        ckpt=replace(config.ckpt, load_enable=True),
        logger=replace(config.logger, run_dir=str(tmp_path / "run")),
    )
    run, origin = Run(config, 4, lambda episode, prompt: (0.0, 1.0)), RunFingerprint.of("ppo", config, {})
    prompts = PromptDataset([Prompt(prompt_id=i, text="") for i in range(4)])

    def build() -> PPOTrainer:
        roles = SimpleNamespace(
            rollout=run,
            policy=run.policy,
            critic=None,
            reference=run.trainer.reference,
            teacher=None,
            peak_memory=lambda: SimpleNamespace(result=dict),
        )
        tokenizer = SimpleNamespace(chat_template=None, decode=lambda ids, **options: str(ids))
        checkpoints = CheckpointFolder(f"{config.ckpt.folder}/_actor", config.ckpt, fingerprint=origin)
        tag, _ = checkpoints.choose()
        return build_trainer(config, [], roles, RLData(prompts, [], None, tokenizer), checkpoints, tag)

    trainer = build()
    assert (trainer.step, trainer.kl.coef, trainer.best_metric) == (0, 0.25, None)
    assert [type(hook) for hook in trainer.hooks] == [StepChecks, PhaseMemory, RolloutMetrics, Observer]
    trainer.fit()
    trainer.observer.close()
    again = build()
    assert again.step == trainer.step == 2
    again.observer.close()
    config = replace(config, train=replace(config.train, verify_steps=1))
    build().observer.close()  # the orders of two epochs differ
