"""Rows with images equal transformers' own forward of one sequence at a time; some parts of a tower are
frozen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image as PILImage
from refusals import refused
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from openrlhf.config.sections import DeepSpeedConfig, LoraConfig
from openrlhf.data.pictures import decoded, encoded
from openrlhf.errors import ErrorCode
from openrlhf.models import self_check, vision
from openrlhf.models.backbone import RowModel, get_row_layout
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.lora import disabled_adapters, prepare_for_training, save_adapter
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ValueModel, load_scorer
from openrlhf.models.self_check import read_one_by_one, resolve_row_layout
from openrlhf.models.vision import freeze_vision
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.tiny_vision_model import PLACEHOLDER, tiny_vision_model
from openrlhf.tools.reference.outputs import log_probs_of_row
from openrlhf.tools.serve.flags import lora_combiner as combine
from openrlhf.types import Image

ROUNDING = 256 * 2.0**-24
"""Relative error of a float32 sum of as many products as the widest layer has."""
LAYERS = 8
"""Attention and MLP of two layers of the tower and of two layers of the language model."""
SHAPES = ((56, 56), (84, 140), (200, 70))
"""Height and width of the pictures."""


def qwen3_vl(folder: Path) -> Path:
    """Makes a Qwen3-VL, with patches that also go into later layers, beside the files of the tiny
    Qwen2.5-VL."""
    tiny = AutoModelForImageTextToText.from_pretrained(tiny_vision_model(folder)).config
    text, vision_config = tiny.text_config, tiny.vision_config
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    )
    config = Qwen3VLConfig(
        text_config={
            **{name: getattr(text, name) for name in same.split()},
            "head_dim": 32,
            "initializer_range": 0.05,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": text.hidden_size,
            "patch_size": vision_config.patch_size,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
            "initializer_range": 0.05,
        },
        tie_word_embeddings=True,
        **{
            name: getattr(tiny, name)
            for name in ("image_token_id", "video_token_id", "vision_start_token_id")
        },
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


MODELS = {"qwen2_5_vl": tiny_vision_model, "qwen3_vl": qwen3_vl}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("tiny"))


def policy(folder: Path, attention: str = "auto") -> PolicyModel:
    module = PolicyModel(
        load_causal_lm(str(folder), flag="--model", dtype="fp32", attention=attention, images=True)
    )
    resolve_row_layout(module, module)
    assert get_row_layout(module.model).shares_prefixes == (attention == "auto")
    return module


def noise(shape: tuple[int, int]) -> Image:
    random = torch.Generator().manual_seed(shape[0])
    pixels = torch.randint(256, (*shape, 3), generator=random, dtype=torch.uint8)
    return encoded(PILImage.fromarray(pixels.numpy()))


TEXTS = (
    (f"{PLACEHOLDER}What is 3 + 4?", SHAPES[:1]),
    ("Tom has 5 apples and eats 2 of them. How many are left?", ()),
    (f"First {PLACEHOLDER} then {PLACEHOLDER}, which?", SHAPES[1:]),
)


def samples(folder: Path) -> list[Sample]:
    """Returns samples whose last 6 tokens are actions, expanded by the processor itself."""
    processor, made = AutoProcessor.from_pretrained(folder), []
    for text, shapes in TEXTS:
        images = tuple(noise(shape) for shape in shapes)
        pictures = [decoded(image.data) for image in images] or None
        ids = torch.tensor(processor(text=[text], images=pictures)["input_ids"][0])
        made.append(Sample(token_ids=ids, action_mask=torch.arange(len(ids)) >= len(ids) - 6, images=images))
    return made


@contextmanager
def as_transformers_reads(folder: Path) -> Iterator[tuple[PreTrainedModel, list[Tensor]]]:
    """Yields the plain model, and its log-probs of the actions of each sample, from text and pictures."""
    model, processor = (
        AutoModelForImageTextToText.from_pretrained(folder),
        AutoProcessor.from_pretrained(folder),
    )
    log_probs = []
    for (text, shapes), sample in zip(TEXTS, samples(folder), strict=True):
        pictures = [decoded(noise(shape).data) for shape in shapes] or None
        logits = model(**processor(text=[text], images=pictures, return_tensors="pt")).logits[0, :-1]
        of_all = logits.log_softmax(-1).gather(1, sample.token_ids[1:, None])[:, 0]
        log_probs.append(of_all[sample.action_mask[1:]])
    yield model, log_probs


@pytest.mark.parametrize(
    "attention",
    ["auto", "one by one", *(pytest.param(name, marks=pytest.mark.processes) for name in ("sdpa", "eager"))],
)
def test_a_row_is_what_transformers_reads_one_by_one(folder: Path, attention: str) -> None:
    """Pictures have several sizes; one sequence has two, another none. Log-probs and every gradient agree."""
    module = policy(folder, "auto" if attention == "one by one" else attention)
    assert get_row_layout(module.model).packed
    if attention == "one by one":
        read_one_by_one(module.model)
    found = module(row := PackedRow.of(samples(folder))).log_probs
    verified = log_probs_of_row(module.model, row)  # the check of a run's first steps
    with as_transformers_reads(folder) as (reference, expected):
        expected = torch.cat(expected)
        assert (verified - expected).abs().max() < LAYERS * ROUNDING * expected.abs().max()
        assert (found - expected).abs().max() < LAYERS * ROUNDING * expected.abs().max()
        found.sum().backward()
        expected.sum().backward()
    of_reference = dict(reference.named_parameters())
    for name, parameter in module.model.named_parameters():
        wanted = of_reference[name].grad
        assert wanted.abs().max() > 0, name
        assert (parameter.grad - wanted).norm() < 4 * LAYERS * ROUNDING * wanted.norm(), name


def test_a_row_without_images_passes_through_the_tower(folder: Path) -> None:
    """Ranks then make the same collectives. The pass adds nothing, also to gradients."""
    module = policy(folder)
    text = samples(folder)[1]
    with as_transformers_reads(folder) as (_, expected):
        found = module(PackedRow.of([text])).log_probs
        assert (found - expected[1]).abs().max() < LAYERS * ROUNDING * expected[1].abs().max()
    found.sum().backward()
    tower = [p for name, p in module.model.named_parameters() if "visual" in name]
    assert tower and all(p.grad is not None and not p.grad.any() for p in tower)
    read_one_by_one(module.model)
    assert (
        module(PackedRow.of([text])).log_probs - found
    ).abs().max() < LAYERS * ROUNDING * found.abs().max()


def test_positions_that_are_wrong_are_found(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong positions are those of text, which go on through an image."""
    model = load_causal_lm(str(tiny), flag="--model", dtype="fp32", attention="auto", images=True).eval()
    monkeypatch.setattr(vision, "_positions", lambda backbone, row, reader: row.position_ids[None])
    with torch.no_grad():
        assert "relative error" in self_check.why_not_packed(lambda question: question(), model)


def test_the_samples_of_a_prompt_share_its_patches(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = policy(tiny)
    reader, read = get_row_layout(module.model).images, []
    monkeypatch.setattr(vision, "decoded", lambda data: read.append(data) or decoded(data))
    sample = samples(tiny)[0]
    other = Image("another object", bytes(bytearray(sample.images[0].data)))
    again = Sample(token_ids=sample.token_ids, action_mask=sample.action_mask, images=(other,))
    with torch.no_grad():
        first, second = module(PackedRow.of([sample, again])).log_probs.view(2, -1)
    assert len(read) == 1 and reader.patches.cache_info().hits > 0
    assert (first - second).abs().max() < ROUNDING * first.abs().max()


def asked(ids: Tensor, image: Image) -> Sample:
    return Sample(token_ids=ids, action_mask=torch.arange(len(ids)) >= len(ids) - 6, images=(image,))


def test_a_common_picture_is_read_once(folder: Path) -> None:
    """Two samples have the same picture, one the same text behind another picture, and one no picture."""
    module = policy(folder)
    first, text = samples(folder)[:2]
    other = first.token_ids.clone()
    other[-4:] = torch.tensor([5, 9, 11, 6])
    made = [asked(first.token_ids, noise((56, 56))), text, asked(other, noise((56, 56)))]
    made.append(asked(other, Image("another", encoded(PILImage.new("RGB", (56, 56), "red")).data)))
    read: list[int] = []
    tower = next(m for name, m in module.model.named_modules() if name.endswith("visual"))
    tower.register_forward_pre_hook(lambda module, args: read.append(len(args[0])))
    found = []
    for shared in (False, True):
        get_row_layout(module.model).shares_prefixes = shared
        module.zero_grad()
        log_probs = module(PackedRow.of(made)).log_probs
        weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(1))
        (log_probs * weights).sum().backward()
        found.append((log_probs, {name: p.grad for name, p in module.model.named_parameters()}))
    assert 3 * read[1] == 2 * read[0]
    (whole, expected), (shared, gradients) = found
    assert (shared - whole).norm() < LAYERS * ROUNDING * whole.norm()
    for name, gradient in gradients.items():
        assert expected[name].norm() > 0, name
        assert (gradient - expected[name]).norm() < 4 * LAYERS * ROUNDING * expected[name].norm(), name


def test_texts_are_read_once_beside_the_blank_picture(folder: Path) -> None:
    module, text = policy(folder), samples(folder)[1]
    ids = torch.cat([text.token_ids, text.token_ids[:3]])
    mask = torch.arange(len(ids)) >= len(text.token_ids)
    row = PackedRow.of([text, Sample(token_ids=ids, action_mask=mask), text])
    found = []
    for shared in (True, False):
        get_row_layout(module.model).shares_prefixes = shared
        found.append(module(row).log_probs.detach())
    assert (found[0] - found[1]).norm() < LAYERS * ROUNDING * found[1].norm()


def test_what_is_frozen(folder: Path) -> None:
    module = policy(folder)
    freeze_vision(module.model)
    frozen = {name for name, p in module.model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in module.model.named_parameters() if ".visual." in name}
    module(PackedRow.of(samples(folder))).log_probs.sum().backward()
    assert all((p.grad is None) == (name in frozen) for name, p in module.model.named_parameters())


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("wanted", [("all-linear",), ("proj", "q_proj")])
def test_adapters_are_beside_linear_layers_that_learn(
    folder: Path, wanted: tuple[str, ...], is_frozen: bool
) -> None:
    """The convolution `patch_embed.proj` and the block `visual.blocks.0` are none, whatever their names."""
    model, wants_all = policy(folder).model, wanted == ("all-linear",)
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and name != "lm_head"
        and not (is_frozen and ".visual." in name)
        and (wants_all or name.endswith((".proj", ".q_proj")))
    }
    if is_frozen:
        freeze_vision(model)
    lora = DeepSpeedConfig(lora=LoraConfig(rank=2, target_modules=wanted))
    if is_frozen and not wants_all:
        with refused(ErrorCode.INVALID_VALUE, flag="--ds.lora.target_modules", value="proj"):
            prepare_for_training(model, lora)
        return
    prepare_for_training(model, lora)
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learns == {f"{name}.lora_{part}.default.weight" for name in linear for part in "AB"}


@pytest.mark.parametrize("of_rewards", [False, True])
def test_an_adapter_is_merged_into_a_model_that_reads_images(
    folder: Path, tmp_path: Path, of_rewards: bool
) -> None:
    torch.manual_seed(1)
    options = {"flag": "--model", "dtype": "fp32", "attention": "auto", "images": True}
    module = load_scorer(str(folder), **options) if of_rewards else policy(folder)
    prepare_for_training(module.model, DeepSpeedConfig(lora=LoraConfig(rank=2)))
    learned = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    for parameter in learned.values():
        torch.nn.init.normal_(parameter, std=0.1)
    save_adapter(module.model, learned, tmp_path / "adapter")
    words = f"--model_path {folder} --lora_path {tmp_path}/adapter --output_path {tmp_path}/merged"
    combine([*words.split(), *["--is_rm"] * of_rewards])
    merged, row = tmp_path / "merged", PackedRow.of(samples(folder))
    again = load_scorer(str(merged), trained=True, **options) if of_rewards else policy(merged)
    assert AutoProcessor.from_pretrained(merged).image_processor is not None
    read = (lambda m: m(row)) if of_rewards else (lambda m: m(row).log_probs)
    with torch.no_grad():
        expected, found = read(module), read(again)
        assert (found - expected).norm() < LAYERS * ROUNDING * expected.norm()
        with disabled_adapters(module.model):
            assert (read(module) - expected).norm() > 0.01 * expected.norm()


def test_a_run_of_text_says_what_a_model_that_reads_images_needs(folder: Path) -> None:
    with refused(ErrorCode.UNSUPPORTED, flag="--model", value=folder) as refusal:
        load_causal_lm(str(folder), flag="--model", dtype="fp32", attention="auto")
    assert "--data.max_images_per_prompt 1" in refusal.value.text


@pytest.mark.few(1)
def test_a_critic_reads_images(folder: Path, tmp_path: Path) -> None:
    """The critic is made of a language model; the values of a row are those of its sequences, and survive a
    file."""

    def critic(path: Path) -> RowModel:
        options = {"flag": "--critic", "dtype": "fp32", "attention": "auto", "images": True}
        return ValueModel(load_scorer(str(path), **options).model).eval()

    module, row = critic(folder), PackedRow.of(samples(folder))
    torch.nn.init.normal_(module.model.score.weight)
    resolve_row_layout(module, module)
    assert get_row_layout(module.model).packed
    with torch.no_grad():
        values = module(row)
        alone = torch.cat([module(PackedRow.of([sample])) for sample in samples(folder)])
        assert (values - alone).abs().max() < LAYERS * ROUNDING * values.abs().max()
        module.model.save_pretrained(tmp_path)
        AutoProcessor.from_pretrained(folder).save_pretrained(tmp_path)
        assert (critic(tmp_path)(row) - values).abs().max() < LAYERS * ROUNDING * values.abs().max()
        black = [encoded(PILImage.new("RGB", (56, 56)))]
        row = PackedRow.of([Sample(token_ids=s.token_ids, action_mask=s.action_mask, images=tuple(black))
                            for s in samples(folder)[:1]])  # fmt: skip
        assert (critic(tmp_path)(row) - values[:6]).abs().max() > 1e-3  # the critic depends on the image
