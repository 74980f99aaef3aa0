"""Texts of --data.pretrain_dataset, which a policy goes on learning in reinforcement learning."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf.config.ppo import PPOConfig, PromptDataConfig, RolloutConfig, TrainConfig
from openrlhf.data.order import epoch_order
from openrlhf.mesh import Mesh
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.training.rl_data import build_pretrain_texts
from openrlhf.training.trained_worker import PolicyWorker

TEXTS = [f"{i} + {i}" for i in range(7)]


@pytest.mark.parametrize(("num_prompts", "taken"), [(2, 4), (8, 7)])
def test_as_many_texts_as_the_run_learns_in_its_order(tmp_path: Path, num_prompts: int, taken: int) -> None:
    """A step has 2 prompts of 2 samples. Each sample has a text beside it, as long as there are texts."""
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = PromptDataConfig(
        pretrain_dataset=str(tmp_path), pretrain_split="test", pretrain_key="text", max_len=99
    )
    config = PPOConfig(
        data=data,
        rollout=RolloutConfig(batch_size=2, n_samples_per_prompt=2),
        train=TrainConfig(batch_size=2, seed=5, num_episodes=1, max_epochs=1),
    )
    tokenizer = tiny_tokenizer()
    texts = build_pretrain_texts(config, tokenizer, num_prompts=num_prompts)
    assert texts is not None
    order = epoch_order(len(TEXTS), seed=5, epoch=0)
    expected = [tokenizer(TEXTS[i])["input_ids"] for i in order[:taken]]
    assert [sample.token_ids.tolist() for sample in texts] == expected
    assert all(sample.action_mask.tolist() == [False] + [True] * (sample.length - 1) for sample in texts)
    assert build_pretrain_texts(PPOConfig(), tokenizer, num_prompts=2) is None


def test_pretraining_texts_go_on_after_the_steps_that_are_done():
    worker = PolicyWorker(PPOConfig(), 0, Mesh())
    worker.model = SimpleNamespace(steps=3, load_checkpoint=lambda folder, tag: {})
    worker.text_mini_batches = SimpleNamespace(endless=itertools.count)
    worker.load_checkpoint("global_step1")
    assert next(worker.text_rows) == 3
