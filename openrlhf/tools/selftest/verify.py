"""The first optimizer steps, checked by a second computation: `--train.verify_steps`.

shares   The rows' shares of the actions and of the sequences add up to 1 over all ranks.
totals   The loss of a row halves if the step's totals double, so it is divided by them and not by what is
         in the row.
adapters The adapters are on and have the scale alpha / rank. They are trained, and other weights are not.
head     Log-probs and entropies of synthetic hidden states, and their gradients, are those of a softmax.
plain    The log-probs of the row's actions equal those of transformers' own forward pass, one sequence at
         a time, and the loss of SFT, DPO, IPO, KTO and reward models equals that of a formula in a few
         lines. Not where ranks share the weights of a layer or a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from openrlhf.api import (
    ADAPTER,
    DEVICE_TYPE,
    DeepSpeedConfig,
    DPOObjective,
    Hook,
    KTOObjective,
    LoraConfig,
    LossNorm,
    Mesh,
    Metrics,
    MiniBatches,
    Objective,
    PackedRow,
    PolicyModel,
    RewardObjective,
    RowT,
    SFTObjective,
    SupervisedConfig,
    TrainedRank,
    get_head,
    get_row_layout,
    head_name,
    head_options,
    is_classifier,
    reference_log_probs,
)
from openrlhf.tools.reference.objectives import plain_dpo, plain_kto, plain_learning_rate, plain_rm, plain_sft
from openrlhf.tools.reference.outputs import (
    chosen,
    distribution_of,
    entropies,
    log_probs_of_row,
    scores_of_row,
    values_of_row,
)
from openrlhf.tools.selftest.invariants import (
    SAME_POLICY,
    broken,
    check_epochs,
    check_learning_rate,
    check_parts,
)

LOSS, HALVED, PLAIN = "loss", "halved", "plain"
"""The loss of a row; twice the loss with doubled totals; the loss by a plain formula."""
RELATIVE = 1e-3
"""Largest relative difference between two computations of a loss in float32, whose factors GPUs may round."""
ON_CPU = 5e-5
"""The same for a mean of log-probs in float32 on a CPU."""
NUM_STATES = 8
"""Number of synthetic hidden states that check the head."""
LARGE = 1e4
"""Factor of hidden states, whose elements are about 1, that makes exponentials of most logits overflow."""
HEAD = {"fp32": 5e-3, "fp16": 2e-2, "bf16": 5e-2}
"""Largest relative difference between two computations of the head's output and gradient. GPUs may round the
factors of float32 products to TF32."""
VALUES = {"fp32": 0.02, "fp16": 0.1, "bf16": 0.3}
"""Largest mean difference between two computations of a critic's values, as a share of their mean size."""


def _shares(model: Callable, row: RowT, norm: LossNorm) -> tuple[Tensor, dict]:
    """Returns a loss of 0, whose metrics are the sums of the rows' shares of the step's actions and
    sequences. Actions are counted in the mask."""
    packed: Any = getattr(row, "row", row)
    num_actions = int(packed.action_mask.sum())
    return torch.zeros(()), {
        "the sum of the rows' shares of the actions": num_actions / norm.num_tokens,
        "the sum of the rows' shares of the sequences": row.num_sequences / norm.num_sequences,
    }


def _twice(
    objective: Objective,
    plain: Callable[[Any, LossNorm], Tensor] | None,
    model: Callable,
    row: RowT,
    norm: LossNorm,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the objective with the totals of the step, with doubled ones, and, where there is one, by a
    plain formula."""
    loss, _ = objective(model, row, norm)
    totals = None if norm.prompt_tokens is None else 2 * norm.prompt_tokens
    doubled = LossNorm(2 * norm.num_tokens, 2 * norm.num_sequences, totals)
    other, _ = objective(model, row, doubled)
    by_formula = {} if plain is None else {PLAIN: plain(row, norm)}
    return loss, {LOSS: loss.detach(), HALVED: 2 * other.detach()} | by_formula


COVERED = SFTObjective | DPOObjective | KTOObjective | RewardObjective
"""Objectives whose losses have a plain formula on log-probs or scores of transformers' own forward pass."""


def plain_loss(model: PreTrainedModel, objective: COVERED, row: Any, norm: LossNorm) -> Tensor:
    if isinstance(objective, SFTObjective):
        return plain_sft([log_probs_of_row(model, row)], norm.num_tokens)
    if isinstance(objective, RewardObjective):
        return plain_rm(scores_of_row(model, row.row), row.margins, norm.num_sequences)
    answers = log_probs_of_row(model, row.row).split(row.row.num_actions.tolist())
    reference = reference_log_probs(row.ref_log_probs, objective.reference, row.row).double()
    count = row.num_sequences  # 0 in a dummy row
    if isinstance(objective, DPOObjective):
        return plain_dpo(objective, answers[: 2 * count], list(reference), norm.num_sequences)
    is_good = row.desirable.tolist()
    return plain_kto(objective, answers[:count], list(reference[:count]), is_good, norm.num_sequences)


class FirstSteps(Hook):
    """The checks of a supervised run on this rank: its first steps by a second computation, and the learning
    rate of each step."""

    config: SupervisedConfig
    engine: TrainedRank
    mesh: Mesh
    windows: MiniBatches
    """Name of the argument that entry points get."""
    num_verified: int = field(default=0, init=False)

    def before_step(self, step: int, rows: Sequence[Any], objective: Objective) -> None:
        if self.num_verified >= self.config.train.verify_steps:
            return
        if self.windows.shuffle and not self.num_verified:
            check_epochs("samples", self.windows.order, step)
        verify_step(self.engine, rows, objective, step, ds=self.config.ds, mesh=self.mesh)
        self.num_verified += 1

    def after_step(self, step: int, metrics: Metrics) -> None:
        total_steps = self.config.train.total_steps(len(self.windows))
        expected = plain_learning_rate(self.config, step - 1, total_steps)
        check_learning_rate(metrics, expected, self.config.ds.param_dtype, step)


def verify_step(
    engine: TrainedRank,
    rows: Sequence[RowT],
    objective: Objective[RowT],
    step: int,
    *,
    ds: DeepSpeedConfig,
    mesh: Mesh,
    temperature: float = 1.0,
) -> None:
    """Checks the optimizer step on `rows`, this rank's rows, before it is taken. Collective. Changes nothing.

    `mesh`: the mesh of the model's ranks. `temperature`: that of a policy's log-probs. Raises RunError for a
    violated invariant.
    """
    dtype = ds.param_dtype
    if ds.lora.rank > 0:
        check_adapters(engine.module.model, ds.lora, step)
    if isinstance(engine.module, PolicyModel) and is_whole(engine.module.model, mesh):
        check_head(engine.module.model, temperature, dtype, step)
    shares = engine.evaluate(rows, _shares)
    check_parts(shares.items(), step)
    model, plain = engine.module.model, None
    if isinstance(objective, COVERED) and is_whole(model, mesh):
        plain = partial(plain_loss, model, objective)
    found = engine.evaluate(rows[:1], partial(_twice, objective, plain))
    tolerance = RELATIVE if dtype == "fp32" else 20 * RELATIVE
    if dtype == "fp32" and DEVICE_TYPE == "cpu" and isinstance(objective, SFTObjective):
        tolerance = ON_CPU
    if not math.isclose(found[LOSS], found[HALVED], rel_tol=tolerance, abs_tol=tolerance):
        causes = (
            "The objective divides by what is in a row instead of by the totals of the optimizer step, so "
            "the loss depends on packing, micro-batches and the number of ranks."
        )
        quantity = "the loss of a row with doubled totals, times 2,"
        raise broken(step, quantity, f"{found[HALVED]:.6g}", f"{found[LOSS]:.6g}", causes)
    if PLAIN in found and not math.isclose(found[LOSS], found[PLAIN], rel_tol=tolerance, abs_tol=tolerance):
        causes = (
            "Another formula, another mask of actions, or a forward pass that computes sequences in another "
            "way than transformers does (--ds.attn_implementation eager)."
        )
        quantity = "the loss of a row"
        raise broken(step, quantity, f"{found[LOSS]:.6g}", f"{found[PLAIN]:.6g}", causes)


def check_adapters(model: PreTrainedModel, lora: LoraConfig, step: int) -> None:
    """Checks that adapters are on and have their scale, and that they are trained and other weights not.
    Adapters of a frozen image encoder may be frozen."""
    layers: dict[str, Any] = {n: module for n, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, layer in layers.items():
        scale = lora.alpha / lora.rank
        if not math.isclose(found := layer.scaling[ADAPTER], scale):
            causes = "The adapters were built with another alpha or rank than --ds.lora.alpha and .rank."
            raise broken(step, f"the scale of the adapter of {name}", f"{found:g}", f"{scale:g}", causes)
        if layer.disable_adapters:
            causes = "The adapters were turned off for the reference's log-probs, and not on again."
            raise broken(step, f"the adapter of {name}", "off", "on", causes)
    head = head_name(model.config) if is_classifier(model) else None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    others = [name for name in trained if ".lora_" not in name and name.partition(".")[0] != head]
    causes = "With --ds.lora.rank only adapters and the head of a reward model are trained."
    if others:
        raise broken(step, f"the weight {others[0]}", "trained", "frozen", causes)
    if not any(".lora_" in name for name in trained):
        raise broken(step, "the number of adapters that are trained", 0, len(layers), causes)


@torch.enable_grad()
def check_head(model: PreTrainedModel, temperature: float, dtype: str, step: int) -> None:
    """Checks log-probs, entropies and gradients of synthetic hidden states against a whole softmax."""
    head, (scale, softcap) = get_head(model), head_options(model.config)
    weight = cast(Tensor, head.weight)
    synthetic = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_STATES, weight.shape[1], generator=synthetic).to(weight).requires_grad_()
    targets = torch.randint(len(weight), (NUM_STATES,), generator=synthetic).to(hidden.device)
    of_log_probs, of_entropies = torch.randn(2, NUM_STATES, generator=synthetic).to(hidden.device)
    all_log_probs = distribution_of(model, hidden, temperature)
    expected, expected_entropy = chosen(all_log_probs, targets), entropies(all_log_probs)
    options = {"scale": scale / temperature, "softcap": softcap}
    log_probs, entropy = head(hidden, targets, with_entropy=True, **options)
    single, _ = head(hidden, targets, **options)
    summed, _ = head(hidden, targets, summed=True, **options)
    for scores in head(LARGE * hidden.detach(), targets, with_entropy=True, **options):
        if not scores.isfinite().all():
            causes = "The softmax overflows: it takes exponentials of logits without subtracting the largest."
            quantity = "a log-prob or entropy of large synthetic hidden states"
            raise broken(step, quantity, "not finite", "finite", causes)
    for name, found, value in (
        ("log-probs", (single * of_log_probs).sum(), (expected * of_log_probs).sum()),
        ("the sum of log-probs", summed, expected.sum()),
        (
            "log-probs and entropies",
            (log_probs * of_log_probs + entropy * of_entropies).sum(),
            (expected * of_log_probs + expected_entropy * of_entropies).sum(),
        ),
    ):
        (gradient,), (right,) = (torch.autograd.grad(x, hidden, retain_graph=True) for x in (found, value))
        difference = max(
            abs((found - value).item()) / max(1.0, expected.abs().sum().item()),
            float((gradient - right).abs().max() / right.abs().max()),
        )
        if not difference <= HEAD[dtype]:
            causes = "The head computes another distribution, or its gradient, in another way than a softmax."
            quantity = f"the relative error of {name} of synthetic hidden states, or of their gradient,"
            raise broken(step, quantity, f"{difference:.3g}", "0 up to rounding", causes)


def is_whole(model: PreTrainedModel, mesh: Mesh) -> bool:
    """Returns True if no other rank has a part of this rank's rows or weights."""
    return not get_row_layout(model).gathers and mesh.sequence == mesh.tensor == 1


def check_log_probs(
    model: PreTrainedModel, row: PackedRow, found: Tensor, *, temperature: float, dtype: str, step: int
) -> None:
    """Checks that the log-probs `found` (A,) of a row's actions are those of transformers. Does nothing where
    samples have recorded nuclei or experts."""
    if row.kept_ids is not None or row.routing is not None:
        return
    expected = log_probs_of_row(model, row.to(model.device), temperature).cpu()
    difference = float((found.double() - expected).abs().mean()) if len(found) else 0.0
    if not difference <= SAME_POLICY[dtype]:
        causes = (
            "The rows of this run are computed in another way than transformers computes their sequences: "
            "look for the temperature, the mask of actions, positions, or an attention that mixes sequences "
            "(--ds.attn_implementation eager)."
        )
        quantity = "the mean difference of log-probs to those of transformers' own forward pass"
        raise broken(step, quantity, f"{difference:.3g} nats", "0 up to rounding", causes)


def check_values(model: PreTrainedModel, row: PackedRow, found: Tensor, *, dtype: str, step: int) -> None:
    expected = values_of_row(model, row.to(model.device)).cpu()
    size = float(expected.abs().mean()) if len(found) else 0.0
    difference = float((found.double() - expected).abs().mean()) if len(found) else 0.0
    if not difference <= VALUES[dtype] * size:
        causes = (
            "Values are read at other tokens than those before the actions, or rows are computed in another "
            "way than transformers computes their sequences (--ds.attn_implementation eager)."
        )
        quantity = "the mean difference of the critic's values to those of transformers' own forward pass"
        raise broken(
            step, quantity, f"{difference:.3g}", f"0 up to rounding, at a size of {size:.3g}", causes
        )
