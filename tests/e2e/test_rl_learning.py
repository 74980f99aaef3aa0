"""Each kind of credit and of reward makes a model solve more problems by reinforcement learning."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from openrlhf.observability.trackers.metrics_file import read_metrics

COMMON = (
    "--rollout.n_samples_per_prompt 8 --rollout.batch_size 32 --rollout.max_new_tokens 48 --data.max_len 128 "
    "--train.batch_size 256 --train.dynamic_batch_enable --train.max_tokens_per_gpu 8192 "
    "--actor.adam.lr 5e-4 --actor.lr_scheduler constant --actor.num_gpus_per_node 1 --train.colocate_all "
    "--ds.zero_stage 2 --ds.param_dtype fp32 --data.apply_chat_template --data.label_key label "
    "--algo.kl.init_coef 0"
)
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
MetricsOfSteps = dict[int, dict[str, float]]

pytestmark = pytest.mark.usefixtures("running_ray")


@pytest.fixture
def train(openrlhf, knowing, tmp_path) -> Callable[[str, str], tuple[Path, MetricsOfSteps]]:
    """Returns a function that runs `openrlhf ppo` on the word problems and returns the model's folder and the
    metrics of each step."""

    def run(flags: str, reward: str = f"--reward.remote_url {knowing.files.reward}"):
        openrlhf(
            f"ppo --actor.model_name_or_path {knowing.chat} --data.prompt_dataset {knowing.files.prompts} "
            f"--ckpt.output_dir {tmp_path / 'policy'} --logger.run_dir {tmp_path / 'run'} "
            f"{COMMON} {reward} {flags}"
        )
        return tmp_path / "policy", read_metrics(tmp_path / "run" / "metrics.jsonl")

    return run


def solved(metrics: MetricsOfSteps, steps: range) -> float:
    """Returns the solved share of everything that was sampled in these steps, also of what was filtered
    out."""
    scores = [metrics[s].get("rollout/sampled_score_mean", metrics[s]["rollout/score_mean"]) for s in steps]
    return sum(scores) / len(scores)


ESTIMATORS = {
    "gae": "--critic.adam.lr 3e-3 --critic.lr_scheduler constant --critic.freezing_steps 2 "
    "--critic.save_value_network --train.max_steps 14",
    "group_norm": "--train.max_steps 9",
    "reinforce_baseline": "--algo.dynamic_filtering_enable --actor.policy_loss_type cispo "
    "--actor.eps_clip_low_high 1 4 --train.max_steps 9",
}


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param("gae", marks=pytest.mark.slow),
        pytest.param("group_norm", marks=pytest.mark.slow),
        "reinforce_baseline",
    ],
)
def test_the_verifier_raises_the_share_of_solved_problems(train, estimator: str) -> None:
    folder, metrics = train(f"--algo.advantage.estimator {estimator} {ESTIMATORS[estimator]}")
    last = len(metrics)
    assert solved(metrics, range(last - 2, last + 1)) > solved(metrics, range(1, 4)) + 0.15
    if estimator == "gae":
        critic = AutoModelForSequenceClassification.from_pretrained(f"{folder}_critic", num_labels=1)
        assert critic.score.weight.abs().max() > 0
        assert "policy/loss" not in metrics[2] and "policy/loss" in metrics[3]  # the critic's warm-up
    if estimator == "reinforce_baseline":
        kept = [metrics[s]["rollout/kept_ratio"] for s in metrics]
        assert 0 < min(kept) < 1
        assert all(metrics[s]["rollout/num_samples"] == 256 for s in metrics)  # filtered groups were replaced
        assert all(metrics[s]["reward/zero_std_fraction"] == 0 for s in metrics)


@pytest.mark.slow
def test_a_reward_model_raises_the_share_of_solved_problems(train, knowing, accuracy, reward_model):
    """The run never sees a label; it sums two copies of the reward model, with weights that add up to 1. It
    makes only four steps, because the policy would go on to exploit the model's mistakes."""
    before = accuracy(knowing.chat)
    folder, metrics = train(
        "--algo.advantage.estimator gae --train.max_steps 4 --critic.adam.lr 1e-3 "
        "--reward.normalize_enable --reward.model_weights 0.75 0.25",
        reward=f"--reward.model_name_or_path {reward_model},{reward_model}",
    )
    after = accuracy(folder)
    assert metrics[4]["rollout/score_mean"] > metrics[1]["rollout/score_mean"] + 0.3
    assert metrics[4]["rollout/reward_model/" + reward_model.name + "_0"] == pytest.approx(
        metrics[4]["rollout/score_mean"], abs=1e-4
    )
    assert after > before + 0.3, shlex.join([str(before), str(after)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "flags"),
    [
        ("agent_retry", ""),
        ("agent_retry", "--train.async_enable"),
        ("agent_openai", "--data.no_apply_chat_template"),
    ],
)
def test_agents_that_try_again_are_right_more_often(train, agent: str, flags: str) -> None:
    """Over several turns both what agents earn and how often they are right in the end rise."""
    path = EXAMPLES / f"{agent}.py"
    _, metrics = train(
        f"--algo.advantage.estimator group_norm --train.max_steps 10 --train.max_turns 3 {flags}",
        reward=f"--train.agent_func_path {path}",
    )
    early, late = range(1, 4), range(8, 11)
    assert solved(metrics, late) > solved(metrics, early) + 0.15
    assert mean_of("rollout/reward_mean", metrics, late) > mean_of("rollout/reward_mean", metrics, early)


def mean_of(name: str, metrics: MetricsOfSteps, steps: range) -> float:
    return sum(metrics[s][name] for s in steps) / len(steps)
