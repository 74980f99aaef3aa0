"""The gradient does not change with the layout: micro-batch size, packing, order, accumulation, ranks, ZeRO
stage."""

from collections.abc import Callable

import pytest
import torch

from openrlhf.tasks.prepare import TaskFiles


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, torch.Tensor]]:
    """The first gradient of each objective, which all others must equal."""
    return {}


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (1, 2), (1, 3), (2, 0), (2, 2), (2, 3)])
def test_gradient_does_not_depend_on_layout(
    task: TaskFiles, run_worker: Callable, seen: dict, num_ranks: int, stage: int
) -> None:
    reports = run_worker("gradients", num_ranks, model=str(task.model), stage=stage, attention="auto")
    for name, path in reports[0].items():
        gradients = torch.load(path)
        reference = seen.setdefault(name.split()[0], gradients)
        assert gradients.keys() == reference.keys()
        for parameter, gradient in gradients.items():
            assert reference[parameter].abs().max() > 0, (name, parameter)
            torch.testing.assert_close(
                gradient,
                reference[parameter],
                atol=1e-6,
                rtol=1e-5,
                msg=lambda m, n=name, p=parameter: f"{n} {p}: {m}",
            )
