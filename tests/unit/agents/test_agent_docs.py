"""Each Python block of the page on agents is an agent that plays an episode."""

import asyncio
import re
from pathlib import Path

import pytest
from fake_engine import Engine
from namespaces import CAN_ISOLATE

from openrlhf.config.ppo import PPOConfig
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.types import Prompt

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_is_an_agent(block: str, tmp_path: Path) -> None:
    """The policy answers wrongly once, with digits of the label, then rightly."""
    if "Sandbox" in block and not CAN_ISOLATE:
        pytest.skip("unshare: nobody makes namespaces on this machine")
    (path := tmp_path / "agent.py").write_text(block)
    answers = [TOKENIZER(f"{n}<|end|>", add_special_tokens=False)["input_ids"] for n in (17, 7)]

    async def play():
        executor = await UserExecutor.load(str(path), AgentSetting(tokenizer=TOKENIZER))
        runner = EpisodeRunner(Engine(*answers), TOKENIZER, executor, [TOKENIZER.eos_token_id])
        prompt = Prompt(prompt_id=0, text="How many?", label="7")
        return await runner.run_group(prompt, Sampling.for_training(PPOConfig()))

    for t in asyncio.run(play()).trajectories:
        assert t.ok, t.error
        assert t.num_actions and t.reward == (len(t.turn_starts) > 1)
