"""Quantities of a step that must have one value, and the second computation of its first steps."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from records import batch_of, trajectory
from refusals import broken
from torch import Tensor
from torch_engines import SAMPLES, engine_of, sample, saved_model

from openrlhf.algorithms import logprobs
from openrlhf.algorithms.preference.kto import kto_loss
from openrlhf.algorithms.preference.reward_model import pairwise_loss
from openrlhf.backends.lr_schedule import lr_schedule
from openrlhf.backends.torch.engine import TorchEngine
from openrlhf.config.choices import LR_SCHEDULERS
from openrlhf.config.fields import with_values
from openrlhf.config.ppo import ActorConfig, PPOConfig, RolloutConfig, TrainConfig
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, LoraConfig, OptimConfig
from openrlhf.mesh import Mesh
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ScoreModel, load_scorer
from openrlhf.observability.hooks.base import Evaluation, Step
from openrlhf.rows import LossNorm, PackedRow, Pair, PairRow, UnpairedExample, UnpairedRow
from openrlhf.tools.reference.objectives import plain_dpo, plain_kto, plain_learning_rate, plain_rm
from openrlhf.tools.selftest.invariants import (
    check_epoch_seeds,
    check_epochs,
    check_evaluated,
    check_first_pass,
    check_learning_rate,
    check_lengths,
    check_orders,
    check_other_than_reference,
    check_own_reference,
    check_parts,
    check_samples,
    check_schedule,
    check_staleness,
    check_trained,
)
from openrlhf.tools.selftest.step_checks import SHOWS, StepChecks
from openrlhf.tools.selftest.verify import check_head, check_log_probs, verify_step
from openrlhf.training.objectives import kto, rm
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.kto import KTOObjective
from openrlhf.training.objectives.rm import RewardObjective
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.training.trained_worker import PolicyWorker
from openrlhf.types import Trajectory, Updated

ALONE = Mesh(data=1, sequence=1, tensor=1)
FLOAT32 = DeepSpeedConfig(param_dtype="fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


def group(prompt_id: int = 0, **changes: Any) -> list[Trajectory]:
    """Returns two samples with seeds of their own."""
    return [
        trajectory(prompt_id=prompt_id, sample_index=i, seed=10 * prompt_id + i + 1, **changes)
        for i in range(2)
    ]


def test_groups_are_whole() -> None:
    check_samples([*group(), *group(1)], 2, 1, is_random=True)
    check_samples(
        [*group(), replace(group()[1], part=1)], 2, 1, is_random=True
    )  # an episode of two sequences
    with broken() as refusal:
        check_samples([*group(), group(1)[0]], 2, 4, is_random=True)
    assert refusal.value.text.startswith("step 4: ") and "prompt 1" in refusal.value.text
    with broken():
        check_samples([group()[0], replace(group()[1], sample_index=0)], 2, 1, is_random=True)


def test_seeds_are_distinct() -> None:
    with broken() as refusal:
        check_samples([*group(), *(replace(t, seed=2) for t in group(1))], 2, 1, is_random=True)
    assert "seed 2 is 3" in refusal.value.text


def test_epochs_have_seeds_of_their_own() -> None:
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for trajectories in (group(), group(1), [replace(t, seed=t.seed + 5) for t in group(epoch=1)]):
        check_epoch_seeds(trajectories, first, 1)
    assert first == {(0, 0): (0, 1), (0, 1): (0, 2)}
    check_epoch_seeds([replace(t, seed=0) for t in group(epoch=1)], first, 2)
    with broken() as refusal:
        check_epoch_seeds(group(epoch=1), first, 3)
    assert "the seed of sample 0 of prompt 0 is that of epoch 0" in refusal.value.text


def test_long_answers_do_not_repeat_themselves() -> None:
    check_samples(group(actions=[2] * 50), 2, 1, is_random=True)
    with broken() as refusal:
        check_samples(group(actions=[2] * 70), 2, 1, is_random=True)
    assert "By chance 1 of 2 samples are so with a probability of e^-69." in refusal.value.text
    check_samples(group(actions=[2] * 70), 2, 1, is_random=False)
    check_samples(group(actions=[2] * 70, rollout_log_probs=[-0.01] * 70), 2, 1, is_random=True)


def test_many_groups_do_not_repeat_short_answers() -> None:
    step = lambda size: [t for i in range(size) for t in group(i, actions=[2] * 10)]
    check_samples(step(6), 2, 1, is_random=True)  # 6 of 12, each with e^-10: e^-53
    with broken() as refusal:
        check_samples(step(8), 2, 1, is_random=True)  # 8 of 16: e^-70
    assert "By chance 7 of 16 samples are so with a probability of e^-61." in refusal.value.text


def test_no_answer_is_longer_than_its_limit() -> None:
    samples = group(actions=[3, 4, 5])
    check_lengths(samples, 3, step=1)
    check_lengths(samples, None, step=1)
    with broken():
        check_lengths(samples, 2, step=1)


def test_an_evaluation_has_its_own_limit() -> None:
    flags = {"rollout.max_new_tokens": 2, "eval.max_new_tokens": 3, "eval.n_samples_per_prompt": 2}
    checks = StepChecks(config=with_values(PPOConfig(), flags))
    for actions, is_refused in (([3, 4, 5], False), ([3, 4, 5, 6], True)):
        samples = group(actions=actions, versions=[0] * len(actions))
        evaluation = Evaluation(step=2, version=0, samples=samples, metrics={})
        with broken() if is_refused else nullcontext():
            checks.evaluated(evaluation)


def test_evaluations_sample_with_the_current_weights() -> None:
    samples = group(actions=[3, 4, 5], versions=[2, 2, 2])
    check_evaluated(samples, 2, step=2)
    check_evaluated(group(actions=[]), 2, step=2)
    for late in ([1, 1, 1], [2, 2, 1]):
        with broken() as refusal:
            check_evaluated([*samples, *group(actions=[3, 4, 5], versions=late)], 2, step=2)
        assert " is 1, and must be 2." in refusal.value.text


def test_orders_of_many_items_differ() -> None:
    batches = [list(range(16)), list(range(16, 32))]
    others = [list(range(1, 17)), [0, *range(17, 32)]]
    check_orders("samples", [batches, others], step=1)
    check_orders("samples", [batches[:1], batches[:1]], step=1)  # a single batch has no order
    with broken() as refusal:
        check_orders("samples", [batches, others, [[*reversed(batches[0])], batches[1]]], step=1)
    assert "the order of samples is that of another pass" in refusal.value.text
    ones = lambda size: [[i] for i in range(size)]
    check_orders("samples", [ones(12), ones(12)], step=1)  # equal by chance in one of 12! = 5e8 runs
    with broken():
        check_orders("samples", [ones(13), ones(13)], step=1)


def test_epochs_visit_a_dataset_in_orders_of_their_own() -> None:
    same = lambda epoch: [*range(1, 21), 0]
    in_place = lambda epoch: list(range(21)) if epoch == 0 else same(epoch)
    moved = lambda epoch: same(epoch)[epoch:] + same(epoch)[:epoch]
    check_epochs("prompts", moved, step=1)
    for wrong in (same, in_place, lambda epoch: moved(epoch // 2)):
        with broken() as refusal:
            check_epochs("prompts", wrong, step=1)
        assert "the order of prompts" in refusal.value.text


def test_the_learning_rate_is_that_of_its_schedule() -> None:
    check_learning_rate({"lr": 1e-6}, 1e-6, "bf16", 3)
    check_learning_rate({"lr": 1e-6}, None, "bf16", 3)
    check_learning_rate({"lr": 1e-6}, 2e-6, "fp16", 3)
    with broken() as refusal:
        check_learning_rate({"lr": 1e-6}, 1.01e-6, "bf16", 3)
    assert refusal.value.text.startswith("step 3: the learning rate is 1e-06, and must be 1.01e-06.")


@pytest.mark.parametrize("name", LR_SCHEDULERS)
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 1.0])
def test_plain_learning_rates_are_those_of_the_schedule(name: str, warmup: float) -> None:
    for total in (1, 2, 33, 34):
        optim = OptimConfig(lr_scheduler=name, lr_warmup_ratio=warmup, adam=AdamConfig(lr=0.5))
        shape = lr_schedule(optim, total)
        for step in range(total + 2):  # a loop of one's own may take more
            found = plain_learning_rate(optim, step, total)
            if name in ("linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup"):
                assert found == pytest.approx(0.5 * shape(step), rel=1e-9)
            else:
                assert found is None
    assert plain_learning_rate(replace(optim, optim="muon"), 0, 10) is None


def test_a_schedule_has_every_sequence_once_an_epoch() -> None:
    check_schedule("policy", [[[0], [2]], [[2, 0], []]], [0, 2], 2, 1)
    for schedule in ([[[0], [2]], [[2, 2], []]], [[[0, 1], [2]], [[0], [2]]], [[[0], [2]]]):
        with broken() as refusal:
            check_schedule("policy", schedule, [0, 2], 2, 1)
        assert "passes of the policy over sequence" in refusal.value.text


def test_every_action_is_trained_on() -> None:
    batch = batch_of([trajectory(actions=[2, 3]), trajectory(actions=[2])])
    schedule = [[[0], [1]], [[1], [0]]]
    check_trained({"num_tokens": 3.0}, batch, schedule, 1)
    check_trained({}, batch, schedule, 1)
    with broken() as refusal:
        check_trained({"num_tokens": 2.5}, batch, schedule, 1)
    assert " is 5, and must be 6." in refusal.value.text


def test_staleness_has_a_bound() -> None:
    check_staleness({"rollout/staleness_max": 1.0}, 1, 1)
    check_staleness({}, 0, 1)
    with broken():
        check_staleness({"rollout/staleness_max": 1.0}, 0, 1)


def test_a_policy_that_changed_is_not_its_reference() -> None:
    batch = batch_of([trajectory(actions=[2, 3]), trajectory(actions=[2])])
    now = np.array([-1, -2, -3], np.float32)
    later = np.array([-1, -2, -3.0001], np.float32)
    check_other_than_reference(replace(batch, log_probs=now, ref_log_probs=later), 2)
    check_other_than_reference(replace(batch, log_probs=now), 2)
    check_other_than_reference(replace(batch, log_probs=0 * now, ref_log_probs=0 * now), 2)
    with broken() as refusal:
        check_other_than_reference(replace(batch, log_probs=now, ref_log_probs=now), 2)
    assert "3 actions" in refusal.value.text


EQUAL = np.array([-1, -2, -3], np.float32)


@pytest.mark.parametrize(
    ("dtype", "lora", "lr", "steps", "is_told"),
    [
        ("bf16", LoraConfig(rank=16, alpha=16), 1e-6, 1, True),
        ("bf16", LoraConfig(), 1e-7, 1, True),
        ("fp16", LoraConfig(), 1e-6, 4, True),
        ("bf16", LoraConfig(rank=64, alpha=1), 1e-3, 1, True),  # the scale is 1 / 64
        ("bf16", LoraConfig(rank=16, alpha=16), 1e-4, 1, False),
        ("bf16", LoraConfig(), 1e-5, 100, False),  # sqrt(100) times 1e-5
        ("fp32", LoraConfig(), 1e-7, 1, False),
        ("fp32", LoraConfig(rank=16, alpha=16), 1e-6, 1, False),
    ],
)
def test_only_a_change_above_the_precision_must_show(
    capsys: pytest.CaptureFixture[str], dtype: Any, lora: LoraConfig, lr: float, steps: int, is_told: bool
) -> None:
    """A smaller one is told once. Weights add up to larger changes over the steps of a run."""
    batch = replace(
        batch_of([trajectory(actions=[2, 3]), trajectory(actions=[2])]), log_probs=EQUAL, ref_log_probs=EQUAL
    )
    config = PPOConfig(
        ds=DeepSpeedConfig(param_dtype=dtype, lora=lora),
        actor=ActorConfig(adam=AdamConfig(lr=lr)),
        train=TrainConfig(verify_steps=0),
    )
    checks = StepChecks(config=config)
    schedule = [[[0, 1]]] * steps
    credit = lambda step: checks.advantages(Step(number=step, version=1, batch=batch))

    def update(norm: float, step: int, lr: float = lr) -> None:
        done = Updated({"grad_norm": norm, "lr": lr, "num_tokens": 3.0}, [], None)
        schedules = {"policy": schedule}
        checks.updated(Step(number=step, version=1, batch=batch, updated=done, schedules=schedules))

    for norm in (0.0, np.inf):  # without a gradient, or skipped by loss scaling
        update(norm, 1)
        credit(step=2)
    assert not capsys.readouterr().err
    update(0.5, 2)
    if not is_told:
        with broken():
            credit(step=3)
        return
    credit(step=3)
    credit(step=4)
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and f"--ds.param_dtype {dtype}" in told and f"{lr:g}" in told
    update(0.5, 5, lr=1e-2)
    with broken():
        credit(step=6)


def test_from_the_limit_on_bf16_shows_an_adapter(tmp_path: Path) -> None:
    """Where a model this small shows it, one with more activations does."""
    path = str(saved_model(tmp_path))
    lora = LoraConfig(rank=16, alpha=16)
    model = load_causal_lm(path, flag="--x", dtype="bf16", attention="eager", max_len=64)
    model = prepare_for_training(model, DeepSpeedConfig(param_dtype="bf16", lora=lora))
    policy, row = PolicyModel(model).eval(), PackedRow.of([sample(*range(2, 40))])
    with torch.no_grad():
        before = policy(row).log_probs
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape).sign() * SHOWS["bf16"])
        assert not torch.equal(before, policy(row).log_probs)


def test_before_it_changes_the_policy_equals_itself_and_its_reference() -> None:
    before = np.array([-1.0, -2.0], np.float32)
    check_first_pass(before, before + 0.004, "fp32", 1)
    check_own_reference({"kl/log_ratio_mean": -0.004}, "fp32", 1)
    for wrong in (0.006, np.nan):
        with broken():
            check_first_pass(before, before + np.float32(wrong), "fp32", 1)
        with broken():
            check_own_reference({"kl/log_ratio_mean": -wrong}, "fp32", 1)
    check_first_pass(before, before + 0.04, "bf16", 1)


def test_shares_add_up() -> None:
    check_parts([("x", 1.0)], 1)
    with broken():
        check_parts([("x", 2.0)], 1)


ROWS = [PackedRow.of(SAMPLES), PackedRow.of([sample(9, 3, 4, 5, 5, 6)])]
PAIRS = [PairRow.of([Pair(chosen=SAMPLES[0], rejected=sample(3, 9), ref_log_probs=torch.tensor([-9.0, -2]))])]


class OfTheRow:
    """An objective that divides by the actions of its row."""

    def __call__(self, model: Callable, row: PackedRow, norm: LossNorm) -> tuple[Tensor, dict]:
        return -model(row).log_probs.mean(), {}


class NoiseAroundZero:
    """An objective whose loss is 0 but for rounding."""

    def __call__(self, model: Callable, row: PackedRow, norm: LossNorm) -> tuple[Tensor, dict]:
        return 0 * model(row).log_probs.sum() + 1e-6, {}


@pytest.mark.parametrize(
    ("objective", "rows"),
    [
        (NoiseAroundZero(), ROWS),
        (SFTObjective(), ROWS),
        (DPOObjective(beta=0.5, label_smoothing=0.1, nll_coef=0.2), PAIRS),
        (DPOObjective(beta=0.5, ipo=True), PAIRS),
    ],
)
def test_a_step_is_verified(threads: Callable, folder: Path, objective: Any, rows: list) -> None:
    threads(1, lambda: verify_step(engine_of(folder), rows, objective, 1, ds=FLOAT32, mesh=ALONE))


ANSWERS = [
    UnpairedRow.of(
        [
            UnpairedExample(
                sample=SAMPLES[i],
                mismatched=SAMPLES[i],
                desirable=i == 0,
                ref_log_probs=torch.tensor([-8.0, -2]),
            )
            for i in range(2)
        ]
    )
]


def test_a_step_of_kto_is_verified(threads: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = KTOObjective(beta=0.5, desirable_weight=1.5, kl=0.7)
    verify = lambda: verify_step(engine_of(folder), ANSWERS, objective, 1, ds=FLOAT32, mesh=ALONE)
    threads(1, verify)
    monkeypatch.setattr(
        kto, "kto_loss", lambda ratios, desirable, kl, **rest: kto_loss(ratios, ~desirable, kl, **rest)
    )
    threads(1, lambda: refused_by(verify))


def test_a_step_of_a_reward_model_is_verified(
    threads: Callable, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = [
        replace(s, action_mask=torch.arange(s.length) == s.length - 1) for s in (*SAMPLES, sample(3, 9, 4))
    ]
    pairs = [Pair(chosen=last[0], rejected=last[1]), Pair(chosen=last[2], rejected=last[0], margin=0.5)]
    rows = [PairRow.of(pairs)]

    def verify() -> None:
        load = lambda: load_scorer(str(folder), flag="--model", dtype="fp32", attention="auto")
        engine = TorchEngine(
            load, optim=OptimConfig(), ds=DeepSpeedConfig(param_dtype="fp32"), total_steps=10
        )
        verify_step(engine, rows, RewardObjective(), 1, ds=FLOAT32, mesh=ALONE)

    threads(1, verify)
    with monkeypatch.context() as patches:
        patches.setattr(rm, "pairwise_loss", lambda c, r, margin: pairwise_loss(c, r, -margin))
        threads(1, lambda: refused_by(verify))
    first_action = lambda self, row: self.read(row, row.actions - 1)
    monkeypatch.setattr(ScoreModel, "forward", first_action)
    threads(1, lambda: refused_by(verify))


def refused_by(verify: Callable[[], None]) -> None:
    with broken() as refusal:
        verify()
    assert "another mask of actions" in refusal.value.text


def test_plain_dpo_of_far_answers_and_of_no_pairs() -> None:
    """e^1000 is no float64, so log(1 + e^(-beta h)) cannot be computed as it is written."""
    far = [torch.tensor([-2000.0], dtype=torch.float64), torch.tensor([], dtype=torch.float64)]
    objective = DPOObjective(beta=0.5)
    assert plain_dpo(objective, far, [torch.zeros(())] * 2, 1) == 1000
    assert plain_dpo(objective, [], [], 1) == 0


def test_plain_losses_of_a_rank_without_answers() -> None:
    """Its row is a dummy, whose sequences are not counted."""
    assert plain_rm([torch.tensor(3.0)] * 2, torch.zeros(0), 4) == 0
    assert plain_kto(KTOObjective(beta=0.5), [], [], [], 4) == 0


@pytest.mark.parametrize("data", [1, 2])
def test_ranks_verify_a_step_together(threads: Callable, folder: Path, data: int) -> None:
    def work() -> None:
        engine = engine_of(folder)
        rows = ROWS[engine.mesh.rank :]
        verify_step(engine, rows, SFTObjective(), 1, ds=FLOAT32, mesh=Mesh(data=data, sequence=1, tensor=1))

    threads(data, work)


@pytest.mark.parametrize(
    ("objective", "said"), [(OfTheRow(), "doubled totals"), (SFTObjective(), "of a row is")]
)
def test_a_wrong_objective_is_told(
    threads: Callable,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    objective: Any,
    said: str,
) -> None:
    original = SFTObjective.__call__
    monkeypatch.setattr(SFTObjective, "__call__", lambda *args: (2 * original(*args)[0], {}))

    def work() -> None:
        with broken() as refusal:
            verify_step(engine_of(folder), ROWS, objective, 3, ds=FLOAT32, mesh=ALONE)
        assert refusal.value.text.startswith("step 3: ") and said in refusal.value.text

    threads(1, work)


def test_rows_that_count_other_tokens_are_told(
    threads: Callable,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PackedRow, "num_tokens", property(lambda row: len(row.token_ids)))

    def work() -> None:
        with broken() as refusal:
            verify_step(engine_of(folder), ROWS, SFTObjective(), 1, ds=FLOAT32, mesh=ALONE)
        assert "shares of the actions" in refusal.value.text

    threads(1, work)


def test_log_probs_are_compared_at_their_temperature(threads: Callable, folder: Path) -> None:
    def work() -> None:
        module: Any = engine_of(folder).module
        assert isinstance(module, PolicyModel)
        with torch.no_grad():
            found = module(ROWS[0], temperature=0.5).log_probs
        check = lambda temperature: check_log_probs(
            module.model, ROWS[0], found, temperature=temperature, dtype="fp32", step=1
        )
        check(0.5)
        with broken():
            check(0.1)

    threads(1, work)


def test_an_update_of_the_policy_checks_its_first_step(threads: Callable, folder: Path) -> None:
    """Log-probs before the update are those of the temperature of sampling. Otherwise the second computation
    says so, or, if it is off, the ratio of the first step."""
    tokens = [[3, 4, 5, 6], [7, 8], [9, 3, 5]]
    sampled = batch_of([trajectory(token_ids=ids) for ids in tokens], advantages=1.0)

    def worker_of(verify_steps: int, temperature: float) -> PolicyWorker:
        train = TrainConfig(verify_steps=verify_steps, micro_batch_size=2)
        rollout = RolloutConfig(temperature=temperature)
        ds = DeepSpeedConfig(param_dtype="fp32")
        actor = ActorConfig(adam=AdamConfig(lr=1e-3))
        worker = PolicyWorker(PPOConfig(actor=actor, train=train, rollout=rollout, ds=ds), 0, Mesh())
        worker.model = engine_of(folder, dropout=False)
        worker.mesh = worker.model.mesh
        worker.total_steps = 10
        return worker

    def work() -> None:
        for verify_steps, said in ((1, "transformers' own forward pass"), (0, "the mean of |log ratio|")):
            worker = worker_of(verify_steps, 0.1)
            batch = replace(sampled, log_probs=worker.forward(sampled))
            steps, log_probs = worker.update(batch, [[2, 0], [1]], 0.0)
            assert [step["num_tokens"] for step in steps] == [5, 1] and log_probs is None
            worker = worker_of(verify_steps, 0.1)
            wrong = replace(sampled, log_probs=worker_of(0, 1.0).forward(sampled))
            with broken() as refusal:
                worker.update(wrong, [[2, 0], [1]], 0.0)
            assert said in refusal.value.text and refusal.value.text.startswith("step 1: ")

    threads(1, work)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_head_is_compared_with_a_softmax(folder: Path, temperature: float, softcap: float | None) -> None:
    model = PolicyModel(load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto")).model
    model.config.final_logit_softcapping = softcap
    check_head(model, temperature, "fp32", 1)
    check_head(model.bfloat16(), temperature, "bf16", 1)
    model.float().lm_head.weight.requires_grad_(False)
    check_head(model, temperature, "fp32", 1)


def test_a_head_that_overflows_is_found(folder: Path) -> None:
    model = PolicyModel(load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto")).model

    def unbounded(logits: Tensor, vocabulary: logprobs.Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
        exp = logits.exp_()
        return exp.sum(-1).log(), exp, exp.sum(-1)

    with patch.object(logprobs, "_log_sum_exp", unbounded), broken() as refusal:
        check_head(model, 1.0, "fp32", 1)
    assert "large synthetic hidden states" in refusal.value.text


@pytest.mark.parametrize("wrong", ["scale", "entropy", "value"])
def test_a_wrong_head_is_found(folder: Path, wrong: str) -> None:
    model = PolicyModel(load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto")).model
    right, score = logprobs._LinearLogProbs.backward, logprobs._score

    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple:
        if wrong == "scale":
            ctx.scale = 1.0
        return right(ctx, grad_log_probs, None if wrong == "entropy" else grad_entropy)

    def shifted(*args: Any) -> tuple:
        log_z, log_probs, entropy = score(*args)
        return log_z, log_probs + (0.1 if wrong == "value" else 0.0), entropy

    with (
        patch.object(logprobs._LinearLogProbs, "backward", staticmethod(backward)),
        patch.object(logprobs, "_score", shifted),
        broken() as refusal,
    ):
        check_head(model, 0.5, "fp32", 1)
    said = "of log-probs and entropies of" if wrong == "entropy" else "of log-probs of"
    assert said in refusal.value.text
