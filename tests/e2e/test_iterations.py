"""The loops of examples/scripts at toy size: generate, score, train."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf.tasks.word_problem import thinks

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
TRAIN = (
    "--train.batch_size 16 --train.micro_batch_size 16 --data.max_len 256 --ds.zero_stage 0 "
    "--ds.param_dtype fp32 --data.cache_enable false --logger.logging_steps 10"
)


@pytest.fixture
def loop(cpu_engines, knowing, reward_model, tmp_path) -> Callable[..., Path]:
    """Returns a function that runs a script with these variables and returns the folder of its results."""

    def run(script: str, **variables: str) -> Path:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "MODEL": str(knowing.chat),
            "REWARD_MODEL": str(reward_model),
            "PROMPTS": str(knowing.files.prompts),
            "INPUT_KEY": "input",
            "OUT": str(tmp_path / "out"),
            "LAUNCH": "python -m",
            "GENERATE_FLAGS": "--rollout.max_new_tokens 48 --ds.param_dtype fp32 --data.prompt_max_len 100",
            "SCORE_FLAGS": "--ds.param_dtype fp32 --ds.value_head_prefix score --data.max_len 256",
            **variables,
        }
        done = subprocess.run(
            ["bash", SCRIPTS / script], capture_output=True, text=True, timeout=500, env=environment
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return tmp_path / "out"

    return run


@pytest.mark.slow
def test_iterative_dpo(loop, knowing, accuracy) -> None:
    """Two iterations run, the second from the first's model; a second start finds both done."""
    sizes = {"ITERATIONS": "2", "ROLLOUT_BATCH": "128", "BEST_OF_N": "4"}
    out = loop("train_iterative_dpo.sh", **sizes, TRAIN_FLAGS=f"{TRAIN} --adam.lr 3e-4")
    for i in range(2):
        pairs = rows(out / f"iter{i}" / "pairs.jsonl")
        assert pairs and all(p["chosen_reward"] > p["rejected_reward"] for p in pairs)
    assert {p["prompt"] for p in rows(out / "iter0" / "pairs.jsonl")}.isdisjoint(
        p["prompt"] for p in rows(out / "iter1" / "pairs.jsonl")
    )
    assert accuracy(out / "iter1" / "model") > accuracy(knowing.chat) + 0.3
    before = (out / "iter1" / "model" / "model.safetensors").stat().st_mtime_ns
    loop("train_iterative_dpo.sh", **sizes)
    assert (out / "iter1" / "model" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_rejection_sampling(loop, knowing, accuracy) -> None:
    out = loop(
        "train_rejection_sampling.sh",
        ITERATIONS="1",
        ROLLOUT_BATCH="512",
        BEST_OF_N="4",
        TRAIN_FLAGS=f"{TRAIN} --adam.lr 1e-3",
    )
    assert len(rows(out / "iter0" / "best.jsonl")) == 512
    assert accuracy(out / "iter0" / "model") > accuracy(knowing.chat) + 0.3


@pytest.mark.slow
def test_conditional_sft(loop, knowing) -> None:
    """A high score in the prompt brings out answers that think."""
    out = loop(
        "train_conditional.sh",
        DATASET=str(knowing.files.sft),
        OUTPUT_KEY="output",
        PROMPTS=str(knowing.files.eval),
        NUM_PROMPTS="256",
        ASK="<rm_score>: 1.00",
        TRAIN_FLAGS=f"{TRAIN} --adam.lr 1e-3",
    )
    scored = rows(out / "scored.jsonl")
    assert len(scored) == 3200 and all("<rm_score>: " in row["input"] for row in scored)
    answers = rows(out / "answers.jsonl")
    assert len(answers) == 256
    assert sum(thinks(answer["output"]) for answer in answers) > 0.8 * 256


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
