"""Runs whose agent files are those of Molt."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from openrlhf.observability.journal import journal_steps, read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles

ENV = """
from molt.agents import Env, Result, StepEnvRunner


class Digits(Env):
    digits = turns = 0

    async def step(self, state) -> Result:
        digits = sum(map(str.isdigit, state["action_text"]))
        self.digits, self.turns = self.digits + digits, self.turns + 1
        last = self.turns == 2
        return Result(reward=digits / 8, observation=" Again:", terminated=False, truncated=last,
                      info={"digits": self.digits})


class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(Digits)
"""
CHAT = """
from openai import AsyncOpenAI

from molt.agents import ChatAgent, ChatAgentRunner, ChatContext, Result


class Asker(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        messages, digits = [{"role": "user", "content": ctx.prompt}], 0
        for _ in range(2):
            answer = await client.chat.completions.create(
                model=ctx.model_name, messages=messages, max_tokens=ctx.sampling_params.max_tokens
            )
            text = answer.choices[0].message.content
            digits += sum(map(str.isdigit, text))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Again:"}]
        return Result(reward=digits / 8, truncated=True, info={"digits": digits})


class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(Asker)
"""
STEPS = 2


@pytest.mark.slow
@pytest.mark.usefixtures("running_ray")
@pytest.mark.parametrize("source", [ENV, CHAT], ids=["env", "chat"])
def test_an_agent_file_of_molt_trains(openrlhf, task: TaskFiles, tmp_path: Path, source: str) -> None:
    """The reward of an episode is an eighth of the digits that were sampled in both turns. All samples of a
    step are one optimizer step. The checkpoint is then evaluated alone."""
    agent = tmp_path / "digits_agent.py"
    agent.write_text(source)
    command = (
        f"ppo --actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} "
        f"--data.label_key label --data.max_samples 8 --train.agent_path {agent} --train.max_steps {STEPS} "
        "--rollout.engine transformers --rollout.batch_size 4 --rollout.n_samples_per_prompt 2 "
        "--rollout.max_new_tokens 8 --data.max_len 400 --train.force_on_policy --train.batch_size 2 "
        "--actor.num_gpus_per_node 1 --train.colocate_all --ds.param_dtype fp32 --algo.kl.init_coef 0 "
        f"--algo.advantage.estimator grpo --eval.dataset {task.prompts} --eval.max_samples 2 "
        f"--eval.n_samples_per_prompt 1 --ckpt.path {tmp_path / 'ckpt'} --ckpt.save_steps 1 "
    )
    openrlhf(f"{command} --ckpt.output_dir {tmp_path / 'policy'} --logger.run_dir {tmp_path / 'run'}")
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert list(metrics) == list(range(1, STEPS + 1))
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    for step, path in journal_steps(tmp_path / "run" / "rollouts").items():
        samples = read_journal(path)
        assert len(samples) == 8
        for t in samples:
            digits = sum(map(str.isdigit, tokenizer.decode(t.token_ids[t.action_mask])))
            assert (t.reward, t.extra_logs, t.truncated) == (digits / 8, {"digits": digits}, True)
        assert metrics[step]["rollout/reward_mean"] == pytest.approx(
            sum(t.reward or 0.0 for t in samples) / 8
        )
        assert metrics[step]["rollout/truncated_rate"] == 1
    only = f"--eval.eval_only --ckpt.load_enable --logger.run_dir {tmp_path / 'only'}"
    openrlhf(f"{command} {only} --ckpt.output_dir {tmp_path / 'nothing'}")
    ((at, evaluation),) = read_metrics(tmp_path / "only" / "metrics.jsonl").items()
    assert at == STEPS and evaluation["eval/num_samples"] == 2
    assert (
        not (tmp_path / "nothing" / "config.json").exists() and (tmp_path / "policy" / "config.json").exists()
    )
