"""Supervised learning from rows with images equals transformers one row at a time, with the processor's
inputs and the model's own forward."""

import json

import pytest
import torch
from PIL import Image as PILImage
from refusals import refused
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from openrlhf.data.image_rows import ImageColumn, find_layout
from openrlhf.data.preference import build_pairs
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import load_rows
from openrlhf.errors import ErrorCode
from openrlhf.loop.supervised.kd import check_same_images
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import load_scorer
from openrlhf.models.student import StudentModel, TeacherModel, linear_head
from openrlhf.rows import LossNorm, PackedRow, PairRow
from openrlhf.tasks.tiny_vision_model import PLACEHOLDER, tiny_vision_model
from openrlhf.training.objectives.dpo import DPOObjective, pair_log_probs
from openrlhf.training.objectives.kd import DistillationObjective
from openrlhf.training.objectives.rm import RewardObjective
from openrlhf.training.objectives.sft import SFTObjective

ROWS = [
    {"input": "<image>What?", "output": "red blue", "worse": "blue", "images": ["a.png"]},
    {"input": "One <image>, two <image>.", "output": "green", "worse": "red", "images": ["b.png", "a.png"]},
    {"input": "No picture.", "output": "white", "worse": "red"},
    {"input": "<image>And?", "output": "purple", "worse": "white white", "images": ["c.png"]},
]
SIZES = {"a.png": (56, 56), "b.png": (150, 60), "c.png": (90, 120)}
COMMON = {"dtype": "fp32", "attention": "auto", "images": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for i, (name, size) in enumerate(SIZES.items()):
        noise = PILImage.effect_noise(size, 60 + i)
        PILImage.merge("RGB", [noise, noise.rotate(180), noise.point(lambda x: 255 - x)]).save(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tiny_vision_model(folder / "model", seed=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def processor(folder):
    return AutoProcessor.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def rows(folder):
    return load_rows(str(folder / "rows.jsonl"), flag="--data.dataset", required_columns={})


@pytest.fixture(scope="module")
def images(processor, tokenizer):
    about = {"processor": processor, "layout": find_layout(processor, tokenizer)}
    return ImageColumn(key="images", max_images=2, root=None, hosts=(), **about)


def read_by_the_processor(folder, processor, row, answer):
    """Returns (the processor's inputs, the number of tokens before the answer)."""
    pictures = [PILImage.open(folder / name) for name in row.get("images", ())] or None
    prompt = f"<|user|>{row['input'].replace('<image>', PLACEHOLDER)}<|end|><|assistant|>"
    whole = processor(text=[f"{prompt}{answer}<|end|>"], images=pictures, return_tensors="pt")
    return whole, len(processor(text=[prompt], images=pictures)["input_ids"][0])


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(ours, theirs):
    """Compares sums of float32 in another order: numbers of the size of the largest."""
    ours, theirs = gradients(ours), gradients(theirs)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert expected is not None and expected.abs().max() > 0, name
        atol = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(
            ours[name], expected, atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_loss_and_gradient_of_sft_are_those_of_transformers(folder, rows, tokenizer, processor, images):
    store = build_sft_samples(
        rows, tokenizer, input_key="input", output_key="output", apply_chat_template=True,
        input_template=None, multiturn=False, pretrain=False, max_len=256, images=images,
    )  # fmt: skip
    store.read_images_with(images.reader(rows), "digest")
    row = PackedRow.of([store[i] for i in range(len(store))])
    model = PolicyModel(load_causal_lm(str(folder / "model"), flag="--model", **COMMON))
    loss, _ = SFTObjective()(model, row, LossNorm(row.num_tokens, row.num_sequences))
    loss.backward()

    plain = AutoModelForImageTextToText.from_pretrained(folder / "model")
    total, count = torch.zeros(()), 0
    for values in ROWS:
        inputs, start = read_by_the_processor(folder, processor, values, values["output"])
        learned = inputs["input_ids"][0, start:]
        logits = plain(**inputs).logits[0, start - 1 : -1]
        total, count = total + cross_entropy(logits, learned, reduction="sum"), count + len(learned)
    (total / count).backward()
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-5)
    visual = [name for name in gradients(plain) if "visual" in name]
    assert len(visual) > 10  # the tower learns
    # A row without images reads a grey one behind it, which reaches no loss: nothing is added.
    assert_same_gradients(model.model, plain)


def test_the_loss_and_gradient_of_distillation_are_those_of_transformers(
    folder, rows, tokenizer, processor, images
):
    """The rows have one picture, two and none."""
    store = build_sft_samples(
        rows, tokenizer, input_key="input", output_key="output", apply_chat_template=True,
        input_template=None, multiturn=False, pretrain=False, max_len=256, images=images,
    )  # fmt: skip
    store.read_images_with(images.reader(rows), "digest")
    row = PackedRow.of([store[i] for i in range(len(store))])
    paths = [str(folder / "model"), str(tiny_vision_model(folder / "teacher", seed=5))]
    student, teacher = (load_causal_lm(path, flag="--model", **COMMON) for path in paths)
    student, teacher = StudentModel(student), TeacherModel(teacher)
    teacher.requires_grad_(False)
    objective = DistillationObjective(teacher=teacher, teacher_head=linear_head(teacher.model), coef=0.4)
    loss, _ = objective(student, row, LossNorm(row.num_tokens, row.num_sequences))
    loss.backward()

    plain, wise = (AutoModelForImageTextToText.from_pretrained(path) for path in paths)
    total, count = torch.zeros(()), 0
    for values in ROWS:
        inputs, start = read_by_the_processor(folder, processor, values, values["output"])
        learned = inputs["input_ids"][0, start:]
        ours = plain(**inputs).logits[0, start - 1 : -1].log_softmax(-1)
        theirs = wise(**inputs).logits[0, start - 1 : -1].log_softmax(-1).detach()
        total = total + 0.6 * cross_entropy(ours, learned, reduction="sum")
        total, count = total + 0.4 * (theirs.exp() * (theirs - ours)).sum(), count + len(learned)
    (total / count).backward()
    assert loss.item() == pytest.approx(total.item() / count, rel=1e-5)
    assert_same_gradients(student.model, plain)


def test_a_teacher_that_reads_an_image_as_other_tokens_is_refused(folder, tmp_path):
    own, other = str(folder / "model"), tiny_vision_model(tmp_path)
    check_same_images(own, str(other), "--teacher")
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path := other / name).exists():
            path.write_text(path.read_text().replace('"patch_size": 14', '"patch_size": 28'))
    with refused(ErrorCode.INVALID_MODEL, flag="--teacher", value=other):
        check_same_images(own, str(other), "--teacher")


def pairs_of(rows, tokenizer, images, *, score_last_token):
    pairs = build_pairs(
        rows, tokenizer, prompt_key="input", chosen_key="output", rejected_key="worse",
        apply_chat_template=True, input_template=None, max_len=256, score_last_token=score_last_token,
        images=images,
    )  # fmt: skip
    pairs.read_images_with(images.reader(rows), "digest")
    return PairRow.of([pairs[i] for i in range(len(pairs))])


def norm_of(row):
    return LossNorm(row.num_tokens, row.num_sequences)


def test_the_loss_of_dpo_is_that_of_transformers(folder, rows, tokenizer, processor, images):
    row = pairs_of(rows, tokenizer, images, score_last_token=False)
    policy, reference = (
        PolicyModel(load_causal_lm(str(path), flag="--model", **COMMON))
        for path in (folder / "model", tiny_vision_model(folder / "other", seed=4))
    )
    objective = DPOObjective(
        beta=0.1,
        ipo=False,
        label_smoothing=0.0,
        nll_coef=0.0,
        reference=lambda row: reference(row).log_probs.detach(),
    )
    assert pair_log_probs(reference, row).shape == (len(ROWS), 2)
    loss, _ = objective(policy, row, norm_of(row))

    ours, base = (AutoModelForImageTextToText.from_pretrained(folder / name) for name in ("model", "other"))

    def log_prob(model, values, answer):
        inputs, start = read_by_the_processor(folder, processor, values, answer)
        logits = model(**inputs).logits[0, start - 1 : -1]
        return -cross_entropy(logits, inputs["input_ids"][0, start:], reduction="sum")

    with torch.no_grad():
        margins = [
            log_prob(ours, v, v["output"]) - log_prob(ours, v, v["worse"])
            - log_prob(base, v, v["output"]) + log_prob(base, v, v["worse"])
            for v in ROWS
        ]  # fmt: skip
    expected = -logsigmoid(0.1 * torch.stack(margins)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_the_scores_of_a_reward_model_are_those_of_its_backbone(folder, rows, tokenizer, processor, images):
    row = pairs_of(rows, tokenizer, images, score_last_token=True)
    scorer = load_scorer(str(folder / "model"), flag="--model", tokenizer=tokenizer, **COMMON)
    loss, _ = RewardObjective()(scorer, row, norm_of(row))
    loss.backward()
    plain = AutoModelForImageTextToText.from_pretrained(folder / "model").model
    head = scorer.model.score.weight.detach()

    def score(values, answer):
        inputs, _ = read_by_the_processor(folder, processor, values, answer)
        return (plain(**inputs).last_hidden_state[0, -1] @ head.T).squeeze()

    margins = torch.stack(
        [score(values, values["output"]) - score(values, values["worse"]) for values in ROWS]
    )
    expected = -logsigmoid(margins).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert_same_gradients(scorer.model.base_model, plain)
