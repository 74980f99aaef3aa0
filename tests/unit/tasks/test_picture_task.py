import io
import json
from dataclasses import astuple

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from openrlhf.tasks.picture import COLOURS, QUESTION, Picture, fraction_right, make_pictures
from openrlhf.tasks.picture_reward import reward_func
from openrlhf.tasks.prepare_pictures import prepare_pictures
from openrlhf.tasks.tiny_vision_model import IMAGE_TOKEN, PLACEHOLDER


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return prepare_pictures(tmp_path_factory.mktemp("pictures"), num_pictures=20, num_eval=5)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_picture_shows_its_colours_row_by_row():
    picture = Picture(("red", "white", "blue", "purple"))
    shown = Image.open(io.BytesIO(picture.png()))
    assert shown.size == (56, 56)
    corners = [(0, 0), (28, 27), (27, 28), (55, 55)]
    assert [shown.getpixel(corner) for corner in corners] == [COLOURS[c] for c in picture.colours]
    assert picture.png() == picture.png()


def test_pictures_depend_on_the_seed_and_leave_out_what_is_excluded():
    some = make_pictures(400, seed=1)
    assert some == make_pictures(400, seed=1) != make_pictures(400, seed=2)
    assert len({*some, *make_pictures(400, seed=2, exclude=frozenset(some))}) == 800


@pytest.mark.parametrize(
    "text, share",
    [
        ("red blue white red", 1.0),
        ("red blue white green<|end|>", 0.75),
        ("I see red, blue", 0.5),
        ("blue red red white", 0.0),
        ("red blue white red green", 1.0),
        ("", 0.0),
    ],
)
def test_the_reward_counts_colours_at_their_place(text, share):
    assert fraction_right(text, "red blue white red") == share
    assert reward_func(["<|user|>red" + text], ["<|user|>red"], ["red blue white red"])["rewards"] == [share]


def test_files_agree_and_the_held_out_pictures_are_in_no_other_file(files):
    rows = {path.stem: read(path) for path in astuple(files) if path.suffix == ".jsonl"}
    assert {name: len(some) for name, some in rows.items()} == {
        "sft": 20, "prompts": 20, "pairs": 20, "eval": 5, "sft_eval": 5, "pairs_eval": 5,
    }  # fmt: skip
    folder = files.sft.parent
    for some in rows.values():
        for row in some:
            (path,) = row["images"]
            answer = row.get("output") or row.get("label") or row["chosen"]
            assert Picture(tuple(answer.split())).png() == (folder / path).read_bytes()
    images = {name: {row["images"][0] for row in some} for name, some in rows.items()}
    assert images["sft"] == images["prompts"] == images["pairs"]
    assert not images["sft"] & images["eval"]
    for row in rows["pairs"] + rows["pairs_eval"]:
        assert fraction_right(row["rejected"], row["chosen"]) == 0
    assert rows["pairs_eval"][0]["rejected"] == "white yellow blue yellow"  # the same for ever


def test_the_files_of_the_model_are_those_of_a_vision_language_model(files):
    processor = AutoProcessor.from_pretrained(files.model)
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    model = AutoModelForImageTextToText.from_pretrained(files.model)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]},
        {"role": "assistant", "content": "red"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == f"<|user|>{PLACEHOLDER}{QUESTION}<|end|><|assistant|>red<|end|>"
    assert text == processor.apply_chat_template(messages, tokenize=False)
    assert tokenizer.image_token == IMAGE_TOKEN and tokenizer.eos_token == "<|end|>"
    batch = processor(text=[text], images=[Image.new("RGB", (84, 56))], return_tensors="pt")
    assert batch["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert batch["input_ids"].eq(tokenizer.image_token_id).sum() == 6  # a token for each 28 x 28 pixels
    with torch.no_grad():
        assert model(**batch).logits.shape == (1, batch["input_ids"].shape[1], len(tokenizer))
