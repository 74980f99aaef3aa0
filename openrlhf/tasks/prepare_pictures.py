"""Writes everything that a run on the pictures needs into one folder.

python -m openrlhf.tasks.prepare_pictures pictures
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openrlhf.api import DEVICE_TYPE as DEVICE_TYPE  # before anything that imports transformers
from openrlhf.tasks.picture import COLOURS, QUESTION, Picture, make_pictures
from openrlhf.tasks.prepare import write_rows
from openrlhf.tasks.tiny_vision_model import tiny_vision_model

REWARD_FILE = Path(__file__).with_name("picture_reward.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFiles:
    model: Path
    """Untrained weights, the tokenizer and the processor."""
    sft: Path
    """`input`, `images`, `output`: `<image>` and the question; a list with the path of a PNG, relative to
    this folder; the colours."""
    prompts: Path
    """`input`, `images`, `label`: the same pictures."""
    eval: Path
    """Same columns as `prompts`; none of these pictures is in another file."""
    sft_eval: Path
    """Same columns as `sft`, with the pictures of `eval`."""
    pairs: Path
    """`prompt`, `images`, `chosen`, `rejected`: the colours, and four wrong ones."""
    pairs_eval: Path
    """Same columns as `pairs`, with the pictures of `eval`."""
    reward: Path = REWARD_FILE
    """Reward file for --reward.remote_url."""


def prepare_pictures(
    folder: str | Path, *, seed: int = 0, num_pictures: int = 1024, num_eval: int = 64
) -> PictureFiles:
    """Writes the files of the task; equal arguments give equal files. The evaluation pictures are the same
    for every seed."""
    folder = Path(folder)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    held_out = make_pictures(num_eval, seed=_EVAL_SEED)
    pictures = make_pictures(num_pictures, seed=seed, exclude=frozenset(held_out))
    for picture in [*pictures, *held_out]:
        (folder / "pictures" / picture.name).write_bytes(picture.png())
    return PictureFiles(
        model=tiny_vision_model(folder / "model", seed=seed),
        sft=write_rows(folder / "sft.jsonl", map(demonstration, pictures)),
        prompts=write_rows(folder / "prompts.jsonl", map(labelled, pictures)),
        eval=write_rows(folder / "eval.jsonl", map(labelled, held_out)),
        sft_eval=write_rows(folder / "sft_eval.jsonl", map(demonstration, held_out)),
        pairs=write_rows(folder / "pairs.jsonl", pairs(pictures, seed)),
        pairs_eval=write_rows(folder / "pairs_eval.jsonl", pairs(held_out, _EVAL_SEED)),
    )


def asked(picture: Picture) -> dict[str, Any]:
    return {"input": f"<image>{QUESTION}", "images": [f"pictures/{picture.name}"]}


def demonstration(picture: Picture) -> dict[str, Any]:
    return asked(picture) | {"output": picture.answer}


def labelled(picture: Picture) -> dict[str, Any]:
    return asked(picture) | {"label": picture.answer}


def pairs(pictures: Sequence[Picture], seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"wrong colours/{seed}")
    for picture in pictures:
        wrong = [rng.choice([colour for colour in COLOURS if colour != right]) for right in picture.colours]
        row = asked(picture)
        prompt = {"prompt": row["input"], "images": row["images"]}
        yield prompt | {"chosen": picture.answer, "rejected": " ".join(wrong)}


_EVAL_SEED = 1_000_003


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes pictures, questions about their colours, and an untrained model."
    )
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of pictures and initial weights (default: 0)"
    )
    options = parser.parse_args()
    for name, path in asdict(prepare_pictures(options.folder, seed=options.seed)).items():
        print(f"{name}: {path}")


if __name__ == "__main__":
    main()
