"""Rewards over HTTP, from real servers of this process that misbehave on demand."""

import asyncio
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from aiohttp import web
from fake_engine import Engine
from refusals import refused

from openrlhf.agents.base import AgentExecutorBase, Reward, RewardError
from openrlhf.config.sections import KEY_VARIABLE
from openrlhf.errors import ErrorCode
from openrlhf.rewards import remote as remote_reward
from openrlhf.rewards.remote import REMIND, RemoteReward
from openrlhf.rollout.episodes import EpisodeRunner, Sampling
from openrlhf.training.collect import check_failures
from openrlhf.types import Outcome, Prompt, Trajectory

pytestmark = pytest.mark.processes
Answer = Callable[[dict, int], Awaitable[web.Response]]
"""Function (request's content, request's number) -> response."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reward, "FIRST_PAUSE", 0.01)


def lengths(asked: dict) -> list[int]:
    return [len(query) for query in asked["query"]]


async def well(asked: dict, number: int) -> web.Response:
    """Returns the length of a text as its reward."""
    rewards = lengths(asked)
    return web.json_response({"rewards": rewards, "scores": rewards, "extra_logs": {}})


def says(body: object, status: int = 200, headers: dict | None = None) -> Answer:
    async def answer(asked: dict, number: int) -> web.Response:
        return web.Response(text=json.dumps(body), status=status, headers=headers)

    return answer


def first(times: int, then: Answer, before: Answer) -> Answer:
    async def answer(asked: dict, number: int) -> web.Response:
        return await (before if number < times else then)(asked, number)

    return answer


class Died(Exception):
    """Raised if the process of a server died before it answered."""


class DiedHalfway(Died):
    """Raised if the process of a server died while it answered."""


@dataclass
class Server:
    answer: Answer = well
    url: str = ""
    asked: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        self.headers.append(dict(request.headers))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self.answer(asked, len(self.asked) - 1)
        except Died as death:
            answer = web.StreamResponse(headers={"Content-Length": "100"})
            if isinstance(death, DiedHalfway):
                await answer.prepare(request)
                await answer.write(b"{")
            request.transport.close()
            return answer
        finally:
            self.under_way -= 1


@asynccontextmanager
async def serving(*servers: Server):
    runners = []
    for server in servers:
        app = web.Application()
        app.router.add_post("/get_reward", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/get_reward"
        runners.append(runner)
    yield
    for runner in runners:
        await runner.cleanup()


def ask(queries: list[str], *servers: Server, label: object = "", urls: tuple = (), **options) -> list:
    """Returns the rewards of texts that finish together, or the errors in their place."""

    async def run() -> list:
        async with serving(*servers):
            every = [server.url for server in servers]
            reward = RemoteReward([*urls, *every], **{"timeout": 5.0, **options})
            calls = [reward(query, query[:1], label) for query in queries]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            reward.close()
            await asyncio.sleep(0)
            return answers

    return asyncio.run(run())


def reward_of(value: float, **logs: float) -> Reward:
    return Reward(reward=value, score=value, extra_logs=logs)


def texts(count: int) -> list[str]:
    return ["x" * i for i in range(1, count + 1)]


def unused_url() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/get_reward"


def test_a_request_says_what_the_protocol_says() -> None:
    server = Server()
    assert ask(["<u>2+2<a>4"], server, label="4", key="secret") == [reward_of(10.0)]
    assert server.asked == [{"query": ["<u>2+2<a>4"], "prompts": ["<"], "labels": ["4"]}]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"rewards": [1]}, reward_of(1.0)),
        ({"rewards": [1.5], "scores": [0.5]}, Reward(reward=1.5, score=0.5)),
        ({"rewards": [1], "scores": None, "extra_logs": None}, reward_of(1.0)),
        (
            {"rewards": [1], "scores": [1], "extra_logs": {"dummy_scores": [3]}},
            reward_of(1.0, dummy_scores=3.0),
        ),
        ({"rewards": [1], "extra_logs": {"speed": 2}}, reward_of(1.0, speed=2.0)),
    ],
)
def test_answers_of_all_generations_are_understood(body: dict, expected: Reward) -> None:
    assert ask(["x"], Server(says(body))) == [expected]


def test_samples_that_finish_together_share_requests() -> None:
    server = Server()
    assert ask(texts(10), server, batch_size=4) == [reward_of(float(i)) for i in range(1, 11)]
    assert sorted(len(asked["query"]) for asked in server.asked) == [2, 4, 4]


def test_servers_take_turns() -> None:
    servers = Server(), Server(), Server()
    assert ask(texts(12), *servers, batch_size=1) == [reward_of(float(i)) for i in range(1, 13)]
    assert [len(server.asked) for server in servers] == [4, 4, 4]


def test_a_dead_server_costs_no_reward() -> None:
    server = Server()
    answers = ask(texts(20), server, urls=(unused_url(),), batch_size=2)
    assert answers == [reward_of(float(i)) for i in range(1, 21)]


async def stalls(asked: dict, number: int) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits that long")


def test_another_server_is_asked_after_one_has_stalled() -> None:
    stalled, healthy = Server(stalls), Server(well)
    started = time.monotonic()
    answers = ask(texts(4), stalled, healthy, batch_size=4, timeout=4.0)
    assert [a.reward for a in answers] == [1, 2, 3, 4]
    assert (len(stalled.asked), len(healthy.asked)) == (1, 1)
    assert 2 <= time.monotonic() - started < 4, "half the time for each of two servers"


def test_a_stalled_attempt_is_repeated_at_the_same_server() -> None:
    server = Server(first(1, well, before=stalls))
    (answer,) = ask(["x"], server, timeout=20.0, try_timeout=0.3)
    assert answer.reward == 1 and len(server.asked) == 2


@pytest.mark.parametrize("text", ["[" * 100_000, '{"rewards": [' + "9" * 10_000 + "]}"])
def test_an_answer_of_any_depth_is_an_error(text: str) -> None:
    async def odd(asked: dict, number: int) -> web.Response:
        return web.Response(text=text)

    (answer,) = ask(["x"], Server(odd))
    assert isinstance(answer, RewardError)


def test_an_answer_of_any_size_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(asked: dict, number: int) -> web.Response:
        return web.Response(text=json.dumps({"rewards": [1.0], "rest": "y" * 3_000_000}))

    monkeypatch.setattr(remote_reward, "ANSWER_BYTES", 1 << 20)
    (answer,) = ask(["x"], Server(large))
    assert isinstance(answer, RewardError) and "more than 1 MiB" in str(answer)


def test_no_more_requests_than_allowed_are_under_way() -> None:
    async def slowly(asked: dict, number: int) -> web.Response:
        await asyncio.sleep(0.02)
        return await well(asked, number)

    server = Server(slowly)
    assert ask(texts(12), server, batch_size=1, concurrency=3) == [reward_of(float(i)) for i in range(1, 13)]
    assert server.most_under_way == 3


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    server = Server(first(2, well, says("busy", status, {"Retry-After": "0"})))
    assert ask(["xyz"], server) == [reward_of(3.0)]
    assert len(server.asked) == 3


def test_a_connection_that_breaks_is_tried_again() -> None:
    async def die(asked: dict, number: int) -> web.Response:
        raise Died

    async def die_halfway(asked: dict, number: int) -> web.Response:
        raise DiedHalfway

    for before in (die, die_halfway):
        server = Server(first(1, well, before))
        assert ask(["xyz"], server) == [reward_of(3.0)]
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "HTTP 400: .*no good"),
        (401, rf"HTTP 401: .*no good.*\nSet {KEY_VARIABLE} to the server's key"),
        (404, r"HTTP 404: .*no good.*\nIs the path right\? serve_rm answers at /get_reward"),
        (413, "HTTP 413"),
        (422, "HTTP 422"),
        (307, "HTTP 307"),
    ],
)
def test_a_refusal_is_not_tried_again(status: int, text: str) -> None:
    server = Server(says("no good", status, {"Location": "http://elsewhere"}))
    (error,) = ask(["x"], server)
    assert isinstance(error, RewardError) and re.search(text, str(error)) and server.url in str(error)
    assert len(server.asked) == 1


def test_a_server_that_asks_for_a_pause_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(remote_reward.asyncio, "sleep", record)
    ask(["x"], Server(first(1, well, says("busy", 503, {"Retry-After": "7"}))))
    assert [pause for pause in pauses if 7.0 <= pause <= 7.01]


def test_the_longest_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reward, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(remote_reward.random, "uniform", lambda low, high: high)

    async def bounds(num_urls: int, tries: int) -> list:
        reward = RemoteReward(["http://a"] * num_urls, timeout=1)
        return [reward._pause(i) for i in range(1, tries + 1)]

    growing = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert asyncio.run(bounds(1, 8)) == growing
    assert asyncio.run(bounds(3, 6)) == [0.0, 0.0, 0.5, 0.0, 0.0, 1.0]  # the others come first


@pytest.mark.parametrize("what", ["dead", "failing", "hanging", "failing, then hanging"])
def test_time_is_limited_for_all_tries_together(what: str) -> None:
    async def hang(asked: dict, number: int) -> web.Response:
        await asyncio.sleep(60)
        return await well(asked, number)

    if what == "dead":
        (error,) = ask(["x"], urls=(unused_url(),), timeout=1.5)
        reason = "Connect call failed"
    else:
        crashes = says("crashed", 500)
        answers = {"failing": crashes, "hanging": hang, "failing, then hanging": first(1, hang, crashes)}
        server = Server(answers[what])
        (error,) = ask(["x"], server, timeout=1.5)
        reason = 'HTTP 500: "crashed"' if "failing" in what else "no answer"
        assert "no answer" in str(error) or what == "failing"
        assert (len(server.asked) == 1) == (what == "hanging")
    assert isinstance(error, RewardError)
    assert "--reward.remote_timeout 1.5 s: http://127.0.0.1:" in str(error)
    assert reason in str(error)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        # tests/unit/rewards/test_reward_values.py has all that no reward is
        ({"rewards": []}, "0 rewards for 1 samples"),
        ({"rewards": [float("nan")]}, r"rewards that are not finite: \[nan\]"),
        ("sorry", "1 rewards|that are not numbers"),
    ],
)
def test_an_answer_that_is_no_reward_is_an_error(body: object, text: str) -> None:
    server = Server(says(body))
    (error,) = ask(["x"], server)
    assert isinstance(error, RewardError) and re.search(text, str(error)) and server.url in str(error)
    assert len(server.asked) == 1


@pytest.mark.parametrize("body", [{"rewards": 5.0}, {"rewards": [5.0]}, [5.0], {"rewards": [1, 2, 3]}])
def test_values_of_another_number_than_the_texts_fail_the_request(body: object) -> None:
    """A server that answers one value for several texts would answer each half, and be believed at last."""
    server = Server(says(body))
    errors = ask(["x", "y", "z", "w"], server)
    assert all(isinstance(error, RewardError) and "for 4 samples" in str(error) for error in errors)
    assert len(errors) == 4 and len(server.asked) == 1


def test_an_answer_that_is_no_json_is_an_error() -> None:
    async def page(asked: dict, number: int) -> web.Response:
        return web.Response(text="<html>")

    (error,) = ask(["x"], Server(page))
    assert isinstance(error, RewardError) and "JSON: b'<html>'" in str(error)


@pytest.mark.parametrize("fate", ["not a number", "refused", "crashes the server", "unpronounceable"])
def test_one_bad_sample_fails_alone(fate: str) -> None:
    async def answer(asked: dict, number: int) -> web.Response:
        bad = "xxx" in asked["query"]
        if bad and fate == "refused":
            return web.Response(status=422)
        if bad and fate == "crashes the server":
            return web.Response(status=500)
        rewards = [float("nan") if n == 3 and fate == "not a number" else n for n in lengths(asked)]
        return web.json_response({"rewards": rewards})

    async def run() -> list:
        server = Server(answer)
        async with serving(server):
            reward = RemoteReward([server.url], timeout=0.5)
            bad_label = object() if fate == "unpronounceable" else "3"
            calls = [reward(text, "", bad_label if len(text) == 3 else "1") for text in texts(8)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            reward.close()
            await asyncio.sleep(0)
            return answers

    answers = asyncio.run(run())
    assert isinstance(answers.pop(2), RewardError)
    assert answers == [reward_of(float(i)) for i in (1, 2, 4, 5, 6, 7, 8)]


def test_every_failed_sample_has_an_error_of_its_own() -> None:
    """The agent attaches an episode to its error, so that samples must not share one."""
    errors = ask(texts(4), Server(says("no", 401)))
    assert len({id(error) for error in errors}) == 4
    assert len({str(error) for error in errors}) == 1


def test_closing_frees_those_who_wait() -> None:
    async def hang(asked: dict, number: int) -> web.Response:
        await asyncio.sleep(60)
        return await well(asked, number)

    async def run() -> list:
        server = Server(hang)
        async with serving(server):
            reward = RemoteReward([server.url], timeout=60)
            calls = [asyncio.ensure_future(reward(text, "", "")) for text in texts(3)]
            while not server.asked:
                await asyncio.sleep(0.01)
            calls.append(asyncio.ensure_future(reward("late", "", "")))
            await asyncio.sleep(0)
            reward.close()
            return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(answer) for answer in asyncio.run(run())] == [asyncio.CancelledError] * 4


class Talking(AgentExecutorBase):
    """Agent that says its label, and asks for the reward of that."""

    def __init__(self, reward: RemoteReward) -> None:
        self.reward = reward

    async def execute(
        self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None
    ):
        await llm_engine.generate([1], sampling_params)
        reward = await self.reward(label, prompt, label)
        return {"reward": reward.reward, "scores": reward.score}


def run_episodes(
    *servers: Server, urls: tuple = (), timeout: float = 5.0, called: Callable[[str], str] = str
) -> list[Trajectory]:
    """Plays eight samples, whose texts have 1 to 8 characters. `called`: the flag's form of a URL."""
    sampling = Sampling(
        purpose="train",
        num_samples=1,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=None,
        max_len=8,
        run_seed=0,
        stop=(),
    )

    async def run() -> list[Trajectory]:
        async with serving(*servers):
            reward = RemoteReward([*urls, *(called(server.url) for server in servers)], timeout=timeout)
            runner = EpisodeRunner(Engine([2]), None, Talking(reward), [])
            prompts = [Prompt(prompt_id=i, text="?", label="x" * i) for i in range(1, 9)]
            groups = await asyncio.gather(*(runner.run_group(prompt, sampling) for prompt in prompts))
            reward.close()
            await asyncio.sleep(0)
            return [trajectory for group in groups for trajectory in group.trajectories]

    return asyncio.run(run())


def test_a_failed_reward_is_an_outcome_and_never_a_number() -> None:
    async def answer(asked: dict, number: int) -> web.Response:
        return web.json_response({"rewards": [float("nan") if n % 2 else n for n in lengths(asked)]})

    trajectories = run_episodes(Server(answer))
    assert Counter(t.outcome for t in trajectories) == {Outcome.OK: 4, Outcome.REWARD_ERROR: 4}
    assert [t.reward for t in trajectories] == [None, 2.0, None, 4.0, None, 6.0, None, 8.0]
    failed = [t for t in trajectories if not t.ok]
    assert all("not finite" in t.error and t.token_ids.tolist() == [1, 2] and t.score is None for t in failed)


def test_a_dead_server_ends_the_run_with_its_name() -> None:
    """A run calls `check_failures` with the samples of each step."""
    url = unused_url()
    trajectories = run_episodes(urls=(url,), timeout=0.2)
    limit = {"flag": "--reward.max_failed_ratio", "value": "0.9"}
    with refused(ErrorCode.REWARDS_FAILED, **limit) as error:
        check_failures(trajectories, 0.9, step=5)
    first_line, second_line = error.value.text.splitlines()
    assert "8 of 8" in first_line
    assert "--reward.remote_timeout 0.2 s" in second_line and url in second_line


def test_the_first_problem_is_told_and_then_one_a_minute(monkeypatch, caplog):
    reward = RemoteReward(["http://a"], timeout=5.0)
    for now, told in ((0.0, 1), (REMIND - 1, 1), (REMIND, 2), (2 * REMIND - 1, 2)):
        monkeypatch.setattr(remote_reward, "time", SimpleNamespace(monotonic=lambda now=now: now))
        reward._warn("http://a: refused")
        assert len(caplog.messages) == told
    assert caplog.messages[0] == "http://a: refused; retrying for up to 5 s"


@pytest.mark.parametrize("status", [400, 503])
def test_what_a_url_holds_is_in_no_record_and_no_log(status: int, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(says("no", status))
    secret = lambda url: url.replace("//", "//user:MARKER1@") + "?token=MARKER2&model=judge"
    trajectory, *_ = run_episodes(server, called=secret, timeout=0.3)
    assert trajectory.outcome is Outcome.REWARD_ERROR
    assert f"HTTP {status}" in trajectory.error and "model=judge" in trajectory.error
    assert "MARKER" not in trajectory.error + caplog.text and (status == 400 or "<redacted>" in caplog.text)
