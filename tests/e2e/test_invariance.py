"""The gradient does not change with the layout: micro-batch size, packing, order, accumulation, ranks, how
ranks share rows, ZeRO stage. Samples, and the answers of pairs, have common prefixes, which are read once
where a row holds several of them, and for each where it holds one."""

from collections.abc import Callable
from itertools import cycle, product
from typing import Any, NamedTuple, get_args

import pytest
import torch
from architectures import tiny_config, tiny_model
from judged_answers import PLACEHOLDER, TaskFiles

from openrlhf.config.choices import SequenceParallelMode
from openrlhf.tasks.tiny_model import tiny_chat_model

Gradients = dict[str, torch.Tensor]

slow = pytest.mark.slow
WHOLE = [
    ("deepspeed", 1, 0, "all"),
    *[("deepspeed", 2, stage, "some") for stage in (0, 2, 3)],
    ("torch", 2, 3, "some"),
    *[
        pytest.param("deepspeed", *ranks, "all", marks=slow)
        for ranks in [(1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    ],
    *[pytest.param("torch", *ranks, "all", marks=slow) for ranks in [(1, 3), (2, 2), (2, 3)]],
]
"""(backend, number of ranks, ZeRO stage, layouts); each rank has rows of its own. Layouts: all of each
objective, or some, which are all of them over the objectives."""


class Ranks(NamedTuple):
    """Number of ranks of a model, and how many of them share each row and each matrix."""

    number: int
    sequence: int = 1
    tensor: int = 1


OBJECTIVES = ("sft", "rm", "prm", "dpo", "kto", "kd", "ppo", "critic")
MODES = tuple(mode for mode in get_args(SequenceParallelMode) if mode != "auto")
STAGES = range(4)
MESHES = Ranks(2, 2), Ranks(4, 2), Ranks(4, 4)


def covering() -> dict[Ranks, list[tuple[str, str, int]]]:
    """Returns a few (objective, mode, stage) that cover all pairs of a mode and a stage, of each of these and
    a number of ranks, and all objectives."""
    cases: dict[Ranks, list] = {mesh: [] for mesh in MESHES[:2]}
    pairs = product(enumerate(MODES), STAGES)
    for objective, ((place, mode), stage) in zip(cycle(OBJECTIVES), pairs, strict=False):
        cases[MESHES[(place + stage) % 2]].append((objective, mode, stage))
    return cases


@pytest.fixture(scope="module")
def seen() -> dict[str, Gradients]:
    """Keeps the first gradient of each objective, which all others must equal."""
    return {}


@pytest.fixture(scope="module")
def seen_metrics() -> dict[str, dict[str, float]]:
    """Keeps the first metrics of each objective, which all others must equal."""
    return {}


@pytest.fixture(scope="module")
def commands(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns flags of the supervised commands; flags after the first word of each may differ without
    changing anything."""
    reference = tiny_chat_model(tmp_path_factory.mktemp("reference"), seed=1)
    teacher = tiny_chat_model(tmp_path_factory.mktemp("teacher"), seed=2, hidden_size=64)
    ref = f"--ref.model_name_or_path {reference}"
    dpo = f"--data.dataset {task.pairs} --data.prompt_key prompt {ref} --model.nll_loss_coef 0.1"
    unpaired = f"--data.dataset {task.unpaired} --data.output_key output --model.beta 0.1 {ref}"
    return {
        "sft": f"--data.dataset {task.sft} --data.output_key output",
        "rm": f"--data.dataset {task.pairs} --data.prompt_key prompt "
        f"--eval.dataset {task.pairs_eval} --eval.split train --eval.max_samples 7",
        "dpo": dpo,
        "dpo with known reference": f"{dpo} --ref.precompute_enable --train.batch_size 4",
        "kto": unpaired,
        "kto with known reference": f"{unpaired} --ref.precompute_enable --train.batch_size 4",
        "prm": f"--data.dataset {task.steps} --data.placeholder_token {PLACEHOLDER} --data.reward_tokens + -",
        "kd": f"--data.dataset {task.sft} --data.output_key output --teacher.model_name_or_path {teacher} "
        "--model.kd_loss_type reverse_kl --model.kd_temperature 2",
    }


def check_equal(name: str, found: Gradients, expected: Gradients, *, atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for parameter, gradient in found.items():
        assert expected[parameter].abs().max() > 1e-4, (name, parameter)
        torch.testing.assert_close(
            gradient, expected[parameter], atol=atol, rtol=1e-5, msg=lambda m, p=parameter: f"{name} {p}: {m}"
        )


@pytest.mark.parametrize(("backend", "num_ranks", "stage", "layouts"), WHOLE)
def test_gradient_does_not_depend_on_layout(task, run_worker, seen, backend, num_ranks, stage, layouts):
    options = {"backend": backend, "stage": stage, "layouts": layouts, "attention": "auto"}
    reports = run_worker("gradients", num_ranks, model=str(task.model), **options)
    for name, path in reports[0].items():
        gradients = torch.load(path)
        check_equal(name, gradients, seen.setdefault(name.split()[0], gradients))
    both = {name: seen["ppo"][name] + 0.5 * text for name, text in seen["sft"].items()}
    check_equal("ppo-ptx is the sum", seen["ppo-ptx"], both)


CHECKPOINTING = {"checkpointing": True}


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"stage": 2, "lora_rank": 4, **CHECKPOINTING, "on_host": True}),
        pytest.param(1, {"stage": 2, "lora_rank": 4, "in_4bit": True}, marks=slow),
        pytest.param(1, {"stage": 0, **CHECKPOINTING, "reentrant": True}, marks=slow),
        pytest.param(2, {"stage": 3, **CHECKPOINTING}, marks=slow),
        pytest.param(2, {"stage": 3, "lora_rank": 4, **CHECKPOINTING, "reentrant": True}, marks=slow),
        pytest.param(2, {"stage": 3, "backend": "torch", "lora_rank": 4, **CHECKPOINTING}, marks=slow),
    ],
)
def test_common_prefixes_with_adapters_and_layers_that_are_computed_again(
    whole_blocks: TaskFiles, run_worker: Callable, num_ranks: int, options: dict[str, Any]
) -> None:
    found: dict[str, Gradients] = {}
    for share in ("false", "true"):
        (report, *_) = run_worker(
            "gradients",
            num_ranks,
            model=str(whole_blocks.model),
            attention="auto",
            objectives=["sft", "ppo"],
            share_prefixes=share,
            **options,
        )
        for name, path in report.items():
            gradients = torch.load(path)
            check_equal(f"{name}, {share}", gradients, found.setdefault(name.split()[0], gradients))


@pytest.mark.parametrize(
    ("backend", "num_ranks", "stage"),
    [
        ("deepspeed", 1, 2),
        ("deepspeed", 2, 3),
        pytest.param("deepspeed", 1, 3, marks=slow),
        pytest.param("deepspeed", 2, 2, marks=slow),
        pytest.param("torch", 2, 3, marks=slow),
    ],
)
def test_models_that_read_one_sequence_at_a_time(run_worker, seen, tmp_path, backend, num_ranks, stage):
    """Ranks have rows of different numbers of sequences, and gather weights for each sequence."""
    config = tiny_config("stablelm")
    config.vocab_size = 300  # the worker draws its samples from this vocabulary
    tiny_model(config).save_pretrained(tmp_path / "model")
    (report, *_) = run_worker(
        "gradients",
        num_ranks,
        model=str(tmp_path / "model"),
        backend=backend,
        stage=stage,
        attention="auto",
        objectives=["sft"],
    )
    for name, path in report.items():
        gradients = torch.load(path)
        check_equal(name, gradients, seen.setdefault("one by one", gradients))


@pytest.mark.parametrize(("backend", "num_ranks", "stage", "layouts"), WHOLE)
def test_no_supervised_command_depends_on_layout(
    task: TaskFiles,
    run_worker: Callable,
    commands: dict,
    seen: dict,
    seen_metrics: dict,
    backend: str,
    num_ranks: int,
    stage: int,
    layouts: str,
) -> None:
    """The commands run with all their flags except those of the layout, with KTO's KL estimate of the whole
    batch, the statistics of a reward model's scores, and sharded references and teachers."""
    (report, *_) = run_worker(
        "supervised_gradients",
        num_ranks,
        commands=commands,
        common=common_flags(task),
        backend=backend,
        stage=stage,
        layouts=layouts,
    )
    for name, found in report.items():
        check_command(name, found, seen, seen_metrics)
    assert seen_metrics["cli kto"]["kto/kl"] > 0
    assert seen_metrics["cli rm"]["std"] > 0
    assert seen_metrics["cli dpo"]["num_tokens"] > 100


def common_flags(task: TaskFiles) -> str:
    return (
        f"--model.model_name_or_path {task.model} --data.max_samples 10 --ds.param_dtype fp32 "
        "--max_norm 0 --adam.lr 0"
    )


def check_command(name: str, found: dict[str, Any], seen: dict, seen_metrics: dict) -> None:
    gradients, metrics = torch.load(found["gradients"]), found["metrics"]
    command = "cli " + name.split(":")[0].split()[0]
    check_equal(name, gradients, seen.setdefault(command, gradients))
    expected = seen_metrics.setdefault(command, metrics)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5), name


@pytest.fixture
def on_mesh(task, run_worker, commands, seen, seen_metrics) -> Callable[[Ranks, list, str], None]:
    """Returns a function that runs each (objective, mode, stage) on a mesh, in one group of processes, and
    compares it with one rank."""

    def compare(ranks: Ranks, cases: list, layouts: str) -> None:
        (report, *_) = run_worker(
            "mesh_gradients",
            ranks.number,
            model=str(task.model),
            commands=commands,
            common=common_flags(task),
            attention="auto",
            sequence=ranks.sequence,
            tensor=ranks.tensor,
            cases=cases,
            layouts=layouts,
        )
        for name, found in report.items():
            if "metrics" in found:
                check_command(name, found, seen, seen_metrics)
            else:
                gradients = torch.load(found["gradients"])
                check_equal(name, gradients, seen.setdefault(name.split()[0], gradients))

    def run(ranks: Ranks, cases: list, layouts: str) -> None:
        key = lambda objective: f"cli {objective}" if objective in commands else objective
        if unknown := sorted({case[0] for case in cases if key(case[0]) not in seen}):
            compare(Ranks(1), [(objective, "auto", 0) for objective in unknown], "last")
        compare(ranks, cases, layouts)

    return run


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(ranks, cases, marks=[slow] if ranks.number > 2 else [])
        for ranks, cases in covering().items()
    ],
)
def test_ranks_that_share_rows(on_mesh: Callable, ranks: Ranks, cases: list) -> None:
    """Ranks share rows in every mode, at every stage."""
    on_mesh(ranks, cases, "last")


@slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", MESHES)
def test_every_objective_on_ranks_that_share_rows(on_mesh: Callable, ranks: Ranks, mode: str) -> None:
    on_mesh(ranks, list(product(OBJECTIVES, [mode], STAGES)), "all")


@slow
@pytest.mark.parametrize("ranks", [Ranks(2, tensor=2), Ranks(4, tensor=2), Ranks(4, sequence=2, tensor=2)])
def test_every_objective_on_ranks_that_share_matrices(on_mesh: Callable, ranks: Ranks) -> None:
    on_mesh(ranks, list(product(OBJECTIVES, ["auto"], STAGES[:3])), "all")
