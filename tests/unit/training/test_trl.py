"""The same batches through TRL: metrics of the same name have the same value."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.gkd import GKDTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as DataCollatorForScores
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from openrlhf.config.old_flags import OTHER_NAMES
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import load_scorer
from openrlhf.models.student import StudentModel, TeacherModel, linear_head
from openrlhf.rows import LossNorm, PackedRow, Pair, PairRow, Sample, UnpairedExample, UnpairedRow
from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer
from openrlhf.tools.reference.outputs import plain_log_probs
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.kd import DistillationObjective
from openrlhf.training.objectives.kto import KTOObjective, MismatchedLogRatio
from openrlhf.training.objectives.rm import RewardObjective
from openrlhf.training.objectives.sft import SFTObjective

TOKENIZER = tiny_tokenizer()
PAD = TOKENIZER.pad_token_id


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    answer: list[int]

    @property
    def sample(self) -> Sample:
        mask = [False] * len(self.prompt) + [True] * len(self.answer)
        return Sample(token_ids=torch.tensor(self.prompt + self.answer), action_mask=torch.tensor(mask))

    @property
    def scored(self) -> Sample:
        sample = self.sample
        return replace(sample, action_mask=torch.arange(sample.length) == sample.length - 1)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def answers_of(*shapes: tuple[int, int], seed: int = 0) -> list[Answer]:
    """Returns prompts and answers of these lengths; the prompts are the same for every seed."""
    return [
        Answer(tokens(prompt, seed=i), tokens(answer, seed=100 * (seed + 1) + i))
        for i, (prompt, answer) in enumerate(shapes)
    ]


CHOSEN = answers_of((4, 5), (9, 3), (3, 8), (6, 1))
REJECTED = answers_of((4, 7), (9, 2), (3, 4), (6, 6), seed=1)
EQUAL_SHAPES = ((4, 5), (9, 5), (3, 5))
EQUALLY_LONG = list(zip(answers_of(*EQUAL_SHAPES), answers_of(*EQUAL_SHAPES, seed=1), strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Writes a policy, a reference not far from it, a wider teacher, and a reward model."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("policy", "reference", "teacher", "scorer")}
    policy, teacher = tiny_model(TOKENIZER, hidden_size=48), tiny_model(TOKENIZER, seed=2)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(2 if p.ndim > 1 else 1)  # with its first weights all tokens are about equally likely
        teacher.model.embed_tokens.weight.mul_(3)
    policy.save_pretrained(made["policy"])
    teacher.save_pretrained(made["teacher"])
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=random))
    policy.save_pretrained(made["reference"])
    torch.manual_seed(4)
    scorer = load_scorer(str(made["policy"]), flag="--model", dtype="fp32", attention="auto")
    scorer.model.score.weight.data.mul_(3)
    scorer.model.save_pretrained(made["scorer"])
    return made


def our(folder: Path):
    return load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto")


def their(folder: Path, auto=AutoModelForCausalLM, **options):
    """Loads a model for one trainer alone: TRL changes the forward of the model that it is given."""
    return auto.from_pretrained(folder, dtype=torch.float32, **options)


@torch.no_grad()
def plain_log_prob(folder: Path, answer: Answer) -> float:
    """Returns the log-prob of an answer by transformers' own forward pass of the sequence alone."""
    return float(plain_log_probs(their(folder).eval(), answer.sample).sum())


def trainer(trainer_type, config_type, rows: list[dict], folder: Path, **models) -> Any:
    """Builds a TRL trainer on the CPU. Its data only has to be there; losses are computed on the tests'
    batches."""
    args = config_type(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
    )
    made = trainer_type(
        args=args, train_dataset=Dataset.from_list(rows), processing_class=TOKENIZER, **models
    )
    made.model.eval()
    return made


@pytest.fixture(scope="module")
def dpo_trainer(folders, tmp_path_factory) -> DPOTrainer:
    rows = [{"prompt": "Tom", "chosen": " has", "rejected": " 3"}] * 2
    models = {"model": their(folders["policy"]), "ref_model": their(folders["reference"])}
    return trainer(DPOTrainer, DPOConfig, rows, tmp_path_factory.mktemp("dpo"), **models)


@pytest.fixture(scope="module")
def kto_trainer(folders, tmp_path_factory) -> KTOTrainer:
    rows = [{"prompt": "Tom", "completion": " has", "label": label} for label in (True, False)]
    models = {"model": their(folders["policy"]), "ref_model": their(folders["reference"])}
    return trainer(KTOTrainer, KTOConfig, rows, tmp_path_factory.mktemp("kto"), **models)


@pytest.fixture(scope="module")
def reward_trainer(folders, tmp_path_factory) -> RewardTrainer:
    rows = [{"chosen": "Tom has", "rejected": "Tom 3"}] * 2
    model = their(folders["scorer"], AutoModelForSequenceClassification, num_labels=1)
    return trainer(RewardTrainer, RewardConfig, rows, tmp_path_factory.mktemp("rm"), model=model)


@pytest.fixture(scope="module")
def sft_trainer(folders, tmp_path_factory) -> SFTTrainer:
    rows = [{"prompt": "Tom", "completion": " has"}] * 2
    return trainer(
        SFTTrainer, SFTConfig, rows, tmp_path_factory.mktemp("sft"), model=their(folders["policy"])
    )


def norm_of(row) -> LossNorm:
    return LossNorm(row.num_tokens, row.num_sequences)


def our_dpo(folders, pairs, **options) -> dict[str, float]:
    reference = PolicyModel(our(folders["reference"]))
    objective = DPOObjective(reference=lambda row: reference(row).log_probs, **options)
    row = PairRow.of([Pair(chosen=a.sample, rejected=b.sample) for a, b in pairs])
    with torch.no_grad():
        _, metrics = objective(PolicyModel(our(folders["policy"])), row, norm_of(row))
    return {name: value.item() for name, value in metrics.items()}


def their_dpo(trainer: DPOTrainer, pairs, *losses: str, beta: float, weights=(1.0,), smoothing=0.0) -> float:
    trainer.loss_types, trainer.loss_weights = list(losses), list(weights)
    trainer.beta, trainer.label_smoothing = beta, smoothing
    batch = DataCollatorForPreference(pad_token_id=PAD)(
        [{"prompt_ids": a.prompt, "chosen_ids": a.answer, "rejected_ids": b.answer} for a, b in pairs]
    )
    with torch.no_grad():
        return trainer.compute_loss(trainer.model, batch).item()


PAIRS = list(zip(CHOSEN, REJECTED, strict=True))


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo(folders, dpo_trainer, beta):
    expected = their_dpo(dpo_trainer, PAIRS, "sigmoid", beta=beta)
    assert abs(expected - math.log(2)) > 0.01
    assert our_dpo(folders, PAIRS, beta=beta)["dpo/loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("e", [0.1, 0.3])
def test_label_smoothing(folders, dpo_trainer, e):
    """TRL has robust DPO, ((1 - e) l(h) - e l(-h)) / (1 - 2 e), in the place of cDPO, (1 - e) l(h) + e l(-h).
    Hence cDPO = 2 (1 - e) l(h) - (1 - 2 e) robust."""
    weights = (2 * (1 - e), -(1 - 2 * e))
    expected = their_dpo(dpo_trainer, PAIRS, "sigmoid", "robust", beta=0.2, weights=weights, smoothing=e)
    found = our_dpo(folders, PAIRS, beta=0.2, label_smoothing=e)["dpo/loss"]
    assert found == pytest.approx(expected, abs=1e-5)


def test_ipo(folders, dpo_trainer):
    """TRL divides the log-ratio of an answer by its n tokens, the paper does not. For answers of n tokens (h
    - n / (2 beta))^2 = n^2 (h / n - 1 / (2 beta))^2: the paper's with beta / n is n^2 times TRL's."""
    n, beta = 5, 2.0
    expected = n**2 * their_dpo(dpo_trainer, EQUALLY_LONG, "ipo", beta=beta)
    found = our_dpo(folders, EQUALLY_LONG, beta=beta / n, ipo=True)["dpo/loss"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_dpo_with_likelihood_of_the_chosen_answers(folders, dpo_trainer):
    """TRL averages over the tokens of all answers, openrlhf over answers: the same where they are equally
    long."""
    expected = their_dpo(dpo_trainer, EQUALLY_LONG, "sigmoid", "sft", beta=0.1, weights=(1.0, 0.3))
    found = our_dpo(folders, EQUALLY_LONG, beta=0.1, nll_coef=0.3)["dpo/loss"]
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("mismatched_seed", "sign"), [(3, 1), (6, -1)])
def test_kto(folders, kto_trainer, mismatched_seed, sign):
    """The KL estimate is that of the batch, also where it is cut at 0."""
    others = answers_of((4, 9), (9, 6), (3, 5), (6, 7), seed=mismatched_seed)
    labels = [True, False, False, False]
    batch = DataCollatorForUnpairedPreference(pad_token_id=PAD)(
        [
            {
                "prompt_ids": answer.prompt,
                "completion_ids": answer.answer,
                "KL_completion_ids": other.answer,
                "label": label,
            }
            for answer, other, label in zip(CHOSEN, others, labels, strict=True)
        ]
    )
    kto_trainer.beta, kto_trainer.desirable_weight, kto_trainer.undesirable_weight = 0.2, 1.5, 0.5
    with torch.no_grad():
        expected = kto_trainer.compute_loss(kto_trainer.model, batch).item()

    policy, reference = PolicyModel(our(folders["policy"])), PolicyModel(our(folders["reference"]))
    row = UnpairedRow.of(
        [
            UnpairedExample(sample=answer.sample, mismatched=other.sample, desirable=label)
            for answer, other, label in zip(CHOSEN, others, labels, strict=True)
        ]
    )
    ask = lambda row: reference(row).log_probs
    with torch.no_grad():
        figures = MismatchedLogRatio(reference=ask)(policy, row, norm_of(row))[1]
        estimate, share = figures["log_ratio"].item(), figures["desirable_fraction"].item()
        objective = KTOObjective(
            beta=0.2,
            desirable_weight=1.5,
            undesirable_weight=0.5,
            kl=max(0.0, estimate),
            desirable_fraction=share,
            reference=ask,
        )
        loss, metrics = objective(policy, row, norm_of(row))
    plain = [plain_log_prob(folders["policy"], x) - plain_log_prob(folders["reference"], x) for x in others]
    assert estimate == pytest.approx(sum(plain) / len(plain), abs=1e-4)
    assert sign * estimate > 0.2
    assert kto_trainer._metrics["eval"]["kl"][-1] == pytest.approx(max(0.0, estimate), abs=1e-4)
    assert metrics["kto/kl"].item() == pytest.approx(max(0.0, estimate))
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    for ours, theirs in (("desirable", "chosen"), ("undesirable", "rejected")):
        reward = kto_trainer._metrics["eval"][f"rewards/{theirs}"][-1]
        assert metrics[f"kto/{ours}_reward"].item() == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("margins", [None, [0.5, 0.0, -1.0, 2.0]])
def test_reward_model(folders, reward_trainer, margins):
    examples = [
        {"chosen_ids": a.prompt + a.answer, "rejected_ids": b.prompt + b.answer}
        | ({} if margins is None else {"margin": margins[i]})
        for i, (a, b) in enumerate(PAIRS)
    ]
    batch = DataCollatorForScores(pad_token_id=PAD)(examples)
    with torch.no_grad():
        expected = reward_trainer.compute_loss(reward_trainer.model, batch).item()
    row = PairRow.of(
        [
            Pair(chosen=a.scored, rejected=b.scored, margin=m)
            for (a, b), m in zip(PAIRS, margins or [0.0] * 4, strict=True)
        ]
    )
    model = load_scorer(str(folders["scorer"]), flag="--model", dtype="fp32", attention="auto")
    with torch.no_grad():
        loss, metrics = RewardObjective()(model, row, norm_of(row))
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert metrics["rm/accuracy"].item() == reward_trainer._metrics["eval"]["accuracy"][-1]


@pytest.mark.parametrize("others", [0, 29])
def test_supervised_fine_tuning(folders, sft_trainer, others):
    """The loss is a mean over the tokens of this batch, and of a step with `others` more of them."""
    examples = [
        {"input_ids": a.prompt + a.answer, "labels": [-100] * len(a.prompt) + a.answer} for a in CHOSEN
    ]
    batch = DataCollatorForLanguageModeling(pad_token_id=PAD)(examples)
    row = PackedRow.of([a.sample for a in CHOSEN])
    num_tokens = row.num_tokens + others
    with torch.no_grad():
        expected = sft_trainer.compute_loss(
            sft_trainer.model, batch, num_items_in_batch=num_tokens if others else None
        )
        loss, _ = SFTObjective()(PolicyModel(our(folders["policy"])), row, LossNorm(num_tokens, 9))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0), ("reverse_kl", 1)])
def test_distillation(folders, kind, beta, temperature):
    """TRL leaves out the factor T^2, which is no part of openrlhf's KL but of its loss."""
    row, divergences = PackedRow.of([a.sample for a in CHOSEN]), []
    student, teacher = their(folders["policy"]), their(folders["teacher"])
    own_teacher = TeacherModel(our(folders["teacher"]))
    objective = DistillationObjective(
        teacher=own_teacher,
        teacher_head=linear_head(own_teacher.model),
        coef=1.0,
        temperature=temperature,
        kind=kind,
    )
    with torch.no_grad():
        for answer in CHOSEN:
            sample = answer.sample
            labels = sample.token_ids.masked_fill(~sample.action_mask, -100)[None]
            logits = [model(sample.token_ids[None]).logits[:, :-1] for model in (student, teacher)]
            divergences.append(
                GKDTrainer.generalized_jsd_loss(
                    *logits, labels=labels[:, 1:], beta=beta, temperature=temperature, reduction="sum"
                )
            )
        loss, metrics = objective(StudentModel(our(folders["policy"])), row, norm_of(row))
    expected = sum(divergences).item() / row.num_tokens
    assert expected > 0.05
    assert metrics["kd/kl"].item() == pytest.approx(expected, abs=1e-5)
    assert loss.item() == pytest.approx(temperature**2 * expected, abs=1e-5)


def test_hints_translate_names_that_trl_has() -> None:
    """The hints begin with TRL's names, up to that of LoRA."""
    names = list(OTHER_NAMES)
    of_trl = set(names[: names.index("lora_r")])
    known = {field.name for config in (GRPOConfig, SFTConfig) for field in fields(config)} | {"reward_funcs"}
    assert of_trl <= known and len(of_trl) > 10
