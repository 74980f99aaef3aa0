"""Speculative decoding: samples follow the policy, and their recorded log-probs are the policy's."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sending import options_of
from test_rl import COLOCATED, COMMON, train

from openrlhf.backends.vllm.engine import engine_environment
from openrlhf.tasks.prepare import TaskFiles


def p_value(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Returns the p-value of Pearson's chi-square test of counts, after merging rare categories into the
    last one."""
    total, observed, expected = sum(counts), [], []
    rare = [0, 0.0]
    for count, probability in zip(counts, probabilities, strict=True):
        if probability * total >= 5:
            observed.append(count)
            expected.append(probability * total)
        else:
            rare = [rare[0] + count, rare[1] + probability * total]
    if rare[1] >= 5:
        observed.append(rare[0])
        expected.append(rare[1])
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half = torch.tensor([len(observed) - 1.0, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*half).item()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_samples_of_speculative_decoding_follow_the_model(task, run_worker, cpu_engines, monkeypatch, method):
    """Compares first tokens and lengths of 2000 answers with the probabilities that the model itself has."""
    for name, value in engine_environment(options_of(str(task.model))).items():
        monkeypatch.setenv(name, value)
    speculative: dict = {"method": method, "num_speculative_tokens": 3}
    speculative |= {"prompt_lookup_max": 4} if method == "ngram" else {"model": str(task.model)}
    (found,) = run_worker("speculation", 1, model=str(task.model), speculative=json.dumps(speculative))
    assert max(found["pieces"]) > 1  # proposals were accepted
    assert found["gap"] < 1e-4
    assert found["repeatable"]
    first, lengths = Counter(found["first"]), Counter(found["lengths"])
    of_tokens = found["first probabilities"]
    assert p_value([first[i] for i in range(len(of_tokens))], of_tokens) > 1e-3
    reached, of_lengths = 1.0, []
    for repeated in found["repeated probabilities"][:-1]:
        of_lengths.append(reached * (1 - repeated))
        reached *= repeated
    of_lengths.append(reached)
    assert len(of_lengths) == 12
    assert p_value([lengths[i] for i in range(1, 13)], of_lengths) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
def test_a_run_with_speculative_decoding(task: TaskFiles, tmp_path: Path) -> None:
    metrics = train(task, tmp_path, f"{COMMON} {COLOCATED} --ds.zero_stage 2 --vllm.speculative ngram:3")
    assert max(metrics[step]["mismatch/abs_diff_max"] for step in (1, 2)) < 1e-4
