"""Runs of users' own loops, with a model of random weights."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import openrlhf as rl

FLAGS = {
    "rollout.n_samples_per_prompt": 4,
    "rollout.max_new_tokens": 6,
    "data.max_len": 64,
    "ds.param_dtype": "fp32",
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": 0,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    from openrlhf.tasks.tiny_model import tiny_chat_model  # imports torch

    return tiny_chat_model(tmp_path_factory.mktemp("loop") / "model")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., rl.Run]]:
    """Returns a function that starts a run with flags; the run ends with the test."""
    runs: list[rl.Run] = []

    def started(**flags) -> rl.Run:
        own = {"actor": model, "lr": 1e-3, "ckpt.output_dir": tmp_path / "out"}
        runs.append(rl.Run(**own | FLAGS | flags))
        return runs[-1]

    yield started
    for run in runs:
        run.close(cancel=True)
