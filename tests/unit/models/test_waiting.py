"""A micro-batch queues its work on the GPU and never waits for it. Tensors without data stand for those of a
GPU: reading a value of one raises."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from architectures import tiny_config, tiny_model
from records import batch_of, trajectory
from torch import Tensor
from torch.overrides import TorchFunctionMode

from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES
from openrlhf.algorithms.reductions import AGGREGATIONS
from openrlhf.models.backbone import RowModel
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.process_reward import ProcessRewardModel
from openrlhf.models.scorer import ScoreModel, ValueModel, load_scorer
from openrlhf.models.student import StudentModel, TeacherModel, linear_head
from openrlhf.rows import (
    ExperienceRow,
    LossNorm,
    PackedRow,
    Pair,
    PairRow,
    Sample,
    Steps,
    StepsRow,
    UnpairedExample,
    UnpairedRow,
)
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.kd import DistillationObjective
from openrlhf.training.objectives.kto import KTOObjective, MismatchedLogRatio
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.objectives.prm import ProcessObjective
from openrlhf.training.objectives.ptx import PTXObjective
from openrlhf.training.objectives.rm import RewardObjective, ScoreMoments
from openrlhf.training.objectives.sft import SFTObjective

NORM = LossNorm(12.0, 4.0, torch.ones(1, device="meta"))


class CopiesThatWait(TorchFunctionMode):
    """Counts as a wait, on tensors without data, also copies that a GPU would wait for: values of Python and
    of host tensors without `non_blocking`."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_meta and waits(func, args, kwargs):
            raise AssertionError(f"{func.__name__} waits for the GPU")
        return result


def waits(func: Callable, args: tuple, kwargs: dict) -> bool:
    if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
        return not isinstance(args[-1], Tensor)
    if func in (torch.where, Tensor.where):  # `where` makes a host tensor of a number
        return not all(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
    return func is Tensor.to and not args[0].is_meta and not kwargs.get("non_blocking")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_chat_model(tmp_path_factory.mktemp("model"), seed=0))


def sample(length: int, num_actions: int) -> Sample:
    mask = torch.arange(length) >= length - num_actions
    return Sample(token_ids=torch.arange(3, length + 3), action_mask=mask)


SAMPLES = [sample(9, 5), sample(7, 3), sample(5, 1), sample(8, 3)]
EXPERIENCES = batch_of(
    [
        trajectory(token_ids=range(3, 3 + length), action_mask=[False] * 2 + [True] * (length - 2))
        for length in (5, 7)
    ],
    log_probs=-1.0,
    ref_log_probs=-1.1,
    values=0.1,
    advantages=0.5,
    returns=0.3,
    staleness=np.int32(2),
    prompts=np.int32(0),
)
PACKED = PackedRow.of(SAMPLES)
PAIRS = PairRow.of([Pair(chosen=a, rejected=b, margin=0.1) for a, b in (SAMPLES[:2], SAMPLES[2:])])
JUDGED = UnpairedRow.of(
    [UnpairedExample(sample=s, mismatched=SAMPLES[0], desirable=i % 2 == 0) for i, s in enumerate(SAMPLES)]
)
STEPS = StepsRow.of([Steps(sample=s, labels=torch.full((s.num_actions,), 7)) for s in SAMPLES])
CHANCES = StepsRow.of([Steps(sample=s, labels=torch.full((s.num_actions,), 0.7)) for s in SAMPLES])


class Case(NamedTuple):
    model: type[RowModel]
    row: Any
    objective: Callable[[str], Any]
    """Makes the objective from the folder of a model, which references and teachers are too."""


def frozen(folder: str) -> Callable[[PackedRow], Tensor]:
    model = on_gpu(PolicyModel, folder)
    return lambda row: model(row).log_probs


def teacher_targets(folder: str) -> DistillationObjective:
    teacher = on_gpu(TeacherModel, folder)
    return DistillationObjective(teacher=teacher, teacher_head=linear_head(teacher.model), coef=0.5)


def actor(**options: Any) -> Case:
    made = PolicyObjective(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01, seen=[], **options)
    return Case(PolicyModel, ExperienceRow.of(EXPERIENCES), lambda folder: made)


CASES = {
    "sft": Case(PolicyModel, PACKED, lambda folder: SFTObjective()),
    "ptx": Case(PolicyModel, PACKED, lambda folder: PTXObjective(coef=0.1)),
    "rm": Case(ScoreModel, PAIRS, lambda folder: RewardObjective()),
    "moments": Case(ScoreModel, PAIRS, lambda folder: ScoreMoments()),
    "dpo": Case(
        PolicyModel, PAIRS, lambda folder: DPOObjective(beta=0.1, nll_coef=0.1, reference=frozen(folder))
    ),
    "kto": Case(PolicyModel, JUDGED, lambda folder: KTOObjective(beta=0.1, kl=0.2, reference=frozen(folder))),
    "kto's kl": Case(PolicyModel, JUDGED, lambda folder: MismatchedLogRatio(reference=frozen(folder))),
    "prm": Case(ProcessRewardModel, STEPS, lambda folder: ProcessObjective(reward_token_ids=(7, 5))),
    "prm of chances": Case(
        ProcessRewardModel, CHANCES, lambda folder: ProcessObjective(reward_token_ids=(7, 5))
    ),
    "kd": Case(StudentModel, PACKED, teacher_targets),
    "critic": Case(ValueModel, ExperienceRow.of(EXPERIENCES), lambda folder: CriticObjective(value_clip=0.2)),
    "actor, cispo": actor(loss_type="cispo"),
    "actor, gspo": actor(loss_type="gspo", dual_clip=3.0),
    **{f"actor, {name}": actor(aggregation=name) for name in AGGREGATIONS},
    **{f"actor, {name}": actor(correction=name) for name in CORRECTIONS},
    **{f"actor, {name}": actor(proximal_policy=name, staleness_decay=0.5) for name in PROXIMAL_POLICIES},
    "actor, stale sequences": actor(loss_type="gspo", staleness_decay=0.5, max_staleness=1),
}


def on_gpu(kind: type[RowModel], folder: str) -> RowModel:
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto"}
    if issubclass(kind, ScoreModel):
        return kind(load_scorer(folder, **options).model).to("meta")
    return kind(load_causal_lm(folder, **options)).to("meta")


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_no_objective_waits_for_the_gpu(folder: str, name: str) -> None:
    case = CASES[name]
    model, objective = on_gpu(case.model, folder), case.objective(folder)
    with CopiesThatWait():
        loss, metrics = objective(model, case.row.to("meta"), NORM)
        loss.backward()
    assert loss.is_meta and metrics and all(value.is_meta for value in metrics.values())
    assert case.row.to("meta").num_tokens == case.row.num_tokens  # a balance loss asks for it


def test_nor_does_a_mixture_of_experts_in_half_precision(tmp_path: Path) -> None:
    """The kernel is the one that transformers chooses; the eager one asks which experts were hit."""
    config = tiny_config("qwen3_moe")
    tiny_model(config).save_pretrained(tmp_path)
    options = {"flag": "--model", "dtype": "bf16", "attention": "auto"}
    model = PolicyModel(load_causal_lm(str(tmp_path), **options)).to("meta")
    with CopiesThatWait():
        loss, _ = SFTObjective()(model, PACKED.to("meta"), NORM)
        loss.backward()
    assert loss.is_meta


def test_the_check_finds_operations_that_wait(folder: str) -> None:
    ids = PACKED.to("meta").token_ids
    for ask in (
        lambda: ids.sum().item(),
        lambda: ids[ids > 3],
        lambda: ids.cpu(),
        lambda: (ids > 3).nonzero(),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()
    for move in (
        lambda: torch.tensor([1, 2], device="meta"),
        lambda: torch.where(ids > 3, ids, 0),
        lambda: torch.ones(2).to("meta"),
    ):
        with CopiesThatWait(), pytest.raises(AssertionError, match="waits for the GPU"):
            move()
