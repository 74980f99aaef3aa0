"""Pictures in prompts and in feedback, on a stand-in for the engine and the processor of a real model."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import Engine
from PIL import Image as PILImage
from refusals import refused
from transformers import AutoProcessor

from openrlhf.agents.base import Reward, SingleTurnAgentExecutor
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.data.pictures import decoded, encoded
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor, check_agent_file
from openrlhf.tasks.tiny_vision_model import IMAGE_TOKEN, PLACEHOLDER, tiny_vision_model
from openrlhf.text import placeholder, with_placeholders
from openrlhf.types import Image, Outcome, Prompt, Trajectory

FLAG = "--train.agent_func_path"
TEXT = f"<|user|>{PLACEHOLDER}Where?<|end|><|assistant|>"
RED = encoded(PILImage.new("RGB", (56, 56), "red"))
"""Picture of four tokens."""
WIDE = PILImage.new("RGB", (112, 56), "blue")
"""Picture of eight tokens."""
STEP = """
import io
from PIL import Image
from openrlhf.agents.base import AgentInstanceBase, MultiTurnAgentExecutor

class Instance(AgentInstanceBase):
    async def step(self, states, **kwargs):
        picture = Image.new("RGB", (112, 56), "blue")
        file = io.BytesIO()
        picture.save(file, "PNG")
        {step}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory):
    return AutoProcessor.from_pretrained(tiny_vision_model(tmp_path_factory.mktemp("vision")))


class Expanding(Engine):
    """Engine that expands prompts with the processor, as vLLM does."""

    def __init__(self, processor, *answers: Sequence[int]) -> None:
        super().__init__(*answers)
        self.processor, self.sent = processor, []

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        pictures = (multi_modal_data or {}).get("image", [])
        self.sent.append((prompt_token_ids, pictures))
        text = self.processor.tokenizer.decode(prompt_token_ids)
        read = self.processor(text=[text], images=pictures or None)["input_ids"][0]
        return await super().generate(list(read), sampling_params)


def play(processor, executor, max_len: int = 200) -> tuple[Trajectory, Expanding]:
    answer = processor.tokenizer("red<|end|>")["input_ids"]
    engine = Expanding(processor, answer)
    patch = processor.image_token_id
    runner = EpisodeRunner(engine, processor, executor, [answer[-1]], image_token_ids=(patch,))
    config = PPOConfig(rollout=RolloutConfig(n_samples_per_prompt=1, max_new_tokens=20))
    sampling = replace(Sampling.for_training(config), max_len=max_len)
    prompt = Prompt(prompt_id=0, text=TEXT, images=(RED,))
    (t,) = asyncio.run(runner.run_group(prompt, sampling)).trajectories
    return t, engine


def agent(folder: Path, processor, step: str) -> UserExecutor:
    path = folder / "agent.py"
    path.write_text(STEP.replace("{step}", step))
    assert check_agent_file(str(path), FLAG, limits=("images",)) == ""
    return asyncio.run(UserExecutor.load(str(path), AgentSetting(tokenizer=processor)))


def expected(processor, text: str, *pictures: PILImage.Image) -> list[int]:
    return list(processor(text=[text], images=list(pictures))["input_ids"][0])


def test_one_turn(processor) -> None:
    async def reward(query: str, prompt: str, label: str) -> Reward:
        assert query == TEXT + "red<|end|>" and prompt == TEXT
        return Reward(reward=1.0, score=1.0)

    executor = SingleTurnAgentExecutor(reward, is_chat=True)
    t, engine = play(processor, executor, max_len=20)
    assert t.outcome is Outcome.OK and t.images == (RED,) and t.images[0] is RED
    prompt = expected(processor, TEXT, decoded(RED.data))
    assert t.token_ids[: t.prompt_length].tolist() == prompt
    ((sent, pictures),) = engine.sent
    assert sent.count(processor.image_token_id) == 1 and prompt.count(processor.image_token_id) == 4
    assert [picture.tobytes() for picture in pictures] == [decoded(RED.data).tobytes()]
    assert engine.asked[0][1].max_tokens == 20 - len(prompt)
    with pytest.raises(UsageError, match=f"a prompt of {len(prompt)} tokens"):
        play(processor, executor, max_len=len(prompt))


@pytest.mark.processes
@pytest.mark.parametrize("value", ["picture", "file.getvalue()"])
def test_an_environment_shows_pictures(tmp_path: Path, processor, value: str) -> None:
    """Pictures stand in the place that the environment's text names, as the model writes them; every turn
    sends all pictures so far."""
    step = (
        "done = states['observation_text'].count('look') == 2\n"
        "        return {'rewards': 1, 'done': done, 'environment_feedback': '<|user|>look <image>here',"
        f" 'environment_images': [{value}]}}"
    )
    t, engine = play(processor, agent(tmp_path, processor, step))
    assert t.outcome is Outcome.OK, t.error
    feedback = f"<|user|>look {PLACEHOLDER}here"
    text = TEXT + f"red<|end|>{feedback}" * 2 + "red<|end|>"
    assert t.token_ids.tolist() == expected(processor, text, decoded(RED.data), WIDE, WIDE)
    assert [len(pictures) for _, pictures in engine.sent] == [1, 2, 3]
    assert t.images[0] is RED and [decoded(i.data).tobytes() for i in t.images[1:]] == [WIDE.tobytes()] * 2
    assert t.action_mask.sum() == 6 and not t.action_mask[t.token_ids == processor.image_token_id].any()


@pytest.mark.processes
def test_pictures_count_for_the_room(tmp_path: Path, processor) -> None:
    """After the first answer eight patches do not fit."""
    step = "return {'rewards': 1, 'done': False, 'environment_feedback': '', 'environment_images': [picture]}"
    prompt = len(expected(processor, TEXT, decoded(RED.data)))
    t, engine = play(processor, agent(tmp_path, processor, step), max_len=prompt + 2 + 10)
    assert t.outcome is Outcome.OK and t.truncated and len(engine.asked) == 1
    t, engine = play(processor, agent(tmp_path, processor, step), max_len=prompt + 2 + 11)
    assert t.truncated and [params.max_tokens for _, params in engine.asked] == [13, 1]


@pytest.mark.processes
def test_a_rewritten_history_has_its_own_pictures(tmp_path: Path, processor) -> None:
    step = (
        "first = 'new' not in states['observation_text']\n"
        "        return {'rewards': 1, 'done': not first, 'observation': 'new <image>',"
        " 'environment_images': [picture]}"
    )
    executor = agent(tmp_path, processor, step)
    engine = Expanding(processor, processor.tokenizer("red<|end|>")["input_ids"])
    runner = EpisodeRunner(engine, processor, executor, [1])
    sampling = replace(Sampling.for_training(PPOConfig()), num_samples=1, max_len=200)
    prompt = Prompt(prompt_id=0, text=TEXT, images=(RED,))
    one, two = asyncio.run(runner.run_group(prompt, sampling)).trajectories
    assert one.images == (RED,) and [decoded(i.data).tobytes() for i in two.images] == [WIDE.tobytes()]


@pytest.mark.processes
@pytest.mark.parametrize(
    "step, text",
    [
        (
            "return {'rewards': 1, 'done': False, 'environment_feedback': '<image> <image>',"
            " 'environment_images': [picture]}",
            "1 images, and 2 times <image> in the text",
        ),
        (
            "return {'rewards': 1, 'done': False, 'environment_feedback': '',"
            " 'environment_images': ['/etc/passwd']}",
            "--data.image_root",
        ),
    ],
)
def test_pictures_that_cannot_be_shown(tmp_path: Path, processor, step: str, text: str) -> None:
    t, _ = play(processor, agent(tmp_path, processor, step))
    assert t.outcome is Outcome.ENV_ERROR and text in t.error, t.error


TOLD = """
from openrlhf.agents.base import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, hf_tokenizer, llm_engine, images):
        ids = hf_tokenizer.tokenizer(prompt)["input_ids"]
        output = await llm_engine.generate(ids, sampling_params, {"image": images})
        read, answer = {tokens}, list(output.outputs[0].token_ids)
        return {"reward": 1, "observation_tokens": [*read, *answer],
                "action_ranges": [(len(read), len(read) + len(answer))]}
"""


def test_returned_observation_tokens_must_have_all_tokens_of_an_image(tmp_path: Path, processor) -> None:
    for i, (tokens, ok) in enumerate([("output.prompt_token_ids", True), ("ids", False)]):
        path = tmp_path / f"agent{i}.py"
        path.write_text(TOLD.replace("{tokens}", tokens))
        t, _ = play(processor, asyncio.run(UserExecutor.load(str(path))))
        assert t.ok == ok, t.error
        assert t.images == (RED,)
        assert ok or "observation_tokens" in t.error


@pytest.mark.processes
def test_an_executor_that_takes_no_images_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(TOLD.replace("{tokens}", "ids").replace(", images)", ")"))
    with refused(ErrorCode.USER_CODE, flag=FLAG, value=path) as told:
        check_agent_file(str(path), FLAG, limits=("images",))
    assert re.search(r"\bexecute\b.*\bimages\b", told.value.text)
    path.write_text(
        "from openrlhf.agents.base import AgentExecutorBase\n\nclass AgentExecutor(AgentExecutorBase):\n"
        "    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):\n"
        "        super().__init__(None, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)\n"
    )
    with refused(ErrorCode.USER_CODE, flag=FLAG, value=path, told="--data.max_images_per_prompt"):
        check_agent_file(str(path), FLAG, limits=("images",))


def test_the_placeholder_is_what_the_chat_template_writes(processor) -> None:
    assert placeholder(processor) == PLACEHOLDER and IMAGE_TOKEN in PLACEHOLDER
    assert with_placeholders(processor, "a", 2) == 2 * PLACEHOLDER + "a"
    assert with_placeholders(processor, "a<image>b", 1) == f"a{PLACEHOLDER}b"
    assert Image("a", b"x") != Image("a", b"y")
