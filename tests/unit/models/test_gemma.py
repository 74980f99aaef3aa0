"""Gemma 3 and 4 with images: tokens of an image see each other in both directions and stand between marks and
newlines. Tokens are compared with the processor's, log-probs and gradients with transformers' own forward."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image as PILImage
from tiny_gemma import tiny_gemma3, tiny_gemma4
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from openrlhf.data.image_rows import ImageColumn, find_layout
from openrlhf.data.prompts import build_prompts
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import Rows, load_rows
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import load_scorer
from openrlhf.models.self_check import resolve_row_layout
from openrlhf.models.tokenizers import load_tokenizer, saved_reader
from openrlhf.models.vision import freeze_vision
from openrlhf.rows import LossNorm, PackedRow, Sample
from openrlhf.text import image_placeholder_ids, num_tokens_read
from openrlhf.training.objectives.sft import SFTObjective

ROWS = [
    {"input": "<image>What?", "output": "red", "images": ["a.png"]},
    {"input": "One <image>\n<image>\n\ntwo", "output": "green 1", "images": ["b.png", "a.png"]},
    {"input": "No picture.", "output": "white", "images": []},
]
ROUNDING = 256 * 2.0**-24
"""Relative error of a float32 sum of as many products as the widest layer has."""
LAYERS = 8


@pytest.fixture(scope="module", params=[tiny_gemma3, tiny_gemma4])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    for i, (name, size) in enumerate({"a.png": (56, 56), "b.png": (150, 60)}.items()):
        noise = PILImage.effect_noise(size, 60 + i)
        PILImage.merge("RGB", [noise, noise.rotate(180), noise]).save(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return request.param(folder)


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    return load_rows(str(folder / "rows.jsonl"), flag="--data.dataset", required_columns={})


@pytest.fixture(scope="module")
def images(folder: Path) -> ImageColumn:
    processor = AutoProcessor.from_pretrained(folder)
    layout = find_layout(processor, AutoTokenizer.from_pretrained(folder))
    about = {"processor": processor, "layout": layout}
    return ImageColumn(key="images", max_images=2, root=None, hosts=(), **about)


def samples(folder: Path, rows: Rows, images: ImageColumn) -> list[Sample]:
    store = build_sft_samples(
        rows, AutoTokenizer.from_pretrained(folder), input_key="input", output_key="output",
        apply_chat_template=True, input_template=None, multiturn=False, pretrain=False, max_len=400,
        images=images,
    )  # fmt: skip
    store.read_images_with(images.reader(rows), "digest")
    return [store[i] for i in range(len(store))]


def as_processed(folder: Path, row: dict):
    """Returns the inputs that transformers' processor makes of a row, and the number of tokens of its
    prompt."""
    processor = AutoProcessor.from_pretrained(folder)
    pictures = [PILImage.open(folder / name) for name in row["images"]] or None
    prompt = f"<|user|>\n{row['input'].replace('<image>', processor.image_token)}<|end|><|assistant|>\n"
    options = {"images": pictures, "add_special_tokens": False}
    whole = processor(text=[f"{prompt}{row['output']}<|end|>"], return_tensors="pt", **options)
    return whole, len(processor(text=[prompt], **options)["input_ids"][0])


def test_samples_have_the_tokens_that_the_processor_writes(folder, rows, images) -> None:
    """Tokens agree also where newlines of the text meet those around an image, or images each other."""
    for sample, row in zip(samples(folder, rows, images), ROWS, strict=True):
        whole, num_prompt = as_processed(folder, row)
        assert sample.token_ids.tolist() == whole["input_ids"][0].tolist()
        assert sample.action_mask.nonzero()[:, 0].tolist() == list(range(num_prompt, sample.length))


def test_prompts_count_what_an_engine_reads(folder, rows, images) -> None:
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    prompts = build_prompts(
        rows, tokenizer, input_key="input", label_key=None, apply_chat_template=True, input_template=None,
        max_len=400, images=images,
    )  # fmt: skip
    for prompt, row in zip(prompts.without_images, ROWS, strict=True):
        num_prompt = as_processed(folder, row)[1]
        pictures = [PILImage.open(folder / name) for name in row["images"]]
        ids = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        assert prompt.num_tokens == num_tokens_read(processor, ids, pictures) == num_prompt


def test_answers_may_not_hold_what_stands_for_other_inputs(folder) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    kinds = ("boi",) if "gemma3" in type(processor).__module__ else ("image", "video", "audio")
    named = {processor.tokenizer.get_vocab()[getattr(processor, f"{kind}_token")] for kind in kinds}
    assert {*image_placeholder_ids(processor)} == named | {processor.tokenizer.image_token_id}


def test_the_loss_and_gradient_of_sft_are_those_of_transformers(folder, rows, images) -> None:
    """A row has sequences with one picture, two and none."""
    module = PolicyModel(
        load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto", images=True)
    )
    resolve_row_layout(module, module)
    row = PackedRow.of(samples(folder, rows, images))
    loss, _ = SFTObjective()(module, row, LossNorm(row.num_tokens, row.num_sequences))
    loss.backward()
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    total, count = torch.zeros(()), 0
    for values in ROWS:
        inputs, start = as_processed(folder, values)
        learned = inputs["input_ids"][0, start:]
        total = total + cross_entropy(plain(**inputs).logits[0, start - 1 : -1], learned, reduction="sum")
        count += len(learned)
    (total / count).backward()
    assert loss.item() == pytest.approx(total.item() / count, rel=LAYERS * ROUNDING)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert (
        sum("vision_tower" in name and g is not None and bool(g.any()) for name, g in expected.items()) > 10
    )
    for name, parameter in module.model.named_parameters():
        if name.endswith("k_proj.bias"):  # it shifts all scores of a query alike: the gradient is rounding
            continue
        error = (parameter.grad - expected[name]).norm()
        assert error < 4 * LAYERS * ROUNDING * expected[name].norm(), name


def test_tokens_of_an_image_see_the_later_ones_of_it(folder, rows, images) -> None:
    """Without token types, as a text is read, the model computes something else."""
    inputs, _ = as_processed(folder, ROWS[0])
    plain = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        right = plain(**inputs).logits
        causal = plain(**{name: x for name, x in inputs.items() if "token_type_ids" not in name}).logits
    assert (right - causal).abs().max() > 1e-3


def test_what_is_frozen(folder) -> None:
    model = load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto", images=True)
    freeze_vision(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    parts = (".vision_tower.", ".multi_modal_projector.", ".embed_vision.")
    assert frozen == {name for name, _ in model.named_parameters() if any(part in name for part in parts)}


@pytest.mark.few(1)
def test_a_reward_model_reads_images(folder, rows, images, tmp_path) -> None:
    def scorer(path: Path):
        module = load_scorer(
            str(path), flag="--model", dtype="fp32", attention="auto", images=True, max_len=400
        ).eval()
        resolve_row_layout(module, module)
        return module

    torch.manual_seed(0)
    module, row = scorer(folder), PackedRow.of(samples(folder, rows, images))
    with torch.no_grad():
        scores = module(row)
        module.model.save_pretrained(tmp_path)
        AutoProcessor.from_pretrained(folder).save_pretrained(tmp_path)
        assert (scorer(tmp_path)(row) - scores).abs().max() < LAYERS * ROUNDING * scores.abs().max()
        plain = AutoModelForImageTextToText.from_pretrained(folder).model
        for i, values in enumerate(ROWS):
            hidden = plain(**as_processed(folder, values)[0]).last_hidden_state[0]
            ends = row.action_mask.split(row.lengths)[i].nonzero()[:, 0]
            expected = hidden[ends] @ module.model.score.weight[0]
            found = scores.split([int(m.sum()) for m in row.action_mask.split(row.lengths)])[i]
            assert (found - expected).abs().max() < LAYERS * ROUNDING * scores.abs().max()


def test_the_processor_is_saved_with_a_model_of_texts_that_can_read_images(folder: Path) -> None:
    """vLLM loads no Gemma 3 or 4 without one."""
    tokenizer = load_tokenizer(str(folder), flag="--model", chat_template="{{ messages }}")
    reader = saved_reader(tokenizer, str(folder), images=False)
    assert reader.image_processor and reader.tokenizer is tokenizer
    assert reader.chat_template == tokenizer.chat_template


def test_no_processor_is_saved_where_there_is_none(folder: Path, tmp_path: Path) -> None:
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(folder), flag="--model")
    assert saved_reader(tokenizer, str(tmp_path), images=False) is tokenizer
