"""NeMo Gym's protocol against a small server that speaks it, with the policy's answers by hand."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from episodes_of_examples import END, EXAMPLES, TOKENIZER, as_tokens, tokens, told, turns
from fake_engine import Engine, log_prob
from nemo_gym_server import NemoGym, row

from openrlhf.backends.distributed import free_port
from openrlhf.config.ppo import PPOConfig, RolloutConfig
from openrlhf.environments.nemo_gym import SESSION, NeMoGymExecutor, rows
from openrlhf.errors import UsageError
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.rollout.executors import AgentSetting, UserExecutor, check_agent_file
from openrlhf.types import Outcome, Prompt, Trajectory


def play(
    *answers, labels: list, processes: int = 1, max_len: int = 300, gym: Callable = NemoGym
) -> tuple[list[Trajectory], NemoGym, Engine]:
    """Plays an episode of each label, spread over executors that share the machine's port, as engines do."""

    async def run() -> tuple[list[Trajectory], NemoGym, Engine]:
        port = free_port()
        server = gym(f"http://127.0.0.1:{port}/v1")
        agents = {"simple_agent": await server.start()}
        engine = Engine(*map(as_tokens, answers))
        rollout = RolloutConfig(n_samples_per_prompt=1, max_new_tokens=20)
        sampling = replace(Sampling.for_training(PPOConfig(rollout=rollout)), max_len=max_len)
        executors = [NeMoGymExecutor(agents, port) for _ in range(processes)]
        users = [UserExecutor("agent.py", executor, AgentSetting()) for executor in executors]
        runners = [EpisodeRunner(engine, TOKENIZER, user, [2]) for user in users]
        groups = await asyncio.gather(
            *(
                runners[i % processes].run_group(Prompt(prompt_id=i, text="?", label=label), sampling)
                for i, label in enumerate(labels)
            )
        )
        return [t for group in groups for t in group.trajectories], server, engine

    return asyncio.run(run())


def add(stream: str) -> str:
    a, b = map(int, re.findall(r"\d+", stream)[:2])
    return str(a + b)


def test_prompt_and_answers_are_in_the_sample() -> None:
    """The sample has the tokens, the mask and the log-probs of requests and answers; NeMo Gym receives the
    same."""
    (t,), server, _ = play("9", "3", labels=[json.dumps(row(1))])
    assert t.outcome is Outcome.OK, t.error
    texts = [told("2 + 1 = ?"), f"9{END}", told("Wrong. Again!"), f"3{END}"]
    assert turns(t) == [(text, i % 2 == 1) for i, text in enumerate(texts)]
    assert t.token_ids.tolist() == [token for text in texts for token in tokens(text)]
    assert t.rollout_log_probs.tolist() == [log_prob(i) for _ in range(2) for i in range(2)]
    assert (t.reward, t.truncated, t.extra_logs) == (1, False, {"asked": 3})
    prompt, last = server.seen[-1]["prompt_token_ids"], server.seen[-1]["choices"][0]["token_ids"]
    assert [*prompt, *last] == t.token_ids.tolist()


def test_episodes_of_several_engines_find_their_own() -> None:
    """A request may reach any of the processes that share the port."""
    found, server, _ = play(add, labels=[row(i) for i in range(16)], processes=3)
    assert [t.reward for t in found] == [1] * 16, [t.error for t in found]
    for i, t in enumerate(found):
        question = row(i)["responses_create_params"]["input"][0]["content"]
        assert turns(t) == [(told(question), False), (add(question) + END, True)]
    assert server.sessions == 16


def test_a_row_keeps_its_own_metadata() -> None:
    own = row(1)
    own["responses_create_params"]["metadata"] = {"extra_body": json.dumps({"max_tokens": 1}), "a": "b"}
    (t,), _, engine = play("3", labels=[own])
    assert t.ok and [params.max_tokens for _, params in engine.asked] == [1]
    assert SESSION not in json.dumps(own)


def test_no_room_is_the_agents_to_handle() -> None:
    (t,), *_ = play("9", labels=[row(1)], max_len=24)  # the second question ends at token 29
    assert (t.outcome, t.reward, t.truncated) == (Outcome.OK, 0, True), t.error


class Forgetful(NemoGym):
    """Agent that leaves the row's metadata out."""

    async def responses(self, params: dict) -> tuple[int, dict]:
        return await super().responses({**params, "metadata": {}})


class Failing(NemoGym):
    async def run(self, request):
        raise KeyError("tool")


class Given(NemoGym):
    """Agent that says how its episode failed."""

    async def run(self, request):
        from aiohttp import web

        return web.json_response({"reward": 0.0, "_ng_failure_class": "agent_timeout"})


@pytest.mark.parametrize(
    ("gym", "label", "text"),
    [
        (Forgetful, row(1), "has no openrlhf_session"),
        (Failing, row(1), "answers 500"),
        (Given, row(1), "the agent's episode failed: agent_timeout"),
        (NemoGym, row(1) | {"agent_ref": {"name": "math"}}, "known: simple_agent"),
    ],
)
def test_failures(gym: type[NemoGym], label: dict, text: str) -> None:
    (t,), *_ = play("9", labels=[label], gym=gym)
    assert t.outcome is Outcome.ENV_ERROR and text in t.error, t.error


@pytest.mark.processes
def test_rows_of_nemo_gym_are_read() -> None:
    lines = [json.dumps(row(i)) + "\n" for i in range(2)]
    first, second = rows(lines)
    assert first["input"] == "1 + 1 = ?" and json.loads(second["label"]) == row(1)
    check_agent_file(str(EXAMPLES / "agent_nemo_gym.py"), "--train.agent_func_path")
    with pytest.raises(UsageError, match="line 2 "):
        list(rows([lines[0], '{"input": "1 + 1"}']))
