"""The balance loss of experts equals transformers' own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from records import batch_of, trajectory
from refusals import printed, refused
from torch import nn

from openrlhf.config.commands import PPO, SFT
from openrlhf.config.parse import parse
from openrlhf.config.ppo import ActorConfig, PPOConfig
from openrlhf.errors import ErrorCode
from openrlhf.loop.rl_checks import check_files
from openrlhf.models.experts import check_experts, check_routers, freeze_routers, recorded_balance
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ValueModel, load_scorer
from openrlhf.models.self_check import read_one_by_one
from openrlhf.rows import ExperienceRow, LossNorm, PackedRow, Pair, PairRow, Sample
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.policy import GivenGradient, PolicyObjective
from openrlhf.training.objectives.rm import RewardObjective
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.training.trained_worker import CriticWorker, PolicyWorker

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
TOP_3 = {"num_experts_per_tok": 3}
MODELS = {
    "qwen3_moe": hf.Qwen3MoeConfig(**SHAPE, **MOE, num_experts=6),  # pyrefly: ignore[unexpected-keyword]
    "mixtral": hf.MixtralConfig(**SHAPE, num_experts_per_tok=2, num_local_experts=4),
    "olmoe": hf.OlmoeConfig(**SHAPE, **TOP_3, num_experts=5),  # pyrefly: ignore[unexpected-keyword]
}
NO_EXPERTS = {
    "dense": hf.Qwen3Config(**SHAPE),
    "granite": hf.GraniteMoeHybridConfig(
        hidden_size=32, num_hidden_layers=2, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=8
    ),
    "doge": hf.DogeConfig(is_moe=True, num_experts=16, num_experts_per_tok=2),
    "dbrx": hf.DbrxConfig(ffn_config={"hidden_size": 32, "moe_num_experts": 4}),
}
"""Models without experts, and with another load-balancing loss or other names."""
COEF = 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in [*MODELS.items(), *NO_EXPERTS.items()]:
        torch.manual_seed(3)
        made[name] = tmp_path_factory.mktemp(name)
        model = config if name in NO_EXPERTS else hf.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(made[name])
    return made


def policy_of(folder: Path) -> PolicyModel:
    return PolicyModel(load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto"))


def sample(length: int, seed: int) -> Sample:
    ids = torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed))
    return Sample(token_ids=ids, action_mask=torch.arange(length) >= 3)


def gradients(policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


def norm_of(*rows) -> LossNorm:
    return LossNorm(sum(r.num_tokens for r in rows), sum(r.num_sequences for r in rows))


class Wrapped:
    """A model as DeepSpeed's engine wraps it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradient_of_one_row_are_transformers_own(folders: dict, name: str) -> None:
    one = sample(20, seed=1)
    row = PackedRow.of([one])
    policy = policy_of(folders[name])
    objective = BalancedObjective(objective=SFTObjective(), coef=COEF)
    loss, metrics = objective(Wrapped(policy), row, norm_of(row))
    loss.backward()

    plain = hf.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    plain.router_aux_loss_coef = COEF
    labels = one.token_ids.masked_fill(~one.action_mask, -100)[None]
    expected = plain(one.token_ids[None], labels=labels, output_router_logits=True, use_cache=False)
    expected.loss.backward()
    assert metrics["balance_loss"] == pytest.approx(expected.aux_loss.item(), rel=1e-6)
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert metrics["balance_loss"] > plain.num_experts_per_tok + 0.01
    for parameter, grad in gradients(policy).items():
        torch.testing.assert_close(grad, plain.get_parameter(parameter).grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_several_sequences_has_the_balance_of_them_all(folders: dict, name: str) -> None:
    """Packed or one by one, it is transformers' loss of the router logits that it computes for each sequence
    alone."""
    samples = [sample(length, seed=length) for length in (20, 3, 9)]
    row, found = PackedRow.of(samples), []
    for packed in (True, False):
        policy = policy_of(folders[name])
        if not packed:
            read_one_by_one(policy.model)
        loss, metrics = BalancedObjective(objective=SFTObjective(), coef=COEF)(policy, row, norm_of(row))
        loss.backward()
        found.append((metrics["balance_loss"], gradients(policy)))

    plain = hf.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    alone = [plain(s.token_ids[None], output_router_logits=True, use_cache=False) for s in samples]
    logits = tuple(torch.cat(layer) for layer in zip(*(a.router_logits for a in alone), strict=True))
    modeling = sys.modules[type(plain).__module__]
    expected = modeling.load_balancing_loss_func(logits, logits[0].shape[1], plain.num_experts_per_tok)
    for balance, _ in found:
        assert balance == pytest.approx(expected.item(), rel=1e-6)
    for parameter, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][parameter], atol=1e-5, rtol=1e-4)


def test_rows_weigh_as_much_as_their_actions(folders: dict) -> None:
    policy = policy_of(folders["qwen3_moe"])
    rows = [PackedRow.of([sample(20, seed=1)]), PackedRow.of([sample(9, seed=2), sample(6, seed=3)])]
    objective = BalancedObjective(objective=SFTObjective(), coef=COEF)
    alone = [objective(policy, row, norm_of(row))[1]["balance_loss"].item() for row in rows]
    together = [objective(policy, row, norm_of(*rows))[1] for row in [*rows, PackedRow.empty()]]
    weights = [17 / 26, 9 / 26]
    expected = sum(weight * balance for weight, balance in zip(weights, alone, strict=True))
    assert sum(m["balance_loss"].item() for m in together) == pytest.approx(expected, rel=1e-6)
    assert together[-1]["balance_loss"] == 0
    assert abs(alone[0] - alone[1]) > 0.01


def test_the_inner_objective_is_untouched(folders: dict) -> None:
    policy, row = policy_of(folders["qwen3_moe"]), PackedRow.of([sample(20, seed=1)])
    loss, metrics = BalancedObjective(objective=SFTObjective(), coef=COEF)(policy, row, norm_of(row))
    inner, inner_metrics = SFTObjective()(policy, row, norm_of(row))
    assert loss.item() == pytest.approx((inner + COEF * metrics.pop("balance_loss")).item(), rel=1e-6)
    assert metrics == inner_metrics


def test_gradient_checkpointing_keeps_the_gradient(folders: dict) -> None:
    row = PackedRow.of([sample(20, seed=1), sample(5, seed=2)])
    found = []
    for checkpointing in (False, True):
        policy = policy_of(folders["qwen3_moe"]).train()
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        loss, _ = BalancedObjective(objective=SFTObjective(), coef=10.0)(policy, row, norm_of(row))
        loss.backward()
        found.append(gradients(policy))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad)


def test_reentrant_checkpointing_is_refused(capsys: pytest.CaptureFixture) -> None:
    words = "--model.model_name_or_path m --data.dataset d --data.output_key o --model.aux_loss_coef 0.1"
    assert parse(SFT, words.split()).config.model.aux_loss_coef == 0.1
    reentrant = "--model.gradient_checkpointing_enable --model.gradient_checkpointing_reentrant"
    with pytest.raises(SystemExit):
        parse(SFT, f"{words} {reentrant}".split())
    (refusal,) = printed(capsys.readouterr().err)
    place = "--model.gradient_checkpointing_reentrant"
    assert (refusal.code, refusal.place) == (ErrorCode.UNSUPPORTED, place)


@dataclass(frozen=True)
class WithReference:
    """Objective that asks a frozen model, and its own model without a gradient, before it asks the model in
    training."""

    reference: PolicyModel

    def __call__(self, model: Callable, batch: PackedRow, norm: LossNorm):
        other = PackedRow.of([sample(30, seed=9)])
        with torch.no_grad():
            self.reference(other), model(other)
        return SFTObjective()(model, batch, norm)


@pytest.mark.parametrize("with_grad", [True, False])
def test_only_the_pass_in_training_counts(folders: dict, with_grad: bool) -> None:
    policy, row = policy_of(folders["qwen3_moe"]), PackedRow.of([sample(20, seed=1)])
    inner = WithReference(reference=policy_of(folders["qwen3_moe"]))
    with torch.set_grad_enabled(with_grad):
        _, metrics = BalancedObjective(objective=inner, coef=COEF)(policy, row, norm_of(row))
        _, expected = BalancedObjective(objective=SFTObjective(), coef=COEF)(policy, row, norm_of(row))
    assert metrics == expected
    with recorded_balance(policy) as losses:
        inner(policy, row, norm_of(row))
    assert len(losses) == 1 and losses[0].requires_grad
    policy(row)
    assert len(losses) == 1, "nothing is recorded once the context is left"


def test_reward_models_have_experts_too(folders: dict) -> None:
    torch.manual_seed(1)
    scorer = load_scorer(str(folders["qwen3_moe"]), flag="--model", dtype="fp32", attention="auto")
    ends = [
        Sample(token_ids=s.token_ids, action_mask=torch.arange(s.length) == s.length - 1)
        for s in (sample(20, seed=1), sample(9, seed=2))
    ]
    row = PairRow.of([Pair(chosen=ends[0], rejected=ends[1])])
    loss, metrics = BalancedObjective(objective=RewardObjective(), coef=COEF)(scorer, row, norm_of(row))
    assert metrics["balance_loss"] > 2.01
    loss.backward()
    assert scorer.model.model.layers[0].mlp.gate.weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_a_model_without_experts_is_refused(folders: dict, name: str) -> None:
    with refused(ErrorCode.UNSUPPORTED, flag="--model", value=folders[name], told="--model.aux_loss_coef"):
        check_experts(str(folders[name]), "--model", "--model.aux_loss_coef")
    for other in MODELS:
        check_experts(str(folders[other]), "--model", "--model.aux_loss_coef")


def test_policies_and_critics_balance_their_experts(folders: dict) -> None:
    one = sample(20, seed=1)
    sampled = trajectory(token_ids=one.token_ids, action_mask=one.action_mask)
    columns = {"rollout_log_probs": -4.0, "log_probs": -4.0, "values": 0.0, "advantages": 1.0, "returns": 1.0}
    row = ExperienceRow.of(batch_of([sampled], **columns))
    path = str(folders["qwen3_moe"])
    policy, own_loss = policy_of(folders["qwen3_moe"]), GivenGradient(temperature=1.0)
    critic = ValueModel(load_scorer(path, flag="--critic", dtype="fp32", attention="auto").model)
    worker: Any = SimpleNamespace(config=PPOConfig(actor=ActorConfig(aux_loss_coef=COEF)))
    for model, inner, objective in (
        (policy, PolicyObjective.from_config(worker.config, 0.0), PolicyWorker.objective(worker, 0.0)),
        (policy, own_loss, PolicyWorker.objective(worker, 0.0, own_loss)),
        (critic, CriticObjective.from_config(worker.config), CriticWorker.objective(worker, 0.0)),
    ):
        loss, metrics = objective(model, row, norm_of(row))
        plain, _ = inner(model, row, norm_of(row))
        balance = metrics[f"{'critic' if model is critic else 'policy'}/balance_loss"]
        assert balance > 2.01
        assert loss.item() == pytest.approx((plain + COEF * balance).item(), rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_frozen_routers_do_not_move_and_have_no_optimizer_state(folders: dict, name: str) -> None:
    """All other weights move; the experts' outputs still have gradients through the routers' weights."""
    policy, row = policy_of(folders[name]), PackedRow.of([sample(20, seed=1)])
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    freeze_routers(policy.model)
    learns = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=1e-2, weight_decay=0.1)
    BalancedObjective(objective=SFTObjective(), coef=COEF)(policy, row, norm_of(row))[0].backward()
    optimizer.step()
    moved = {n: not torch.equal(p, before[n]) for n, p in policy.model.named_parameters()}
    routers = {n for n in moved if n.endswith("mlp.gate.weight")}
    assert len(routers) == SHAPE["num_hidden_layers"]
    assert {n for n, changed in moved.items() if not changed} == routers
    assert len(optimizer.state) == len(moved) - len(routers)


@pytest.mark.parametrize("name", ["dense", "granite"])
def test_a_model_without_routers_is_refused(folders: dict, name: str) -> None:
    with refused(ErrorCode.UNSUPPORTED, flag="--model", value=folders[name]) as refusal:
        check_routers(str(folders[name]), "--model", "--actor.freeze_moe_router")
    assert "--actor.freeze_moe_router" in refusal.value.text
    for other in MODELS:
        check_routers(str(folders[other]), "--model", "--actor.freeze_moe_router")


COMMAND = "--actor.model_name_or_path m --data.prompt_dataset d --reward.remote_url http://localhost:1/reward"
REENTRANT = "--actor.gradient_checkpointing_reentrant"


def test_the_variant_of_checkpointing_may_be_set_for_the_critic_alone():
    config = parse(PPO, f"{COMMAND} --critic.gradient_checkpointing_enable {REENTRANT}".split()).config
    assert config.actor.gradient_checkpointing_reentrant


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_frozen_routers_are_looked_for_in_the_model_that_has_the_flag(role: str) -> None:
    words = f"{COMMAND} --algo.advantage.estimator gae --{role}.freeze_moe_router"
    asked: list[tuple] = []
    ask = lambda _, check, /, *args, **options: asked.append(args) if check is check_routers else None
    check_files(parse(PPO, words.split()).config, ask, on_cpu=True)
    assert asked == [("m", f"--{role}.model_name_or_path", f"--{role}.freeze_moe_router")]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_checkpointing_that_hides_the_routers_from_the_balance_loss_is_refused(role, capsys):
    words = f"--{role}.gradient_checkpointing_enable --{role}.aux_loss_coef 0.1"
    with pytest.raises(SystemExit):
        parse(PPO, f"{COMMAND} {words} {REENTRANT}".split())
    (refusal,) = printed(capsys.readouterr().err)
    assert (refusal.code, refusal.place) == ("unsupported", REENTRANT)
    assert f"({role}.aux_loss_coef)" in refusal.text
