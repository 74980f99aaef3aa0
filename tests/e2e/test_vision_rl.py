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

from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.loop.rl_command import run
from openrlhf.observability.journal import read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare_pictures import PictureFiles, prepare_pictures

IMAGES = "--data.apply_chat_template --data.max_len 96"
COMMON = (
    f"{IMAGES} --data.label_key label --rollout.max_new_tokens 12 --rollout.n_samples_per_prompt 8 "
    "--train.micro_batch_size 64 --ds.param_dtype fp32 --actor.lr_scheduler constant --actor.adam.lr 5e-4"
)
DIGITS = Path(__file__).with_name("digits_reward.py")
MISMATCH = 1e-4
"""Largest mismatch in nats, as in test_rl.py: float32 sums in two orders."""

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("running_ray")]

Metrics = dict[int, dict[str, float]]


@pytest.fixture(scope="session")
def pictures(build_once: Callable) -> PictureFiles:
    """Writes the task, with a model that knows nothing."""

    def build(folder: Path) -> None:
        (folder / "files.json").write_text(json.dumps(asdict(prepare_pictures(folder / "task")), default=str))

    paths = json.loads((build_once("pictures_to_sample", build) / "files.json").read_text())
    return PictureFiles(**{name: Path(path) for name, path in paths.items()})


@pytest.fixture(scope="session")
def seeing(openrlhf: Callable[[str], None], pictures: PictureFiles, build_once: Callable) -> Path:
    """Trains a model that names most of the colours."""
    return build_once(
        "glimpsing",
        lambda folder: openrlhf(
            f"sft --model.model_name_or_path {pictures.model} --data.dataset {pictures.sft} {IMAGES} "
            "--data.max_images_per_prompt 1 --data.output_key output --data.max_samples 768 "
            "--train.batch_size 32 --train.micro_batch_size 32 --train.max_epochs 2 --ds.zero_stage 0 "
            f"--ds.param_dtype fp32 --adam.lr 4e-3 --ckpt.output_dir {folder}"
        ),
    )


def train(pictures: PictureFiles, model: Path, folder: Path, flags: str) -> Metrics:
    argv = shlex.split(
        f"--actor.model_name_or_path {model} --data.prompt_dataset {pictures.prompts} "
        f"--ckpt.output_dir {folder / 'policy'} --logger.run_dir {folder / 'run'} {COMMON} {flags}"
    )
    run(parse(PPO, argv).config, argv)
    return read_metrics(folder / "run" / "metrics.jsonl")


def parts_of(model: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the weights of the vision tower and those of the language model."""
    weights = AutoModelForImageTextToText.from_pretrained(model).state_dict()
    tower = {name: tensor for name, tensor in weights.items() if ".visual." in name}
    return tower, {name: tensor for name, tensor in weights.items() if name not in tower}


COLOCATED = (
    "--data.max_images_per_prompt 1 --ds.zero_stage 2 --actor.num_gpus_per_node 1 --train.colocate_all "
    "--algo.advantage.estimator group_norm --algo.kl.init_coef 0.001"
)


def test_trainer_and_engine_see_the_same_pictures(pictures: PictureFiles, tmp_path: Path) -> None:
    """The pictures of a step come again in the next one, so that a cache of older weights' features in the
    engine would show as a mismatch. Tokens are sampled from a part of the vocabulary."""
    metrics = train(
        pictures,
        pictures.model,
        tmp_path,
        f"{COLOCATED} --reward.remote_url {DIGITS} --data.max_samples 8 --rollout.batch_size 8 "
        "--train.batch_size 64 --train.num_episodes 3 --rollout.top_p 0.9 --rollout.top_k 20",
    )
    check_run(metrics, tmp_path, pictures, pictures.model)
    assert all(1 < m["rollout/kept_set_size_mean"] <= 20 for m in metrics.values())


@pytest.mark.slow
def test_the_share_of_colours_that_are_right_rises(pictures, seeing, tmp_path):
    metrics = train(
        pictures,
        seeing,
        tmp_path,
        f"{COLOCATED} --reward.remote_url {pictures.reward} --data.max_samples 32 --rollout.batch_size 32 "
        "--train.batch_size 256 --train.num_episodes 10",
    )
    check_run(metrics, tmp_path, pictures, seeing)
    scores = [metrics[step]["rollout/score_mean"] for step in metrics]
    assert len(scores) == 10 and sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.05, scores


def check_run(metrics: Metrics, folder: Path, pictures: PictureFiles, start: Path) -> None:
    """Checks that trainer and engine agree, that the journal names the pictures, and that all weights have
    changed."""
    assert max(m["mismatch/abs_diff_max"] for m in metrics.values()) < MISMATCH
    assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)

    samples = read_journal(folder / "run" / "rollouts" / "step_000003.parquet")
    rows = [json.loads(line) for line in pictures.prompts.read_text().splitlines()]
    for t in samples:
        assert [image.reference for image in t.images] == rows[t.prompt.prompt_id]["images"]
        assert not any(image.data for image in t.images)

    for before, after in zip(parts_of(start), parts_of(folder / "policy"), strict=True):
        assert all(not torch.equal(before[name], after[name]) for name in before)
    AutoProcessor.from_pretrained(folder / "policy")


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
def test_an_environment_shows_pictures_to_a_frozen_tower(pictures, seeing, tmp_path):
    """Two ranks share the weights, with two engines and a critic."""
    agent = tmp_path / "agent.py"
    agent.write_text(SHOWS_MORE)
    metrics = train(
        pictures,
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
    (tower, language), (same_tower, other_language) = map(parts_of, (seeing, tmp_path / "policy"))
    assert tower and all(torch.equal(tower[name], same_tower[name]) for name in tower)
    assert all(not torch.equal(language[name], other_language[name]) for name in language)


@pytest.mark.slow
@pytest.mark.parametrize("tiny_model", [tiny_gemma3, tiny_gemma4])
def test_images_whose_tokens_see_each_other(pictures, tmp_path, tiny_model):
    """Trainer and engine agree, also after updates of the tower and where the prompt is cached."""
    metrics = train(
        pictures,
        tiny_model(tmp_path / "model"),
        tmp_path,
        "--data.max_images_per_prompt 1 --data.max_samples 16 --rollout.batch_size 8 --train.batch_size 64 "
        "--data.max_len 140 --algo.advantage.estimator group_norm --actor.num_gpus_per_node 1 "
        f"--algo.kl.init_coef 0 --ds.zero_stage 0 --reward.remote_url {DIGITS} "
        "--vllm.enable_prefix_caching",
    )
    assert len(metrics) == 2
    assert max(m["mismatch/abs_diff_max"] for m in metrics.values()) < MISMATCH
