"""Reinforcement learning on Ray, vLLM and DeepSpeed where the answer is in a picture alone."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny_gemma import tiny_gemma3, tiny_gemma4
from transformers import AutoModelForImageTextToText, AutoProcessor

from openrlhf.cli.train_ppo_ray import run
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.observability.journal import read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare_pictures import PictureFiles, prepare_pictures

IMAGES = "--data.apply_chat_template --data.max_len 96"
COMMON = (
    f"{IMAGES} --data.label_key label --rollout.max_new_tokens 12 --rollout.n_samples_per_prompt 8 "
    "--train.micro_batch_size 64 --ds.param_dtype fp32 --actor.lr_scheduler constant --actor.adam.lr 5e-4"
)
MISMATCH = 1e-4
"""Largest mismatch in nats, as in test_rl.py: float32 sums in two orders."""

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("running_ray")]

Metrics = dict[int, dict[str, float]]


@pytest.fixture(scope="session")
def seeing(openrlhf: Callable[[str], None], build_once: Callable) -> tuple[PictureFiles, Path]:
    """Returns the task, and a model that names most of the colours."""

    def build(folder: Path) -> None:
        files = prepare_pictures(folder / "task")
        (folder / "files.json").write_text(json.dumps(asdict(files), default=str))
        openrlhf(
            f"sft --model.model_name_or_path {files.model} --data.dataset {files.sft} {IMAGES} "
            "--data.max_images_per_prompt 1 --data.output_key output --data.max_samples 768 "
            "--train.batch_size 32 --train.micro_batch_size 32 --train.max_epochs 2 --ds.zero_stage 0 "
            f"--ds.param_dtype fp32 --adam.lr 4e-3 --ckpt.output_dir {folder / 'model'}"
        )

    folder = build_once("glimpsing", build)
    paths = json.loads((folder / "files.json").read_text())
    return PictureFiles(**{name: Path(path) for name, path in paths.items()}), folder / "model"


def train(seeing: tuple[PictureFiles, Path], folder: Path, flags: str) -> Metrics:
    files, model = seeing
    argv = shlex.split(
        f"--actor.model_name_or_path {model} --data.prompt_dataset {files.prompts} "
        f"--ckpt.output_dir {folder / 'policy'} --logger.run_dir {folder / 'run'} {COMMON} {flags}"
    )
    run(parse(PPO, argv).config, argv)
    return read_metrics(folder / "run" / "metrics.jsonl")


def parts_of(model: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the weights of the vision tower and those of the language model."""
    weights = AutoModelForImageTextToText.from_pretrained(model).state_dict()
    tower = {name: tensor for name, tensor in weights.items() if ".visual." in name}
    return tower, {name: tensor for name, tensor in weights.items() if name not in tower}


@pytest.mark.parametrize("num_steps", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_the_share_of_colours_that_are_right_rises(
    seeing: tuple[PictureFiles, Path], tmp_path: Path, num_steps: int
) -> None:
    """The share rises over ten steps. The pictures of a step come again in the next one, so that a cache of
    older weights' features in the engine would show as a mismatch."""
    metrics = train(
        seeing,
        tmp_path,
        f"--reward.remote_url {seeing[0].reward} --data.max_images_per_prompt 1 --data.max_samples 32 "
        f"--rollout.batch_size 32 --train.batch_size 256 --train.num_episodes {num_steps} --ds.zero_stage 2 "
        "--actor.num_gpus_per_node 1 --train.colocate_all --algo.advantage.estimator group_norm "
        "--algo.kl.init_coef 0.001",
    )
    assert len(metrics) == num_steps
    scores = [metrics[step]["rollout/score_mean"] for step in metrics]
    if num_steps == 10:
        assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.05, scores
    assert max(m["mismatch/abs_diff_max"] for m in metrics.values()) < MISMATCH
    assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)

    samples = read_journal(tmp_path / "run" / "rollouts" / "step_000003.parquet")
    rows = [json.loads(line) for line in seeing[0].prompts.read_text().splitlines()]
    for t in samples:
        assert [image.reference for image in t.images] == rows[t.prompt.prompt_id]["images"]
        assert not any(image.data for image in t.images)

    for before, after in zip(parts_of(seeing[1]), parts_of(tmp_path / "policy"), strict=True):
        assert all(not torch.equal(before[name], after[name]) for name in before)
    AutoProcessor.from_pretrained(tmp_path / "policy")


SHOWS_MORE = '''
from PIL import Image

from openrlhf.tasks.picture import COLOURS, fraction_right
from openrlhf.agents.base import AgentInstanceBase, MultiTurnAgentExecutor


class Shows(AgentInstanceBase):
    """After the first answer, a picture in another size, of a colour that is to be named."""

    asked = None

    async def step(self, states, **kwargs):
        if self.asked:
            return {"rewards": float(self.asked in states["action_text"]), "done": True}
        self.asked = states["label"].split()[0]
        return {
            "rewards": fraction_right(states["action_text"], states["label"]),
            "environment_feedback": "<|user|>And<image>?<|end|><|assistant|>",
            "environment_images": [Image.new("RGB", (112, 56), COLOURS[self.asked])],
            "done": False,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Shows)
'''


@pytest.mark.slow
def test_an_environment_shows_pictures_to_a_frozen_tower(
    seeing: tuple[PictureFiles, Path], tmp_path: Path
) -> None:
    """Two ranks share the weights, with two engines and a critic."""
    agent = tmp_path / "agent.py"
    agent.write_text(SHOWS_MORE)
    metrics = train(
        seeing,
        tmp_path,
        f"--train.agent_func_path {agent} --data.max_images_per_prompt 2 --actor.freeze_visual_encoder "
        "--data.max_samples 16 --rollout.batch_size 8 --train.batch_size 64 --ds.zero_stage 3 "
        "--actor.num_gpus_per_node 2 --vllm.num_engines 2 --algo.advantage.estimator gae "
        "--critic.num_gpus_per_node 1 --critic.adam.lr 1e-3 --algo.kl.init_coef 0 "
        "--train.dynamic_batch_enable --train.max_tokens_per_gpu 256 --actor.gradient_checkpointing_enable",
    )
    assert max(m["mismatch/abs_diff_max"] for m in metrics.values()) < MISMATCH
    samples = read_journal(tmp_path / "run" / "rollouts" / "step_000002.parquet")
    processor = AutoProcessor.from_pretrained(tmp_path / "policy")
    assert len(samples) == 64 and all(t.ok for t in samples)
    for t in samples:
        of_prompt, of_feedback = (image.reference for image in t.images)
        assert of_prompt.startswith("pictures/") and of_feedback.startswith("sha256:")
        assert len(t.turn_starts) == 2 and (t.token_ids == processor.image_token_id).sum() == 4 + 8
    (tower, language), (same_tower, other_language) = map(parts_of, (seeing[1], tmp_path / "policy"))
    assert tower and all(torch.equal(tower[name], same_tower[name]) for name in tower)
    assert all(not torch.equal(language[name], other_language[name]) for name in language)


@pytest.mark.slow
@pytest.mark.parametrize("tiny_model", [tiny_gemma3, tiny_gemma4])
def test_images_whose_tokens_see_each_other(
    seeing: tuple[PictureFiles, Path], tmp_path: Path, tiny_model: Callable[[Path], Path]
) -> None:
    """Trainer and engine agree, also after updates of the tower and where the prompt is cached."""
    metrics = train(
        (seeing[0], tiny_model(tmp_path / "model")),
        tmp_path,
        "--data.max_images_per_prompt 1 --data.max_samples 16 --rollout.batch_size 8 --train.batch_size 64 "
        "--data.max_len 140 --algo.advantage.estimator group_norm --actor.num_gpus_per_node 1 "
        "--algo.kl.init_coef 0 --ds.zero_stage 0 --reward.remote_url "
        f"{Path(__file__).with_name('digits_reward.py')} --vllm.enable_prefix_caching",
    )
    assert len(metrics) == 2
    assert max(m["mismatch/abs_diff_max"] for m in metrics.values()) < MISMATCH
