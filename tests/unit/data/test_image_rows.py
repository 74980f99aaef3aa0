"""Rows with images: the images' places and numbers of tokens; pixels are read only where they are needed."""

import io
import json
import logging
import os
import re

import pytest
import torch
from PIL import Image as PILImage
from refusals import refused
from transformers import AutoProcessor, AutoTokenizer

from openrlhf.config.commands import DPO, SFT
from openrlhf.config.parse import parse
from openrlhf.config.ppo import ActorConfig, EvalConfig, PPOConfig, PromptDataConfig
from openrlhf.data import image_rows
from openrlhf.data.files import REMEDY
from openrlhf.data.image_rows import ImageColumn, find_layout, place_images
from openrlhf.data.preference import build_pairs
from openrlhf.data.prompt_sampler import PromptDataset
from openrlhf.data.prompts import build_prompts
from openrlhf.data.sft import build_sft_samples
from openrlhf.data.sources import load_rows
from openrlhf.errors import ErrorCode
from openrlhf.loop.supervised.datasets import images_of, tokenise
from openrlhf.loop.supervised.dpo import DPOTask
from openrlhf.loop.supervised.sft import SFTTask
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tasks.tiny_vision_model import PLACEHOLDER, tiny_vision_model
from openrlhf.training.rl_data import build_prompt_datasets

SIZES = {
    "square.png": (56, 56),
    "wide.png": (200, 60),
    "high.png": (30, 170),
    "large.png": (500, 400),
    "thin.png": (1, 300),
}
"""Width and height of each image."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def processor(model):
    return AutoProcessor.from_pretrained(model)


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        PILImage.effect_noise(size, 50).convert("RGB").save(tmp_path / name)
    return tmp_path


@pytest.fixture
def column(processor, tokenizer):
    return ImageColumn(
        key="images",
        max_images=3,
        root=None,
        hosts=(),
        processor=processor,
        layout=find_layout(processor, tokenizer),
    )


def rows_of(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(str(folder / "rows.jsonl"), flag="--data.dataset", required_columns={})


def prompts_of(rows, tokenizer, images, **options):
    options = {"max_len": 512, "bad_rows": "error"} | options
    return build_prompts(
        rows, tokenizer, input_key="input", label_key=None, apply_chat_template=True, input_template=None,
        images=images, **options,
    )  # fmt: skip


def samples_of(rows, tokenizer, images, **options):
    options = {"max_len": 512, "multiturn": False} | options
    store = build_sft_samples(
        rows, tokenizer, input_key="input", output_key="output", apply_chat_template=True,
        input_template=None, pretrain=False, images=images, **options,
    )  # fmt: skip
    store.read_images_with(images.reader(rows), "digest")
    return store


def pictures_of(folder, names):
    return [PILImage.open(folder / name) for name in names]


# Places


def text(content):
    return {"type": "text", "text": content}


IMAGE = {"type": "image"}
PLACES = {
    "a tag": ("<image>What?", 1, [IMAGE, text("What?")]),
    "tags between texts": ("A <image> B<image>", 2, [text("A "), IMAGE, text(" B"), IMAGE]),
    "no tag": ("What?", 2, [IMAGE, IMAGE, text("What?")]),
    "no image": ("What?", 0, "What?"),
    "parts": ([text("What?"), IMAGE], 1, [text("What?"), IMAGE]),
    "parts without a place": ([text("What?")], 1, [IMAGE, text("What?")]),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_images_stand(case):
    content, count, placed = PLACES[case]
    system = {"role": "system", "content": "S"}
    found = place_images([system, {"role": "user", "content": content}], count, "images")
    assert found == [system, {"role": "user", "content": placed}]


@pytest.mark.parametrize("content, count", [("<image>", 2), ("<image><image>", 1), ("<image>", 0)])
def test_another_number_of_places_than_images_is_refused(content, count):
    found = content.count("<image>")
    with refused(ErrorCode.INVALID_ROW) as told:
        place_images([{"role": "user", "content": content}], count, "pics")
    numbers = re.findall(r"\d+", told.value.text)
    assert numbers == [str(found), str(count)] and "'pics'" in told.value.text


def test_images_without_a_user_have_no_place():
    with refused(ErrorCode.INVALID_ROW):
        place_images([{"role": "system", "content": "S"}], 1, "images")


# Tokens

ROWS: list[dict] = [
    {"input": "<image>What?", "images": ["square.png"], "output": "red"},
    {"input": "First <image> then <image>.", "images": ["wide.png", "high.png"], "output": "blue"},
    {"input": "What?", "images": ["large.png"], "output": "green"},
    {"input": "No picture.", "images": None, "output": "white"},
    {"input": "Nor here.", "output": "white"},
]


def test_samples_have_the_tokens_that_the_processor_writes(folder, tokenizer, processor, column):
    rows = rows_of(folder, ROWS)
    store = samples_of(rows, tokenizer, column)
    for i, row in enumerate(ROWS):
        names = row.get("images") or []
        question = row["input"]
        if "<image>" not in question:
            question = "<image>" * len(names) + question
        shown = (
            f"<|user|>{question.replace('<image>', PLACEHOLDER)}<|end|><|assistant|>{row['output']}<|end|>"
        )
        pictures = pictures_of(folder, names) or None
        wanted = processor(text=[shown], images=pictures)["input_ids"][0]
        sample = store[i]
        assert sample.token_ids.tolist() == list(wanted)
        assert [image.reference for image in sample.images] == names
        assert [image.data for image in sample.images] == [(folder / name).read_bytes() for name in names]
        assert tokenizer.decode(sample.token_ids[sample.action_mask]) == f"{row['output']}<|end|>"


def test_prompts_hold_one_placeholder_and_count_all_tokens(folder, tokenizer, processor, column):
    rows = rows_of(folder, ROWS[:3])
    prompts = prompts_of(rows, tokenizer, column)
    assert prompts[1].text == f"<|user|>First {PLACEHOLDER} then {PLACEHOLDER}.<|end|><|assistant|>"
    assert prompts[2].messages[0]["content"] == [IMAGE, text("What?")]
    lengths = []
    for prompt in prompts:
        pictures = pictures_of(folder, [image.reference for image in prompt.images])
        lengths.append(len(processor(text=[prompt.text], images=pictures)["input_ids"][0]))
    longest = max(lengths)
    assert len(prompts_of(rows, tokenizer, column, max_len=longest + 1)) == 3
    skipped = prompts_of(rows, tokenizer, column, max_len=longest, bad_rows=None)
    assert (len(skipped), skipped.needed_len) == (2, longest + 1)


def test_no_token_of_an_image_is_learned_even_in_an_answer(folder, tokenizer, column):
    talk = [
        {"role": "user", "content": "Draw!"},
        {"role": "assistant", "content": [text("Here: "), IMAGE, text("!")]},
    ]
    rows = rows_of(folder, [{"input": talk, "images": ["square.png"]}])
    store = build_sft_samples(
        rows, tokenizer, input_key="input", output_key=None, apply_chat_template=True, input_template=None,
        multiturn=False, pretrain=False, max_len=100, images=column,
    )  # fmt: skip
    learned = store[0].token_ids[store[0].action_mask]
    assert tokenizer.decode(learned) == "Here: <|vision_start|><|vision_end|>!<|end|>"
    assert (store[0].token_ids == tokenizer.image_token_id).sum() == 4


def test_a_sample_in_which_an_image_would_be_cut_is_dropped(folder, tokenizer, column):
    """Here the cut image is in a later turn; a prompt that does not fit is dropped as without images."""
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "<image>What?"},
    ]
    rows = rows_of(folder, [{"input": talk, "images": ["wide.png"], "output": "blue"}])
    (length,) = samples_of(rows, tokenizer, column, multiturn=True).lengths
    image = samples_of(rows, tokenizer, column, multiturn=True)[0].token_ids == tokenizer.image_token_id
    end = int(image.nonzero()[-1]) + 1
    assert end < length
    assert samples_of(rows, tokenizer, column, multiturn=True, max_len=end).lengths[0] == end
    with refused(ErrorCode.NO_ROWS) as told:
        samples_of(rows, tokenizer, column, multiturn=True, max_len=end - 1)
    assert "1 × image cut" in told.value.text and f"--data.max_len {length}" in told.value.text


def test_pairs_share_their_images(folder, tokenizer, column):
    values = [
        {"p": "What?", "a": "red", "b": "blue", "images": ["wide.png"]},
        {"p": "Same?", "a": "red", "b": "red", "images": ["wide.png"]},
        {"p": "<image>And?", "a": "red", "b": "green", "images": ["square.png"]},
    ]
    rows = rows_of(folder, values)
    for score_last_token in (True, False):
        pairs = build_pairs(
            rows, tokenizer, prompt_key="p",
            chosen_key="a", rejected_key="b", apply_chat_template=True, input_template=None, max_len=100,
            score_last_token=score_last_token, images=column,
        )  # fmt: skip
        pairs.read_images_with(column.reader(rows), "digest")
        assert len(pairs) == 2
        for pair, name in zip((pairs[0], pairs[1]), ("wide.png", "square.png"), strict=True):
            for side in (pair.chosen, pair.rejected):
                assert [image.reference for image in side.images] == [name]
                assert side.images[0].data == (folder / name).read_bytes()
        assert "<|vision_start|>" in tokenizer.decode(pairs[1].chosen.token_ids)


# Rows that cannot be used

BAD = {
    "missing file": ({"input": "x", "images": "no.png"}, "'images': no.png"),
    "outside": ({"input": "x", "images": ["../x.png"]}, "'images': ../x.png"),
    "too many": (
        {"input": "x", "images": ["square.png"] * 4},
        "--data.max_images_per_prompt 3",
    ),
    "too few tags": ({"input": "<image>", "images": ["square.png"] * 2}, "1 image placeholders"),
    "no image": ({"input": "<image>x"}, "'images' has 0 images"),
    "token in the text": ({"input": "<|image_pad|>", "images": "square.png"}, "2 image placeholders"),
    "too thin": ({"input": "x", "images": ["thin.png"]}, "the processor refuses"),
    "number": ({"input": "x", "images": [7]}, "an image is a number"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_named_or_skipped(folder, tokenizer, column, case):
    row, reason = BAD[case]
    good = ROWS[0]
    rows = rows_of(folder, [good, row | {"output": "y"}, good])
    for build in (prompts_of, samples_of):
        with refused(ErrorCode.INVALID_ROW, value=folder / "rows.jsonl", row=2) as told:
            build(rows, tokenizer, column)
        assert reason in told.value.text and REMEDY in told.value.text
        kept = build(rows, tokenizer, column, bad_rows="skip")
        assert (len(kept), kept.skipped) == (2, {"bad row": 1})
    assert [prompt.prompt_id for prompt in prompts_of(rows, tokenizer, column, bad_rows="skip")] == [0, 2]
    assert [image.reference for image in kept[1].images] == ["square.png"]


def test_a_damaged_picture_is_skipped_or_named_when_it_is_read(folder, tokenizer, column):
    whole = (folder / "wide.png").read_bytes()
    (folder / "half.png").write_bytes(whole[: len(whole) // 2])
    rows = rows_of(folder, [ROWS[0], {"input": "x", "images": "half.png", "output": "y"}])
    for build in (prompts_of, samples_of):
        assert build(rows, tokenizer, column, bad_rows="skip").skipped == {"bad row": 1}
        kept = build(rows, tokenizer, column, bad_rows="error")
        with refused(ErrorCode.INVALID_ROW, value=folder / "rows.jsonl", row=2) as told:
            kept[1]
        assert "'images': half.png" in told.value.text


# When images are read


@pytest.fixture
def reads(monkeypatch):
    """Records the values that were read whole."""
    found, load = [], image_rows.load_image
    monkeypatch.setattr(
        image_rows, "load_image", lambda value, *more: found.append(value) or load(value, *more)
    )
    return found


def test_images_are_read_when_they_are_handed_out(folder, tokenizer, column, reads):
    rows = rows_of(folder, ROWS)
    store, prompts = samples_of(rows, tokenizer, column), prompts_of(rows, tokenizer, column)
    assert len(prompts.digest()) == 64 and prompts.without_images[0].images[0].data == b""
    joined = PromptDataset.joined([prompts, prompts_of(rows, tokenizer, column, first_id=5)])
    assert [prompt.prompt_id for prompt in joined.without_images] == list(range(10))
    assert reads == []
    assert store[0].images[0].data and joined[5].images[0].data == joined[0].images[0].data
    assert reads == ["square.png"] * 3
    reads.clear()
    batch = [prompts[0], prompts[1]]
    assert reads == ["square.png", "wide.png", "high.png"]
    assert [[image.reference for image in prompt.images] for prompt in batch] == [reads[:1], reads[1:]]


def test_the_digest_of_prompts_tells_pictures_apart(folder, tokenizer, column):
    digests = [
        (prompts.digest(), prompts.fingerprint())
        for name in ("square.png", "wide.png")
        for prompts in [prompts_of(rows_of(folder, [{"input": "x", "images": name}]), tokenizer, column)]
    ]
    assert digests[0][0] != digests[1][0] and digests[0][1] != digests[1][1]


def test_prompts_of_a_run_have_their_images(folder, model, reads):
    rows_of(folder, ROWS)
    data = PromptDataConfig(
        prompt_dataset=str(folder / "rows.jsonl"), apply_chat_template=True, max_images_per_prompt=2
    )
    evaluation = EvalConfig(dataset=f"{folder / 'rows.jsonl'},{folder / 'rows.jsonl'}")
    config = PPOConfig(actor=ActorConfig(model_name_or_path=str(model)), data=data, eval=evaluation)
    prompts, eval_prompts, _ = build_prompt_datasets(config)
    assert reads == [] and (len(prompts), len(eval_prompts)) == (5, 10)
    assert [image.reference for prompt in eval_prompts for image in prompt.images] == reads
    assert reads == ["square.png", "wide.png", "high.png", "large.png"] * 2


def sft_task(model, folder, **flags):
    more = [word for name, value in flags.items() for word in (f"--data.{name}", str(value))]
    argv = [
        *("--model.model_name_or_path", str(model), "--data.dataset", str(folder / "rows.jsonl")),
        *("--data.apply_chat_template", "--data.output_key", "output", "--data.max_images_per_prompt", "2"),
        *more,
    ]
    return SFTTask(parse(SFT, argv).config)


MIX = {"split": "train", "probs": None, "max_samples": None, "seed": 0}


def test_tokenised_rows_come_from_the_cache_until_an_image_changes(folder, model, tokenizer, reads, capfd):
    rows_of(folder, ROWS)
    task = sft_task(model, folder, cache_dir=folder / "cache")
    read = lambda: tokenise(task, tokenizer, str(folder / "rows.jsonl"), "--data.dataset", MIX)
    built, again = read(), read()
    said = capfd.readouterr().err
    assert "kept in" in said and "read from the cache" in said
    assert again.images_digest == built.images_digest and reads == []
    for i in range(len(ROWS)):
        assert torch.equal(built[i].token_ids, again[i].token_ids) and built[i].images == again[i].images
    assert again[1].images[1].data == (folder / "high.png").read_bytes()
    PILImage.new("RGB", (84, 84)).save(folder / "square.png")
    changed = read()
    assert "kept in" in capfd.readouterr().err and changed.images_digest != built.images_digest
    assert changed.lengths[0] == built.lengths[0] + 9 - 4


def test_the_reference_of_dpo_is_of_the_images_too(folder, model, tokenizer):
    """The reference's log-probs are cached under the images' digest, which the pairs pass on."""
    rows_of(folder, [{"prompt": "x", "chosen": "red", "rejected": "blue", "images": "square.png"}])
    argv = [
        *("--model.model_name_or_path", str(model), "--data.dataset", str(folder / "rows.jsonl")),
        *("--data.apply_chat_template", "--data.prompt_key", "prompt", "--data.max_images_per_prompt", "1"),
    ]
    task = DPOTask(parse(DPO, argv).config)
    read = lambda: tokenise(task, tokenizer, str(folder / "rows.jsonl"), "--data.dataset", MIX)
    before = read()
    os.utime(folder / "square.png", (1, 1))
    assert before.images_digest != read().images_digest and before[0].chosen.images[0].data


def test_image_root_takes_the_place_of_the_rows_folder(folder, model, tokenizer):
    (folder / "elsewhere").mkdir()
    rows_of(folder, ROWS[:1])
    task = sft_task(model, folder, image_root=folder / "elsewhere", cache_enable=False)
    read = lambda: tokenise(task, tokenizer, str(folder / "rows.jsonl"), "--data.dataset", MIX)
    with refused(ErrorCode.INVALID_ROW, value=folder / "rows.jsonl", row=1) as told:
        read()
    assert str(folder / "elsewhere") in told.value.text
    (folder / "square.png").rename(folder / "elsewhere" / "square.png")
    assert read()[0].images[0].data == (folder / "elsewhere" / "square.png").read_bytes()


def test_bytes_of_a_table(folder, tokenizer, column):
    import datasets

    file = io.BytesIO()
    PILImage.new("RGB", (56, 84)).save(file, "PNG")
    features = datasets.Features(
        {"input": datasets.Value("string"), "output": datasets.Value("string"),
         "images": datasets.List(datasets.Image())}
    )  # fmt: skip
    table = datasets.Dataset.from_list(
        [{"input": "<image>?", "output": "red", "images": [{"bytes": file.getvalue(), "path": "x.png"}]}],
        features=features,
    )
    table.to_parquet(folder / "rows.parquet")
    rows = load_rows(
        str(folder / "rows.parquet"), flag="--data.dataset", required_columns={"--data.image_key": "images"}
    )
    store = samples_of(rows, tokenizer, column)
    assert store[0].images[0].data == file.getvalue()
    assert (store[0].token_ids == tokenizer.image_token_id).sum() == 6


# Models


def test_a_template_that_shows_no_images_is_refused(model, processor):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for template in (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{{ raise_exception('text only') }}",
    ):
        tokenizer.chat_template = template
        with refused(ErrorCode.CHAT_TEMPLATE, flag="--data.max_images_per_prompt") as told:
            find_layout(processor, tokenizer)
        assert "<|image_pad|>" in told.value.text


def test_a_model_that_reads_no_images_is_refused(tmp_path, folder):
    rows_of(folder, ROWS)
    text_only = tiny_chat_model(tmp_path / "text")
    task = sft_task(text_only, folder)
    with refused(ErrorCode.INVALID_MODEL, flag="--model.model_name_or_path", value=text_only):
        images_of(task, AutoTokenizer.from_pretrained(text_only))


def test_a_processor_that_writes_lines_of_an_image_apart_is_refused(processor, tokenizer):
    class Lines:
        image_token, image_processor = processor.image_token, processor.image_processor
        tokenizer = processor.tokenizer
        _get_num_multimodal_tokens = processor._get_num_multimodal_tokens

        def __call__(self, **options):
            ids = processor(**options)["input_ids"][0]
            return {"input_ids": [[*ids[:2], 0, *ids[2:]]]}

    with refused(ErrorCode.UNSUPPORTED, flag="--data.max_images_per_prompt"):
        find_layout(Lines(), tokenizer)


def test_nothing_is_said_of_rows_that_are_fine(folder, tokenizer, column, caplog):
    with caplog.at_level(logging.WARNING):
        prompts_of(rows_of(folder, ROWS), tokenizer, column)
    assert caplog.text == ""
