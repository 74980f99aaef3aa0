"""The objectives of the supervised family on packed rows, with real models, equal plain formulas over
transformers' forward of one sequence at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.models.backbone import RowModel
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel, TokenScores
from openrlhf.models.process_reward import ProcessRewardModel
from openrlhf.models.scorer import load_scorer
from openrlhf.models.student import StudentModel, TeacherModel, linear_head
from openrlhf.rows import (
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
from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer
from openrlhf.tools.reference.objectives import plain_loss
from openrlhf.tools.reference.outputs import distribution, plain_log_probs, plain_logits, plain_score
from openrlhf.training.objectives.dpo import DPOObjective, pair_log_probs
from openrlhf.training.objectives.kd import DistillationObjective
from openrlhf.training.objectives.kto import KTOObjective, MismatchedLogRatio, unpaired_log_probs
from openrlhf.training.objectives.prm import ProcessObjective
from openrlhf.training.objectives.ptx import PTXObjective
from openrlhf.training.objectives.rm import RewardObjective, ScoreMoments
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.types import not_none

BETA = 0.1
REWARD_TOKENS = (7, 5, 200)


def make_sample(length: int, num_actions: int, seed: int) -> Sample:
    """Returns a prompt, and an answer of `num_actions` tokens with a token of feedback in its middle."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) >= length - num_actions - 1
    mask[length - 1 - num_actions // 2] = False
    return Sample(token_ids=torch.randint(3, 300, (length,), generator=random), action_mask=mask)


def score_last(sample: Sample) -> Sample:
    return replace(sample, action_mask=torch.arange(sample.length) == sample.length - 1)


SHAPES, OTHER_SHAPES = [(9, 5), (14, 3), (5, 2), (11, 8), (7, 1)], [(8, 4), (6, 3), (12, 7), (9, 2), (10, 6)]
SAMPLES = [make_sample(*shape, seed=i) for i, shape in enumerate(SHAPES)]
OTHERS = [make_sample(*shape, seed=9 - i) for i, shape in enumerate(OTHER_SHAPES)]
MARGINS = (0.0, 0.7, -0.2, 1.5, 0.0)
SCORED = [
    Pair(chosen=score_last(c), rejected=score_last(r), margin=m)
    for c, r, m in zip(SAMPLES, OTHERS, MARGINS, strict=True)
]
PAIRS = [Pair(chosen=c, rejected=r) for c, r in zip(SAMPLES, OTHERS, strict=True)]
JUDGED = [
    UnpairedExample(sample=s, mismatched=o, desirable=i % 3 != 1)
    for i, (s, o) in enumerate(zip(SAMPLES, OTHERS, strict=True))
]


def labelled_steps(make_label: Callable[[int], Any]) -> list[Steps]:
    counts = [s.num_actions for s in SAMPLES]
    return [
        Steps(sample=s, labels=torch.tensor([make_label(3 * i + k) for k in range(n)]))
        for i, (s, n) in enumerate(zip(SAMPLES, counts, strict=True))
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Writes a policy, a reference not far from it, a wider teacher, and a reward model."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("policy", "reference", "teacher", "scorer")}
    policy = tiny_model(tiny_tokenizer(), hidden_size=48)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(2 if p.ndim > 1 else 1)  # with its first weights all tokens are about equally likely
    policy.save_pretrained(made["policy"])
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=random))
    policy.save_pretrained(made["reference"])
    teacher = tiny_model(tiny_tokenizer(), seed=2, hidden_size=96)
    with torch.no_grad():
        teacher.model.embed_tokens.weight.mul_(3)
    teacher.save_pretrained(made["teacher"])
    torch.manual_seed(4)
    scorer = load_scorer(str(made["policy"]), flag="--model", dtype="fp32", attention="auto")
    scorer.model.score.weight.data.mul_(3)
    scorer.model.save_pretrained(made["scorer"])
    return made


def our(folder: Path):
    return load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto")


def plain(folder: Path, auto=AutoModelForCausalLM, **options):
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)


@torch.no_grad()
def log_ratio(model, reference, sample: Sample) -> Tensor:
    return plain_log_probs(model, sample).sum() - plain_log_probs(reference, sample).sum()


def loss_of_outputs(case: "Case", model, folders) -> Tensor:
    """Computes the loss of all items by the reference."""
    reference = plain(folders["reference"])
    known = lambda sample: plain_log_probs(reference, sample).detach()
    loss = not_none(plain_loss(case.objective(folders), case.items, known))
    output = plain_score if case.items is SCORED else plain_log_probs
    return loss.loss([output(model, sample) for sample in loss.sequences])


@dataclass(frozen=True, kw_only=True)
class Case:
    items: list
    collate: Callable
    build: Callable[[dict[str, Path]], RowModel]
    objective: Callable[[dict[str, Path]], Any]
    build_plain: Callable[[dict[str, Path]], Any]
    expected: Callable[["Case", Any, dict[str, Path]], Tensor] = loss_of_outputs
    """Computes the loss of all items from the plain model."""


def dpo_case(**options) -> Case:
    return Case(
        items=PAIRS,
        collate=PairRow.of,
        build=lambda folders: PolicyModel(our(folders["policy"])),
        objective=lambda folders: DPOObjective(beta=BETA, reference=reference_of(folders), **options),
        build_plain=lambda folders: plain(folders["policy"]),
    )


def reference_of(folders) -> Callable[[PackedRow], Tensor]:
    reference = PolicyModel(our(folders["reference"]))
    return lambda row: reference(row).log_probs


def kto_kl(model, folders) -> float:
    reference = plain(folders["reference"])
    ratios = [log_ratio(model, reference, example.mismatched).item() for example in JUDGED]
    return sum(ratios) / len(ratios)


def kto_objective(folders):
    kl = max(0.0, kto_kl(plain(folders["policy"]), folders))
    return KTOObjective(
        beta=BETA, desirable_weight=2.0, undesirable_weight=0.5, kl=kl, reference=reference_of(folders)
    )


def prm_case(make_label: Callable[[int], Any], reward_tokens: tuple[int, ...] | None) -> Case:
    items = labelled_steps(make_label)

    def expected(case, model, folders):
        losses = []
        for solution in items:
            logits = model(solution.sample.token_ids[None]).logits[0][solution.sample.action_mask]
            if reward_tokens:
                logits = logits[:, list(reward_tokens)]
            for z, label in zip(logits.log_softmax(-1), solution.labels.tolist(), strict=True):
                if isinstance(label, float):
                    losses.append(-label * z[0] - (1 - label) * z[1])
                else:
                    losses.append(-z[reward_tokens.index(label) if reward_tokens else label])
        return torch.stack(losses).mean()

    return Case(
        items=items,
        collate=StepsRow.of,
        build=lambda folders: ProcessRewardModel(our(folders["policy"])),
        objective=lambda folders: ProcessObjective(reward_token_ids=reward_tokens),
        build_plain=lambda folders: plain(folders["policy"]),
        expected=expected,
    )


def distillation(folders, teacher: str = "teacher", **options) -> DistillationObjective:
    model = TeacherModel(our(folders[teacher])).requires_grad_(False)
    return DistillationObjective(teacher=model, teacher_head=linear_head(model.model), **options)


def kd_case(**options) -> Case:
    def expected(case, model, folders):
        teacher = plain(folders["teacher"])
        coef, temperature = options["coef"], options.get("temperature", 1.0)
        nll, divergence = [], []
        for sample in SAMPLES:
            nll.append(-plain_log_probs(model, sample))
            s = distribution(plain_logits(model, sample), temperature)
            with torch.no_grad():
                t = distribution(plain_logits(teacher, sample), temperature)
            a, b = (t, s) if options.get("kind", "forward_kl") == "forward_kl" else (s, t)
            divergence.append((a.exp() * (a - b)).sum(-1))
        kl = temperature**2 * torch.cat(divergence).mean()
        return (1 - coef) * torch.cat(nll).mean() + coef * kl

    return Case(
        items=SAMPLES,
        collate=PackedRow.of,
        build=lambda folders: StudentModel(our(folders["policy"])),
        objective=lambda folders: distillation(folders, **options),
        build_plain=lambda folders: plain(folders["policy"]),
        expected=expected,
    )


CASES = {
    "sft": Case(
        items=SAMPLES,
        collate=PackedRow.of,
        build=lambda folders: PolicyModel(our(folders["policy"])),
        objective=lambda folders: SFTObjective(),
        build_plain=lambda folders: plain(folders["policy"]),
    ),
    "rm": Case(
        items=SCORED,
        collate=PairRow.of,
        build=lambda folders: load_scorer(
            str(folders["scorer"]), flag="--model", dtype="fp32", attention="auto"
        ),
        objective=lambda folders: RewardObjective(),
        build_plain=lambda folders: plain(
            folders["scorer"], AutoModelForSequenceClassification, num_labels=1
        ),
    ),
    "dpo": dpo_case(),
    "dpo with nll": dpo_case(nll_coef=0.3),
    "cdpo": dpo_case(label_smoothing=0.2),
    "ipo": dpo_case(ipo=True),
    "kto": Case(
        items=JUDGED,
        collate=UnpairedRow.of,
        build=lambda folders: PolicyModel(our(folders["policy"])),
        objective=kto_objective,
        build_plain=lambda folders: plain(folders["policy"]),
    ),
    "prm, all tokens": prm_case(lambda k: (11 * k) % 300, None),
    "prm, reward tokens": prm_case(lambda k: REWARD_TOKENS[k % 3], REWARD_TOKENS),
    "prm, probabilities": prm_case(lambda k: (k % 5) / 4, REWARD_TOKENS[:2]),
    "kd, forward": kd_case(coef=0.4),
    "kd, reverse": kd_case(coef=0.4, kind="reverse_kl"),
    "kd, forward, warm": kd_case(coef=0.7, temperature=2.0),
    "kd, reverse, warm": kd_case(coef=1.0, temperature=2.0, kind="reverse_kl"),
}
each_case = pytest.mark.parametrize("name", CASES)


def norm_of(row) -> LossNorm:
    return LossNorm(row.num_tokens, row.num_sequences)


def gradients(model) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name],
            gradient,
            atol=1e-5 * max(1, largest),
            rtol=1e-4,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@each_case
@pytest.mark.few(7)
def test_value_and_gradient_equal_the_plain_formula(folders, name):
    case = CASES[name]
    reference, model, row = case.build_plain(folders), case.build(folders), case.collate(case.items)
    expected = case.expected(case, reference, folders)
    expected.backward()
    loss, metrics = case.objective(folders)(model, row, norm_of(row))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (reported,) = [value for metric, value in metrics.items() if metric.endswith("/loss")]
    assert reported.item() == loss.item()
    assert not any(value.requires_grad for value in metrics.values())
    assert_close(gradients(model.model), gradients(reference))


@each_case
@pytest.mark.few(7)
def test_rows_of_any_size_add_up(folders, name):
    case = CASES[name]
    whole = case.collate(case.items)
    norm, objective = norm_of(whole), case.objective(folders)
    together, apart = case.build(folders), case.build(folders)
    expected, expected_metrics = objective(together, whole, norm)
    expected.backward()
    rows = [case.collate(case.items[3:]), whole.empty(), case.collate(case.items[:1])]
    rows.append(case.collate(case.items[2:0:-1]))
    totals, total = dict.fromkeys(expected_metrics, 0.0), 0.0
    for row in rows:
        loss, metrics = objective(apart, row, norm)
        loss.backward()
        total += loss.item()
        totals = {metric: value + metrics[metric].item() for metric, value in totals.items()}
    assert total == pytest.approx(expected.item(), rel=1e-5)
    assert totals == pytest.approx(
        {metric: value.item() for metric, value in expected_metrics.items()}, rel=1e-4, abs=1e-5
    )
    assert_close(gradients(apart.model), gradients(together.model))


@each_case
def test_a_row_without_items_costs_nothing_and_still_has_a_gradient(folders, name):
    case = CASES[name]
    model, row = case.build(folders), case.collate(case.items).empty()
    assert (row.num_tokens, row.num_sequences) == (0, 0)
    loss, metrics = case.objective(folders)(model, row, LossNorm(7, 3))
    loss.backward()
    assert loss.item() == 0
    assert {value.item() for value in metrics.values()} == {0.0}
    for parameter, gradient in gradients(model.model).items():
        assert gradient is not None and not gradient.any(), parameter


READ = {
    "dpo": pair_log_probs,
    "dpo with nll": pair_log_probs,
    "ipo": pair_log_probs,
    "kto": unpaired_log_probs,
}


@pytest.mark.parametrize("name", READ)
def test_reference_log_probs_known_beforehand(folders, name):
    case = CASES[name]
    row, model = case.collate(case.items), case.build(folders)
    reference = PolicyModel(our(folders["reference"]))
    with torch.no_grad():
        answers = READ[name](reference, row)
        assert READ[name](reference, row.empty()).shape == (0, 2)
    known = case.collate(
        [replace(item, ref_log_probs=answer) for item, answer in zip(case.items, answers, strict=True)]
    )
    objective = case.objective(folders)
    blind = replace(objective, reference=None)
    for asking, knowing in ((row, known), (row.empty(), known.empty())):
        expected, expected_metrics = objective(model, asking, norm_of(row))
        loss, metrics = blind(model, knowing, norm_of(row))
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(metrics, expected_metrics, atol=1e-5, rtol=1e-5)
    if name == "kto":
        found = [
            MismatchedLogRatio(reference=r)(model, x, norm_of(row))[1]["log_ratio"].item()
            for r, x in ((objective.reference, row), (None, known))
        ]
        assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_policy_and_reference_differ_enough_to_matter(folders):
    model, reference = plain(folders["policy"]), plain(folders["reference"])
    h = torch.stack(
        [log_ratio(model, reference, p.chosen) - log_ratio(model, reference, p.rejected) for p in PAIRS]
    )
    assert 0.5 < h.abs().max() < 30
    assert len({value > 0 for value in h.tolist()}) == 2
    assert kto_kl(model, folders) > 0.1


def test_the_kl_estimate_of_kto_is_the_mean_over_all_rows(folders):
    model = PolicyModel(our(folders["policy"]))
    expected = kto_kl(plain(folders["policy"]), folders)
    norm, objective = LossNorm(1, len(JUDGED)), MismatchedLogRatio(reference=reference_of(folders))
    whole = UnpairedRow.of(JUDGED)
    rows = [UnpairedRow.of(JUDGED[:2]), UnpairedRow.of(JUDGED[2:]), whole.empty()]
    shares = [objective(model, row, norm)[1]["log_ratio"].item() for row in rows]
    assert shares[-1] == 0 and objective(model, whole, norm)[0].item() == 0  # nothing is learned
    assert sum(shares) == pytest.approx(expected, rel=1e-4)
    assert objective(model, whole, norm)[1]["log_ratio"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("desirable", [(True, False, True), (False, False, False)])
def test_kto_metrics_by_hand(desirable):
    one = Sample(token_ids=torch.tensor([3, 4]), action_mask=torch.tensor([False, True]))
    known = torch.tensor([-1.0, -1.0])
    row = UnpairedRow.of(
        [UnpairedExample(sample=one, mismatched=one, desirable=d, ref_log_probs=known) for d in desirable]
    )
    model = lambda row, temperature, with_entropy: TokenScores(torch.tensor([0.0, -0.5, -3.0]), None)
    norm = LossNorm(6, 6)  # other rows have as many answers again, of the same kinds
    share = MismatchedLogRatio()(model, row, norm)[1]["desirable_fraction"].item()
    assert share == pytest.approx(sum(desirable) / 6)
    objective = KTOObjective(beta=0.1, kl=0.3, desirable_fraction=2 * share)
    metrics = {name: value.item() for name, value in objective(model, row, norm)[1].items()}
    rewards = [0.1, 0.05, -0.2]
    assert metrics["kto/kl"] == pytest.approx(0.3 / 2)
    for name, kind in (("kto/desirable_reward", True), ("kto/undesirable_reward", False)):
        of_kind = [r for r, d in zip(rewards, desirable, strict=True) if d == kind]
        assert metrics[name] == pytest.approx(sum(of_kind) / (2 * len(of_kind)) if of_kind else 0)
    is_right = sum((r > 0) == d for r, d in zip(rewards, desirable, strict=True))
    assert metrics["kto/accuracy"] == pytest.approx(is_right / 6)


def test_score_moments(folders):
    case = CASES["rm"]
    model, reference = case.build(folders), case.build_plain(folders)
    with torch.no_grad():
        scores = [plain_score(reference, s).item() for p in SCORED for s in (p.chosen, p.rejected)]
    mean = sum(scores) / len(scores)
    square = sum(score**2 for score in scores) / len(scores)
    norm = LossNorm(1, len(SCORED))
    rows = [PairRow.of(SCORED[:2]), PairRow.of(SCORED).empty(), PairRow.of(SCORED[2:])]
    losses, found = zip(*(ScoreMoments()(model, row, norm) for row in rows), strict=True)
    assert [loss.item() for loss in losses] == [0, 0, 0]  # nothing is learned
    assert sum(m["mean"].item() for m in found) == pytest.approx(mean, rel=1e-4)
    assert sum(m["square"].item() for m in found) == pytest.approx(square, rel=1e-4)


def test_distillation_with_coefficient_zero_is_sft(folders):
    row = PackedRow.of(SAMPLES)
    student, policy = StudentModel(our(folders["policy"])), PolicyModel(our(folders["policy"]))
    loss, metrics = distillation(folders, coef=0.0, temperature=2.0)(student, row, norm_of(row))
    expected, _ = SFTObjective()(policy, row, norm_of(row))
    loss.backward()
    expected.backward()
    assert loss.item() == expected.item() == metrics["kd/nll"].item()
    assert metrics["kd/kl"].item() > 0.1
    assert_close(gradients(student.model), gradients(policy.model))


def test_pretraining_texts_weigh_what_their_coefficient_says(folders):
    policy, row = PolicyModel(our(folders["policy"])), PackedRow.of(SAMPLES)
    loss, metrics = PTXObjective(coef=0.25)(policy, row, norm_of(row))
    expected, _ = SFTObjective()(policy, row, norm_of(row))
    assert loss.item() == pytest.approx(0.25 * expected.item())
    assert metrics["policy/ptx_loss"].item() == pytest.approx(expected.item())


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_a_student_that_is_its_teacher_learns_nothing(folders, kind):
    student, row = StudentModel(our(folders["policy"])), PackedRow.of(SAMPLES)
    objective = distillation(folders, teacher="policy", coef=1.0, temperature=1.5, kind=kind)
    loss, metrics = objective(student, row, norm_of(row))
    loss.backward()
    assert metrics["kd/kl"].item() == pytest.approx(0, abs=1e-6)
    assert metrics["kd/nll"].item() > 1
    assert all(gradient.abs().max() < 1e-5 for gradient in gradients(student.model).values())


def pair_row(*log_probs: tuple[float, float]) -> tuple[Callable, PairRow]:
    """Returns pairs whose answers have these log-probs in their only action, and a reference that finds all
    -1."""
    one = Sample(token_ids=torch.tensor([3, 4]), action_mask=torch.tensor([False, True]))
    row = PairRow.of(
        [Pair(chosen=one, rejected=one, ref_log_probs=torch.tensor([-1.0, -1.0]))] * len(log_probs)
    )
    found = torch.tensor(log_probs).flatten()
    return lambda row, temperature, with_entropy: TokenScores(found, None), row


def test_dpo_metrics_by_hand():
    model, row = pair_row((-0.5, -2.0), (-3.0, -1.0))
    _, metrics = DPOObjective(beta=0.5)(model, row, LossNorm(8, 4))
    # h = 1.5 and -2, of four pairs in the step
    assert metrics["dpo/accuracy"].item() == pytest.approx(1 / 4)
    assert metrics["dpo/chosen_reward"].item() == pytest.approx(0.5 * (0.5 - 2.0) / 4)
    assert metrics["dpo/rejected_reward"].item() == pytest.approx(0.5 * (-1.0 + 0.0) / 4)
    assert metrics["dpo/chosen_nll"].item() == pytest.approx((0.5 + 3.0) / 4)
    expected = (math.log1p(math.exp(-0.75)) + math.log1p(math.exp(1.0))) / 4
    assert metrics["dpo/loss"].item() == pytest.approx(expected)


def test_equal_answers_are_no_accuracy():
    model, row = pair_row((-1.0, -1.0))
    _, metrics = DPOObjective(beta=0.5)(model, row, LossNorm(2, 1))
    assert metrics["dpo/accuracy"].item() == 0
    assert metrics["dpo/loss"].item() == pytest.approx(math.log(2))


def test_reward_metrics_by_hand():
    row = PairRow.of(SCORED[:2])
    scores = torch.tensor([2.0, 1.0, -1.0, 3.0])  # chosen, rejected, chosen, rejected
    _, metrics = RewardObjective()(lambda row: scores, row, LossNorm(8, 4))
    assert metrics["rm/accuracy"].item() == pytest.approx(1 / 4)
    assert metrics["rm/chosen_score"].item() == pytest.approx(1 / 4)
    assert metrics["rm/rejected_score"].item() == pytest.approx(4 / 4)
    # margins 0 and 0.7
    expected = (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(4.7))) / 4
    assert metrics["rm/loss"].item() == pytest.approx(expected)


def test_step_accuracy_by_hand():
    ids = torch.arange(3, 7)
    sample = Sample(token_ids=ids, action_mask=torch.tensor([False, True, True, True]))
    logits = torch.zeros(3, 10)
    logits[0, 4], logits[1, 8], logits[2, 9] = 1.0, 1.0, 5.0  # without restriction: 4, 8, 9

    def accuracy(labels, tokens):
        row = StepsRow.of([Steps(sample=sample, labels=torch.tensor(labels))])
        _, metrics = ProcessObjective(reward_token_ids=tokens)(lambda row: logits, row, LossNorm(6, 2))
        return metrics["prm/accuracy"].item()

    assert accuracy([4, 8, 9], None) == pytest.approx(3 / 6)
    assert accuracy([4, 8, 8], None) == pytest.approx(2 / 6)
    # among 8 and 4 alone: 4, 8, and 8 of two equal ones
    assert accuracy([4, 8, 8], (8, 4)) == pytest.approx(3 / 6)
    assert accuracy([8, 8, 4], (8, 4)) == pytest.approx(1 / 6)
    # probabilities of 8: below a half means 4
    assert accuracy([0.1, 0.9, 0.6], (8, 4)) == pytest.approx(3 / 6)
    assert accuracy([0.9, 0.9, 0.2], (8, 4)) == pytest.approx(1 / 6)
