"""Supervised commands on pictures, as users run them: the answers are in the pictures alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.picture import QUESTION, fraction_right
from openrlhf.tasks.prepare_pictures import PictureFiles, prepare_pictures

pytestmark = pytest.mark.e2e

COMMON = (
    "--data.apply_chat_template --data.max_images_per_prompt 1 --data.max_len 32 --train.batch_size 32 "
    "--train.micro_batch_size 32 --ds.zero_stage 0 --ds.param_dtype fp32"
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> PictureFiles:
    return prepare_pictures(tmp_path_factory.mktemp("pictures"), num_pictures=1024, num_eval=48)


@pytest.fixture(scope="module")
def seeing(openrlhf, pictures: PictureFiles, build_once) -> Path:
    """Trains a model that names the colours of pictures."""
    return build_once(
        "seeing",
        lambda folder: openrlhf(
            f"sft --model.model_name_or_path {pictures.model} --data.dataset {pictures.sft} "
            f"--data.output_key output {COMMON} --train.max_epochs 3 --adam.lr 5e-3 "
            f"--ckpt.output_dir {folder} --logger.run_dir {folder}/run"
        ),
    )


@torch.no_grad()
def right(model_folder: Path, pictures: PictureFiles, show: Callable[[Image.Image], Image.Image]) -> float:
    """Returns the fraction of the colours of held-out pictures that transformers' greedy answers name, with
    each picture shown as `show` makes it."""
    processor = AutoProcessor.from_pretrained(model_folder)
    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    rows = [json.loads(line) for line in pictures.eval.read_text().splitlines()]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    text = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    shown = [show(Image.open(pictures.eval.parent / row["images"][0])) for row in rows]
    batch = processor(text=[text] * len(rows), images=[[image] for image in shown], return_tensors="pt")
    written = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, batch["input_ids"].shape[1] :]
    answers = processor.tokenizer.batch_decode(written)
    return sum(fraction_right(a, row["label"]) for a, row in zip(answers, rows, strict=True)) / len(rows)


def test_sft_learns_what_is_in_the_pictures(pictures: PictureFiles, seeing: Path) -> None:
    """The export is a whole model of transformers. By chance a sixth of the colours are right, which is also
    the share where every picture is grey."""
    assert right(seeing, pictures, lambda picture: picture) > 0.9
    assert right(seeing, pictures, lambda picture: Image.new("RGB", picture.size, "grey")) < 0.4


@pytest.mark.slow
def test_a_reward_model_sees_which_answer_is_wrong(openrlhf, pictures, seeing, tmp_path) -> None:
    openrlhf(
        f"rm --model.model_name_or_path {seeing} --data.dataset {pictures.pairs} --data.prompt_key prompt "
        f"--eval.dataset {pictures.pairs_eval} {COMMON} --train.max_epochs 2 --adam.lr 1e-3 "
        f"--ckpt.output_dir {tmp_path} --logger.run_dir {tmp_path}/run"
    )
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics[max(metrics)]["eval/rm/accuracy"] > 0.9
