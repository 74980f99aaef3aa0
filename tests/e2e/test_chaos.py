"""Jobs that are killed, told to stop or run out of disk at random moments. `make chaos` runs them many
times."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disturbed import Disturbance, disturbed, kill, stop
from judged_answers import TaskFiles

from openrlhf.errors import ErrorCode

slow = pytest.mark.slow


def number(name: str, default: int) -> int:
    """Returns a count of faults, which `make chaos` sets by an environment variable."""
    return int(os.environ.get(f"CHAOS_{name}", default))


SUPERVISED, RL, STOPS, SAVES = (
    number("KILLS", 4),
    number("RL_KILLS", 2),
    number("STOPS", 5),
    number("SAVES", 20),
)
RL_JOBS = ("ppo", "async ppo")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "disturb", "count", "inside"),
    [
        pytest.param("sft", kill, 3, 1, id="sft-sample"),
        *(
            pytest.param(kind, kill, SUPERVISED, SUPERVISED // 4, id=kind, marks=slow)
            for kind in ("sft", "dpo", "rm", "sft saving later")
        ),
        *(pytest.param(kind, kill, RL, -(-RL // 3), id=kind, marks=slow) for kind in RL_JOBS),
        pytest.param("sft", stop, 2, 1, id="stop-sample"),
        pytest.param("sft", stop, STOPS, STOPS // 5, id="stop", marks=slow),
    ],
)
def test_a_disturbed_job_ends_as_one_that_was_left_alone(
    task: TaskFiles,
    tmp_path: Path,
    record_property: Callable,
    request: pytest.FixtureRequest,
    kind: str,
    disturb: Disturbance,
    count: int,
    inside: int,
) -> None:
    """Metrics and weights are equal to the last bit, those of RL with all samples; an asynchronous job trains
    on the same samples, each once. A whole checkpoint is there after each kill, one of the last step after
    each SIGTERM."""
    if kind in RL_JOBS:
        request.getfixturevalue("cpu_engines")
    steps = 12 if count <= 3 or kind in RL_JOBS else 40
    found = disturbed(kind, task, tmp_path, disturb, count=count, inside=inside, steps=steps)
    record_property("figure", str(found))
    assert not found.wrong
    assert found.disturbed >= count and found.inside >= inside and found.compared


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [8, pytest.param(SAVES, marks=slow, id="many")])
@pytest.mark.parametrize("backend", ["deepspeed", pytest.param("torch", marks=slow)])
def test_a_full_disk_costs_no_checkpoint_and_no_model(task, run_worker, record_property, backend, count):
    flags = (
        f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        "--data.apply_chat_template --data.max_samples 24 --data.max_len 96 --train.batch_size 4 "
        "--train.micro_batch_size 4 --train.max_epochs 100 --adam.lr 1e-2 --ds.param_dtype fp32 "
        f"--train.backend {backend}"
    )
    (report,) = run_worker("full_disk", 1, flags=flags, count=count, seed=3)
    wrong = []
    for save in report["saves"]:
        in_words = save["code"] == ErrorCode.NOT_WRITABLE and save["text"].count("\n") < 3
        if not (in_words and save["is_unchanged"] and save["tag"] == ["global_step2", []]):
            wrong.append(save)
    record_property("figure", f"{count - len(wrong)} of {count} in words, all files as before")
    assert len(report["saves"]) == count and not wrong, wrong[:3]
