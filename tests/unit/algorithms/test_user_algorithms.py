"""Estimators, losses, corrections and proximal policies of users: files, modules and registered names."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_trainer import config_of, fit, trainer_of
from records import batch_of, by_sequence, step_view, trajectory
from refusals import Refusal, printed

from openrlhf.algorithms.advantages.base import AdvantageEstimator
from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.config.commands import PPO
from openrlhf.config.options import PREFIX
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, PPOConfig
from openrlhf.errors import ErrorCode
from openrlhf.loop.rl_checks import check_algorithm
from openrlhf.registry import Registry
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.training.advantages import compute_advantages
from openrlhf.training.advantages import step_view as view_of
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.types import Batch, not_none
from openrlhf.user_file import UserFiles

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"
OPO, SAPO = f"{EXAMPLES}/opo.py:OPO", f"{EXAMPLES}/sapo.py:SAPO"
ESTIMATOR, LOSS = "--algo.advantage.estimator", "--actor.policy_loss_type"
BASE = "from openrlhf.algorithms.advantages.base import AdvantageEstimator\n"
FLAGS = (
    "--actor.model_name_or_path org/model --data.prompt_dataset org/rows --reward.remote_url http://host/r "
    "--rollout.n_samples_per_prompt 4"
)


def parsed(*words: str) -> PPOConfig:
    return parse(PPO, [*FLAGS.split(), *words]).config


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> Refusal:
    """Returns the only error that these flags cause."""
    with pytest.raises(SystemExit):
        parsed(*words)
    (found,) = printed(capsys.readouterr().err)
    return found


# ---- an estimator: OPO


def test_opo_in_the_credit_of_a_step():
    """Lengths 1, 3 and 2, 2 give baselines (4 + 3 * 0) / 4 = 1 and (2 * 1 + 2 * 3) / 4 = 2; one sample is
    alone."""
    config = parsed(ESTIMATOR, OPO)
    samples = [(0, 4.0, 1), (0, 0.0, 3), (1, 1.0, 2), (2, 5.0, 2), (1, 3.0, 2)]
    trajectories = [
        trajectory(reward, [7] * length, prompt_id=prompt, sample_index=i)
        for i, (prompt, reward, length) in enumerate(samples)
    ]
    batch, _ = compute_advantages(
        Batch.of(trajectories),
        trajectories,
        estimator=config.algo.build_estimator(),
        algo=config.algo,
        reward=config.reward,
        kl_coef=0.0,
        max_new_tokens=8,
    )
    assert batch.advantages.dtype == np.float32
    assert [a.tolist() for a in by_sequence(batch, batch.advantages)] == [
        [3],
        [-1, -1, -1],
        [-1, -1],
        [0, 0],
        [1, 1],
    ]


def test_opo_of_samples_without_actions():
    lengths = torch.tensor([0, 0, 0, 2])
    step = step_view(torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 0, 1, 1]), lengths=lengths)
    assert parsed(ESTIMATOR, OPO).algo.build_estimator().shape(step).tolist() == [0, 0, -2, 0]


def test_a_step_as_an_estimator_sees_it():
    """One episode has two sequences and three turns, one has one turn, and one sequence names no episode."""
    trajectories = [
        trajectory(1.0, [7] * 3, sample_index=0, turn_starts=[1, 3], extra_logs={"style": 0.5}),
        trajectory(1.0, [7] * 2, sample_index=0, part=1, turn_starts=[1], extra_logs={"style": 0.5}),
        trajectory(-1.0, [7], sample_index=1, score=0.25, truncated=True),
    ]
    batch, config = Batch.of(trajectories), PPOConfig()
    options = {"algo": config.algo, "reward": config.reward, "max_new_tokens": 8}
    step = view_of(batch, trajectories, **options)
    assert step.rewards.tolist() == [1, -1] and step.group_ids.tolist() == [0, 0]
    assert step.lengths.tolist() == [5, 1] and step.counts.tolist() == [3, 2, 1]
    assert step.episodes.tolist() == [0, 0, 1] and step.turns.tolist() == [3, 1]
    assert step.truncated.tolist() == [False, True]
    assert step.named_rewards["score"].tolist() == [1, 0.25]
    assert step.named_rewards["style"].tolist() == [0.5, pytest.approx(math.nan, nan_ok=True)]


# ---- a loss with options: SAPO


def sapo_loss(*words: str) -> tuple[float, torch.Tensor]:
    """Returns the loss of two actions with ratios 1.5 and 0.5 and advantages 2 and -1, and its gradient by
    log pi."""
    config = parsed(LOSS, SAPO, ESTIMATOR, "reinforce", "--algo.kl.init_coef", "0", *words)
    log_probs = torch.tensor([1.5, 0.5]).log().requires_grad_()
    batch = batch_of([trajectory(1.0, [2, 3])], log_probs=0.0, advantages=[2.0, -1.0])
    loss, metrics = PolicyObjective.from_config(config, 0.0)(
        lambda row, temperature, with_entropy: SimpleNamespace(log_probs=log_probs, entropy=None),
        ExperienceRow.of(batch),
        LossNorm(2, 1),
    )
    assert metrics["policy/clip_fraction"] == 0
    loss.backward()
    return loss.item(), not_none(log_probs.grad)


def test_the_options_of_a_loss_reach_the_objective():
    """The loss is -4 / tau * sigmoid(tau * (ratio - 1)) * A, its derivative by log pi -4 * s * (1 - s) *
    ratio * A, and both are means over both actions."""
    for negative, words in ((1.05, ()), (3.0, ("--algo.options.tau_negative", "3"))):
        above, below = 1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(negative * 0.5))
        loss, gradient = sapo_loss(*words)
        assert loss == pytest.approx((-4 * above * 2 + 4 / negative * below) / 2)
        slopes = [-4 * above * (1 - above) * 1.5 * 2, 4 * below * (1 - below) * 0.5]
        assert gradient.tolist() == pytest.approx([slope / 2 for slope in slopes])


def test_on_policy_it_learns_what_ppo_does():
    batch = ExperienceRow.of(batch_of([trajectory(1.0, [2, 3])], log_probs=0.0, advantages=[2.0, -1.0]))

    def gradient(loss_type: str) -> list[float]:
        log_probs = torch.zeros(2, requires_grad=True)
        loss, _ = PolicyObjective(loss_type=loss_type)(
            lambda row, temperature, with_entropy: SimpleNamespace(log_probs=log_probs, entropy=None),
            batch,
            LossNorm(2, 1),
        )
        loss.backward()
        return not_none(log_probs.grad).tolist()

    assert gradient(SAPO) == pytest.approx(gradient("ppo"))


# ---- options


def test_options_are_recorded_whole_and_read_back(tmp_path):
    config = parsed(LOSS, SAPO, "--algo.options.tau_negative", "1.5")
    assert config.algo.options == {"tau_positive": 1.0, "tau_negative": 1.5}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse(PPO, ["--config", str(tmp_path / "config.yaml")]).config == config


def test_help_shows_the_options_of_what_is_selected(capsys):
    with pytest.raises(SystemExit):
        parsed(LOSS, SAPO, "--algo.options.tau_negative", "1.5", "--help", "options")
    text = capsys.readouterr().out
    assert "--algo.options.tau_positive FLOAT (default: 1.0)\n      Temperature of the gate where" in text
    assert "--algo.options.tau_negative FLOAT (now: 1.5)" in text


@pytest.mark.parametrize(
    ("words", "code", "place", "named"),
    [
        ((LOSS, SAPO, "--algo.options.tau_negative", "0"), "invalid-value", "tau_negative 0", "more than 0"),
        ((LOSS, SAPO, "--algo.options.tau_negative", "hot"), "invalid-value", "tau_negative hot", "number"),
        ((LOSS, SAPO, "--algo.options.tau", "1"), "unknown-flag", "tau", "tau_negative (of SAPO)"),
        (("--algo.options.tau", "1"), "unknown-flag", "tau", "none"),
    ],
)
def test_an_option_with_an_unknown_name_or_an_invalid_value_is_refused(capsys, words, code, place, named):
    error = refusal(capsys, *words)
    assert (error.code, error.place) == (code, f"--{PREFIX}{place}")
    assert named in error.text


# ---- traits


def test_an_estimator_that_reads_log_probs_gets_them(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        BASE + "class Mine(AdvantageEstimator):\n    needs_log_probs = True\n"
        "    def shape(self, step):\n        return step.rewards + step.log_probs.mean()\n"
    )
    words = (ESTIMATOR, f"{path}:Mine", "--algo.kl.init_coef", "0", "--train.batch_size", "1024")
    words += ("--rollout.batch_size", "256")
    config = parsed(*words)
    assert config.updates_per_step == 1 and not config.skips_old_log_probs
    assert replace(config, algo=AlgoConfig(kl=config.algo.kl)).skips_old_log_probs
    check_algorithm(config, ESTIMATOR, f"{path}:Mine")
    error = refusal(capsys, *words, "--algo.skip_old_log_probs")
    assert (error.code, error.place) == (ErrorCode.CONFLICT, "--algo.skip_old_log_probs")


# ---- files with something wrong


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\nraise OSError('no licence')\n", "line 2: OSError: no licence"),
        ("class Mine(:\n", "line 1: SyntaxError: invalid syntax"),
        (BASE + "class Other(AdvantageEstimator): pass\n", "mine.py has no Mine. It has Other."),
        (
            "\nclass Mine: pass\n",
            "line 2: Mine must be a subclass of openrlhf.algorithms.advantages.base.AdvantageEstimator",
        ),
        (
            BASE + "class Mine(AdvantageEstimator):\n    beta: float\n",
            "line 2: Mine: give the option beta a default, as `beta: float = 1.0`",
        ),
        (BASE + "class Mine(AdvantageEstimator):\n    beta: dict = None\n", "(<class 'dict'>)"),
        (BASE + "class Mine(AdvantageEstimator):\n    beta: 'Beta' = None\n", "'Beta'"),
    ],
)
def test_a_file_without_a_usable_class_is_refused(tmp_path, monkeypatch, capsys, text, problem):
    """The option is not also reported as unknown."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(text)
    error = refusal(capsys, ESTIMATOR, "mine.py:Mine", "--algo.options.beta", "1")
    assert error.place.startswith(ESTIMATOR) and problem in error.text


def test_a_loss_without_its_function(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from openrlhf.algorithms.policy_losses.base import PolicyLoss\nclass Mine(PolicyLoss): pass\n"
    )
    error = refusal(capsys, LOSS, f"{path}:Mine")
    assert error.place == f"{LOSS} {path}:Mine"
    assert "line 2" in error.text and "__call__" in error.text


def test_an_option_of_two_classes_is_refused(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(BASE + "class Mine(AdvantageEstimator):\n    tau_negative: float = 1.0\n")
    words = (ESTIMATOR, f"{path}:Mine", LOSS, SAPO)
    for more in ((), ("--help", "estimator")):
        error = refusal(capsys, *words, *more)
        assert error.place == LOSS and "tau_negative" in error.text


def test_an_unknown_name_is_refused(capsys):
    error = refusal(capsys, ESTIMATOR, "gpro")
    assert (error.code, error.place) == (ErrorCode.INVALID_VALUE, f"{ESTIMATOR} gpro")
    assert "group_norm, " in error.text


# ---- a state

RUNNING = (
    BASE
    + '''
class Running(AdvantageEstimator):
    """Minus the mean reward of earlier steps."""

    decay: float = 0.5

    def __post_init__(self):
        self.mean = 0.0

    def shape(self, step):
        baseline = self.mean
        self.mean = self.decay * baseline + (1 - self.decay) * float(step.rewards.mean())
        return step.rewards - baseline

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]
'''
)


@pytest.mark.parametrize("knows_state", [True, False])
def test_a_resumed_estimator_goes_on_where_it_was(tmp_path, knows_state):
    """Each prompt has rewards 0 and 1: baselines 0, 1/4, 3/8, 7/16. Without a state the estimator begins
    anew."""
    (tmp_path / "mine.py").write_text(RUNNING)
    config = config_of(tmp_path, save_steps=2, best_metric_key="none")
    algo = AlgoConfig(
        advantage=AdvantageConfig(estimator=f"{tmp_path}/mine.py:Running"),
        kl=replace(config.algo.kl, init_coef=0.0),
    )
    config = replace(config, algo=algo)
    first = trainer_of(tmp_path, config, total_steps=3)
    fit(first)
    saved = first.policy.saved
    assert saved["global_step2"]["estimator"] == {"mean": 3 / 8}
    if not knows_state:
        del saved["global_step2"]["estimator"]
    second = trainer_of(tmp_path, config, total_steps=4, resume="global_step2", saved=saved)
    fit(second)

    def lowest(trainer) -> list[float]:
        return [float(not_none(batch.advantages).min()) for batch, *_ in trainer.policy.updates]

    assert lowest(first) == [0, -1 / 4, -3 / 8]
    assert lowest(second) == ([-3 / 8, -7 / 16] if knows_state else [0, -1 / 4])


# ---- other machines, and other checkpoints


def test_another_machine_gets_the_files(tmp_path, monkeypatch):
    """The other machine may have a file of the same name with another content."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opo.py").write_text((EXAMPLES / "opo.py").read_text())
    config = parsed(ESTIMATOR, "opo.py:OPO", LOSS, SAPO, "--algo.options.tau_negative", "2")
    files = UserFiles.of(*config.references.values())
    (tmp_path / "opo.py").write_text("raise OSError\n")
    there = config.with_references(files.here)
    assert there.actor == config.actor and there.algo.options == config.algo.options
    estimator = there.algo.advantage.estimator
    assert estimator.startswith(str(tmp_path / "cache")) and estimator.endswith("opo.py:OPO")
    assert there.algo.build_estimator().needs_group
    ours = PPOConfig()
    assert ours.with_references(files.here) == ours


def build_run_fingerprint(config: PPOConfig, checksum: str) -> RunFingerprint:
    return RunFingerprint.of("ppo", config, {LOSS: f"checksum {checksum} of SAPO"})


def test_a_checkpoint_is_of_the_file_and_its_options(tmp_path):
    before = build_run_fingerprint(parsed(LOSS, SAPO), "a")
    (tmp_path / "sapo.py").write_text((EXAMPLES / "sapo.py").read_text())
    moved = parsed(LOSS, f"{tmp_path}/sapo.py:SAPO")
    assert compare(before, build_run_fingerprint(moved, "a")) == ([], [])
    assert compare(before, build_run_fingerprint(moved, "b")).differences == [
        f"{LOSS} was {SAPO} (checksum a of SAPO), is {tmp_path}/sapo.py:SAPO (checksum b of SAPO)"
    ]
    other = parsed(LOSS, SAPO, "--algo.options.tau_negative", "2")
    assert compare(before, build_run_fingerprint(other, "a")).differences == [
        "--algo.options.tau_negative was 1.05, is 2.0"
    ]
    ours = RunFingerprint.of("ppo", parsed(LOSS, "ppo"), {})
    assert f"{LOSS} was ppo, is {SAPO}" in compare(ours, before).differences


# ---- packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs a package `house` that registers OPO and SAPO."""
    folder = tmp_path / "site" / "house"
    folder.mkdir(parents=True)
    for name in ("opo.py", "sapo.py"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    info = folder.with_name("house-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[openrlhf.advantages]\nhouse_opo = house.opo:OPO\n\n"
        "[openrlhf.policy_losses]\nsapo = house.sapo:SAPO\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def test_names_that_a_package_registers(package, capsys):
    config = parsed(ESTIMATOR, "house_opo", LOSS, "house.sapo:SAPO", "--algo.options.tau_negative", "2")
    assert config.references == {
        "algo.advantage.estimator": "house.opo:OPO",
        "actor.policy_loss_type": "house.sapo:SAPO",
    }
    assert config.selected["algo.advantage.estimator"].__module__ == "house.opo"
    assert "rloo, house_opo, " in refusal(capsys, ESTIMATOR, "house_op").text


def test_two_files_of_a_package_with_one_name_are_refused(tmp_path, monkeypatch):
    """A subclass that forgets to say its own name causes the clash."""
    (tmp_path / "twice").mkdir()
    (tmp_path / "twice" / "__init__.py").write_text("")
    (tmp_path / "twice" / "one.py").write_text(f'{BASE}class One(AdvantageEstimator):\n    name = "one"\n')
    (tmp_path / "twice" / "two.py").write_text("from twice.one import One\nclass Two(One):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"two\.py.* Two .*one\.py.* One"):
        _ = Registry("twice", AdvantageEstimator).ours
