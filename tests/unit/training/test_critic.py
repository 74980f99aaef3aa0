"""Reading, minimisation and learning schedule of the critic's values."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import trajectory

from openrlhf.algorithms.advantages.returns import explained_variance
from openrlhf.config.ppo import ActorConfig, CriticConfig, PPOConfig
from openrlhf.mesh import Mesh
from openrlhf.models.scorer import ValueModel, load_scorer
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.reference.outputs import values_of_row
from openrlhf.training import trained_worker
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.trained_worker import CriticWorker, PolicyWorker
from openrlhf.types import Batch


@pytest.fixture(scope="module")
def critic(tmp_path_factory) -> ValueModel:
    folder = tiny_chat_model(tmp_path_factory.mktemp("model"), seed=0)
    torch.manual_seed(0)
    return ValueModel(load_scorer(str(folder), flag="--critic", dtype="fp32", attention="auto").model)


def batch_of(shapes: Sequence[tuple[int, list[tuple[int, int]]]], old: float = 0.0) -> Batch:
    """Returns sequences of these lengths, with actions in these spans."""
    samples, returns = [], []
    for seed, (length, spans) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        mask = [any(start <= i < end for start, end in spans) for i in range(length)]
        returns.append(torch.randn(sum(mask), generator=generator))
        token_ids = torch.randint(5, 300, (length,), generator=generator)
        samples.append(trajectory(token_ids=token_ids, action_mask=mask))
    return records.batch_of(samples, values=old, returns=torch.cat(returns))


def test_a_value_is_of_the_state_before_its_action(critic):
    """The value depends on the tokens before the action, and neither on the action nor on what follows."""
    first = ExperienceRow.of(batch_of([(12, [(5, 8)])])).row
    other = replace(first, token_ids=first.token_ids.clone())
    other.token_ids[6:] = 7  # tokens from the second action on
    with torch.no_grad():
        one, two = critic(first), critic(other)
    assert one[0] == two[0] and one[1] == two[1] and one[2] != two[2]
    torch.testing.assert_close(one.double(), values_of_row(critic.model, first), atol=1e-5, rtol=0)


def test_the_loss_by_hand():
    """Values 1, 3 with returns 2, 0 and old values 0, 0 cost max(1, (0.5 - 2)^2) / 2 and max(9, 0.25) / 2."""
    row = ExperienceRow.of(batch_of([(4, [(2, 4)])]))
    row = replace(row, returns=torch.tensor([2.0, 0.0]))
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    loss, metrics = CriticObjective(value_clip=0.5)(lambda row: values, row, LossNorm(2, 1))
    assert loss.item() == pytest.approx((2.25 / 2 + 9 / 2) / 2)
    assert metrics["critic/clip_fraction"] == 0.5 and metrics["critic/value_mean"] == 2
    loss.backward()
    assert values.grad.tolist() == [0, 1.5]  # the clipped value has no gradient


spans = st.sampled_from([[(2, 6)], [(1, 3), (5, 8)], [(4, 5)], [(2, 4), (6, 7), (8, 9)]])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(9, 14), spans), min_size=2, max_size=5), st.randoms())
def test_loss_and_gradient_do_not_depend_on_rows(critic, shapes, random):
    batch = batch_of(shapes, old=0.1)
    norm = LossNorm(int(batch.num_actions.sum()), len(batch))

    def gradient(rows: list[list[int]]) -> tuple[float, torch.Tensor]:
        critic.zero_grad()
        made = [ExperienceRow.of(batch.select(row)) for row in rows]
        losses = [CriticObjective(value_clip=0.5)(critic, row, norm)[0] for row in made]
        sum(losses).backward()
        return sum(losses).item(), critic.model.score.weight.grad.clone()

    everything = list(range(len(batch)))
    loss, grad = gradient([everything])
    shuffled = random.sample(everything, len(batch))
    cut = random.randrange(1, len(batch))
    for rows in ([shuffled], [shuffled[:cut], shuffled[cut:]], [[i] for i in everything]):
        other_loss, other_grad = gradient(rows)
        assert other_loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(other_grad, grad, atol=1e-5, rtol=1e-4)


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 5, returns) == 1  # a constant error has no variance
    assert explained_variance(torch.ones(4), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(1 - 4)
    assert explained_variance(returns, torch.ones(4)) == 0
    values = torch.tensor([0.3, -0.2, 0.1, 0.7])
    assert explained_variance(values, 1e-8 * returns) == 0  # rounding errors of sums of these values
    assert explained_variance(1000 + 0.01 * returns, 1000 + 0.01 * returns) == 1  # far more than rounding


def test_only_a_plain_language_model_gets_a_new_head(tmp_path):
    folder = tiny_chat_model(tmp_path / "model", seed=0)

    def build(path: Path, seed: int) -> ValueModel:
        torch.manual_seed(seed)
        return ValueModel(load_scorer(str(path), flag="--critic", dtype="fp32", attention="auto").model)

    one, two = build(folder, 1), build(folder, 2)
    assert not torch.equal(one.model.score.weight, two.model.score.weight)
    assert one.model.score.weight.std() < 0.1  # values start near 0
    one.model.save_pretrained(tmp_path / "critic")
    again = build(tmp_path / "critic", 2)
    assert torch.equal(again.model.score.weight, one.model.score.weight)
    assert json.loads((tmp_path / "critic" / "config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]
    assert again.model.score.weight.isfinite().all()


@pytest.mark.parametrize(("own", "expected"), [(0.5, 0.5), (0.0, 0.0), (None, 0.25)])
def test_the_critic_balances_its_experts_by_its_own_coefficient(own, expected):
    """A critic without a coefficient of its own takes the actor's; 0 is a coefficient."""
    config = replace(
        PPOConfig(), actor=ActorConfig(aux_loss_coef=0.25), critic=CriticConfig(aux_loss_coef=own)
    )
    objective = CriticWorker(config, 0, Mesh()).objective(0.0)
    assert (objective.coef if isinstance(objective, BalancedObjective) else 0.0) == expected
    of_policy = PolicyWorker(config, 0, Mesh()).objective(0.0)
    assert isinstance(of_policy, BalancedObjective) and of_policy.coef == 0.25


@pytest.mark.parametrize(
    ("actor", "critic", "expected"),
    [(False, True, True), (True, False, False), (True, None, True), (False, None, False)],
)
def test_the_critic_recomputes_activations_by_its_own_flag(monkeypatch, actor, critic, expected):
    config = replace(
        PPOConfig(),
        actor=ActorConfig(gradient_checkpointing_enable=actor),
        critic=CriticConfig(gradient_checkpointing_enable=critic),
    )
    made = [
        options_of_engine(worker_class, config, monkeypatch) for worker_class in (PolicyWorker, CriticWorker)
    ]
    assert [options["gradient_checkpointing"] for options in made] == [actor, expected]
    assert made[0]["optim"] is config.actor and made[1]["optim"] is config.critic


def options_of_engine(
    worker_class: type, config: PPOConfig, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Returns the options that a worker builds its engine with."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(worker_class, "join", lambda self, address, port: None)
    monkeypatch.setattr(trained_worker, "build_engine", lambda build, **options: made.update(options))
    worker_class(config, 0, Mesh()).start("", 0, 10)
    return made
