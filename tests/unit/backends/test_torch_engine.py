"""The torch backend on one rank, without a process of its own; tests/e2e has several ranks and DeepSpeed."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch_engines import BETA1, SAMPLES, engine_of, saved_model

from openrlhf.backends.model_rank import held
from openrlhf.models.tensor_parallel import whole
from openrlhf.rows import PackedRow
from openrlhf.training.objectives.sft import SFTObjective


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"))


def test_log_probs_and_evaluation_are_without_dropout(threads: Callable, folder: Path) -> None:
    """The model trains with dropout; the passes that compare it with others must not have any."""
    row = PackedRow.of(SAMPLES)

    def work() -> tuple:
        engine, plain = engine_of(folder), lambda model, row: model(row).log_probs
        engine.train_step([row], SFTObjective())
        log_probs = [engine.forward([row], plain)[0] for _ in range(2)]
        engine.module.train()
        losses = [engine.evaluate([row], SFTObjective())["sft/loss"] for _ in range(2)]
        return log_probs, losses

    ((log_probs, losses),) = threads(1, work)
    assert torch.equal(*log_probs)
    assert losses == [pytest.approx(-log_probs[0].mean().item())] * 2


def test_an_evaluation_is_the_mean_over_all_rows(threads: Callable, folder: Path) -> None:
    def work() -> list[float]:
        engine = engine_of(folder)
        rows = [[PackedRow.of(SAMPLES)], [PackedRow.of([one]) for one in SAMPLES]]
        return [engine.evaluate(of, SFTObjective())["sft/loss"] for of in rows]

    ((together, apart),) = threads(1, work)
    assert apart == pytest.approx(together)


@pytest.mark.parametrize("max_norm", [0.01, 0.0])
def test_a_long_gradient_is_scaled_down(threads: Callable, folder: Path, max_norm: float) -> None:
    """After the first step AdamW's average is (1 - beta1) times the gradient."""

    def work() -> tuple[float, float]:
        engine = engine_of(folder, max_norm=max_norm)
        reported = engine.train_step([PackedRow.of(SAMPLES)], SFTObjective())["grad_norm"]
        averages = [engine.optimizer.state[p]["exp_avg"] for p in engine.trained.values()]
        return reported, math.sqrt(sum(float(x.square().sum()) for x in averages)) / (1 - BETA1)

    ((reported, used),) = threads(1, work)
    assert reported > 0.1
    assert used == pytest.approx(max_norm or reported, rel=1e-3)


def test_a_resumed_engine_goes_on_with_its_learning_rate(threads, folder, tmp_path):
    row = PackedRow.of(SAMPLES)

    def work() -> tuple[dict, ...]:
        engine = engine_of(folder, lr_warmup_ratio=0.5)
        for _ in range(2):
            engine.train_step([row], SFTObjective())
        engine.save_checkpoint(str(tmp_path), "global_step2", {"step": 2})
        resumed = engine_of(folder, lr_warmup_ratio=0.5)
        state = resumed.load_checkpoint(str(tmp_path), "global_step2")
        return state, *(each.train_step([row], SFTObjective()) for each in (engine, resumed))

    ((state, whole, resumed),) = threads(1, work)
    assert state == {"step": 2}
    assert resumed["lr"] == whole["lr"] == pytest.approx(3 / 5 * 1e-3)


def test_half_precision_keeps_updates_that_it_cannot_represent(threads: Callable, folder: Path) -> None:
    """A weight of 0.02 changes by 1e-5, a tenth of the distance between two numbers in bfloat16."""

    def work() -> tuple[dict, dict]:
        engine = engine_of(folder, dtype="bf16", lr=1e-5, lr_warmup_ratio=0)
        weights = lambda: {n: held(p).detach().clone() for n, p in engine.trained.items()}
        before = weights()
        engine.train_step([PackedRow.of(SAMPLES)], SFTObjective())
        return before, weights()

    ((before, after),) = threads(1, work)
    for name, weight in before.items():
        if "layers" in name:
            assert (after[name] != weight).double().mean() > 0.9, name


def test_ranks_with_different_rows_share_one_model(threads: Callable, folder: Path) -> None:
    def work() -> dict:
        engine = engine_of(folder)
        row = PackedRow.of([SAMPLES[engine.mesh.rank]])
        engine.train_step([row], SFTObjective())
        return {name: whole(p).detach().clone() for name, p in engine.trained.items()}

    first, second = threads(2, work)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
