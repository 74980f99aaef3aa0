"""The reward server as users start it, under floods, broken requests, strangers, signals, and a death now and
then."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from processes import port_for_later
from refusals import printed, refused
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.agents.base import Reward
from openrlhf.config.sections import KEY_VARIABLE
from openrlhf.errors import ErrorCode
from openrlhf.models.scorer import load_scorer
from openrlhf.rewards import remote as remote_reward
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rows import PackedRow, Sample
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.serve.server import bind

KEY = "a-key-of-the-tests"
MEAN, STD = 0.25, 0.5
SECRET = "the user said something private"


@dataclass
class Server:
    process: subprocess.Popen
    url: str
    log: Path
    starting: str
    """Log of the server before it served."""

    def request(self, body: bytes | None, path: str = "", **headers: str) -> tuple[int, dict, dict]:
        """Sends a POST request, or a GET request without a body; returns (status, answer, headers)."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        method = "GET" if body is None else "POST"
        connection.request(method, path or parts.path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), dict(answer.headers)

    def ask(self, queries: Sequence[object], key: str = KEY, **more: object) -> tuple[int, dict, dict]:
        body = json.dumps({"query": queries} | more).encode()
        return self.request(body, Authorization=f"Bearer {key}")

    def health(self) -> dict:
        return self.request(None, "/health")[1]


def start(model: Path, log: Path, *flags: str, port: int = 0, key: str = KEY) -> Server:
    program = Path(sys.executable).with_name("openrlhf")
    command = [program, "serve_rm", "--reward.model_name_or_path", model, "--port", str(port), *flags]
    command += ["--data.max_len", "512", "--ds.param_dtype", "fp32"]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | {KEY_VARIABLE: key},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("rewards at http://"), log.read_text()
    return Server(process=process, url=line.split()[-1], log=log, starting=log.read_text())


@contextmanager
def running(model: Path, log: Path, *flags: str, **options) -> Iterator[Server]:
    server = start(model, log, *flags, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_model(tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model that takes seconds for a flood, so that requests reach the server while it scores."""
    return reward_model(tmp_path_factory.mktemp("slow"), hidden_size=192, num_layers=6)


def reward_model(folder: Path, **shape: int) -> Path:
    """Writes a random reward model with statistics."""
    base = tiny_chat_model(folder / "base", **shape)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.config.mean, model.config.std = MEAN, STD
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(base).save_pretrained(folder / "model")
    return folder / "model"


def comes_to(server: Server, **state: int) -> bool:
    for _ in range(1000):
        if server.health().items() >= state.items():
            return True
        time.sleep(0.005)
    return False


def wait_for(server: Server, **state: int) -> None:
    if not comes_to(server, **state):
        pytest.fail(f"the server never was at {state}: {server.health()}")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ("--max_queue", "300", "--max_texts", "300", "--max_text_chars", "5000", "--max_body_mb", "2")
    log = tmp_path_factory.mktemp("log") / "stderr"
    with running(model, log, "--reward.normalize_enable", *limits) as server:
        yield server


def expected_rewards(model: Path, texts: Sequence[str]) -> list[float]:
    """Returns (score - mean) / std of each text with its end, alone in its row."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer = load_scorer(str(model), flag="--model", dtype="fp32", attention="auto", trained=True).eval()
    rewards = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor(ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id])
        if len(ids) > 512:
            ids = torch.cat([ids[:511], ids[-1:]])
        sample = Sample(token_ids=ids, action_mask=torch.arange(len(ids)) == len(ids) - 1)
        with torch.no_grad():
            rewards.append((scorer(PackedRow.of([sample])).item() - MEAN) / STD)
    return rewards


def test_scores_are_those_of_the_model(server: Server, model: Path) -> None:
    prompt = "<|user|>Tom has 3 apples.<|end|><|assistant|>"
    texts = [prompt + "He has 3.<|end|>", prompt + "He has 4.", prompt + "I do not know.\n", "7" * 900]
    prompts = [prompt, prompt, prompt, ""]
    expected = expected_rewards(model, [text.rstrip("\n") for text in texts])
    status, answer, _ = server.ask(texts, prompts=prompts, labels=["", "4", 3, None])
    assert status == 200
    assert answer["rewards"] == answer["scores"] == pytest.approx(expected, abs=1e-5)
    assert answer["extra_logs"] == {"cut_by_reward_model": [0.0, 0.0, 0.0, 1.0]}
    assert len({round(reward, 4) for reward in expected}) == 4
    # the request may leave prompts out
    assert server.ask(texts)[1]["rewards"] == pytest.approx(expected, abs=1e-5)


def test_requests_at_the_same_time_get_their_own_scores(server: Server, model: Path) -> None:
    texts = [f"<|user|>How many are {i} and {i % 7}?<|end|>" for i in range(48)]
    expected = expected_rewards(model, texts)
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: server.ask(texts[i : i + 3])[1], range(0, 48, 3)))
    got = [reward for answer in answers for reward in answer["rewards"]]
    assert got == pytest.approx(expected, abs=1e-5)


def test_a_full_queue_turns_requests_away(slow_model: Path, tmp_path: Path) -> None:
    """One request is worked on and one fills the queue; the next is told when to come back, and loses
    nothing."""
    flood = ["1" * 400] * 300
    with (
        running(slow_model, tmp_path / "stderr", "--max_queue", "300", "--max_texts", "300") as server,
        ThreadPoolExecutor(3) as threads,
    ):
        early = [threads.submit(server.ask, flood)]
        wait_for(server, scoring=300)
        early.append(threads.submit(server.ask, flood))
        wait_for(server, waiting=300)
        status, answer, headers = server.ask(["late"])
        assert (status, headers["retry-after"]) == (503, "1")
        assert answer == {"error": "the queue is full (--max_queue 300)"}
        assert [len(request.result()[1]["rewards"]) for request in early] == [300, 300]
        assert server.ask(["later"])[0] == 200


@pytest.mark.parametrize("key", ["", "wrong", KEY + "x", KEY[:-1], "schlüssel"])
def test_strangers_are_refused(server: Server, key: str) -> None:
    body = json.dumps({"query": [SECRET] * 300}).encode()
    status, answer, headers = server.request(body, Authorization=f"Bearer {key}")
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert answer == {"error": "the key is missing or wrong"}
    assert server.request(body)[0] == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(server: Server, chunked: bool) -> None:
    body = json.dumps({"query": ["1" * 4000] * 700}).encode()
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    pieces = (body[i : i + 50_000] for i in range(0, len(body), 50_000))
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", parts.path, pieces if chunked else body, headers, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read()) == {"error": "the body is larger than --max_body_mb 2"}


@pytest.mark.parametrize(
    ("queries", "more", "status", "reason"),
    [
        (["x"] * 301, {}, 413, "query has 301 texts; --max_texts is 300"),
        (["x", "y" * 5001], {}, 422, "query.1 has 5001 characters; --max_text_chars is 5000"),
        ([], {}, 422, "query is empty"),
        (["x", ""], {}, 422, "query.1 is an empty text"),
        (["x", 7], {}, 422, "query.1: Input should be a valid string"),
        (["x"], {"prompts": ["a", "b"]}, 422, "prompts has 2 items, query has 1"),
        (
            ["2+2?4", "4"],
            {"prompts": ["2+2?", "2+2?"]},
            422,
            "prompts.1 does not occur in query.1: a query is the prompt and its response in one text; "
            "send both together, or leave prompts out",
        ),
        (["x"], {"labels": []}, 422, "labels has 0 items, query has 1"),
    ],
)
def test_a_request_that_cannot_be_answered_is_told_why(server, queries, more, status, reason):
    assert server.ask(queries, **more)[:2] == (status, {"error": reason})


@pytest.mark.parametrize(
    "body", [b"", b'{"query": ["' + SECRET.encode(), b"\xff\xfe", b"[1, 2]", b'{"queries": ["x"]}']
)
def test_a_broken_body_is_refused_without_being_repeated(server: Server, body: bytes) -> None:
    status, answer, _ = server.request(body, Authorization=f"Bearer {KEY}")
    assert status == 422 and SECRET not in answer["error"]
    assert server.health()["ok"]


def test_no_text_reaches_a_log(server: Server) -> None:
    assert server.ask([SECRET])[0] == 200
    assert server.ask([SECRET, 3])[0] == 422
    assert server.request(SECRET.encode())[0] == 401
    assert server.log.read_text() == server.starting


def stderr_of(*flags: str, **environment: str) -> str:
    command = [sys.executable, "-m", "openrlhf.cli.serve_rm", *flags]
    environ = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE} | environment
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_a_server_without_a_key_listens_to_this_machine_only(model: Path) -> None:
    flags = ("--reward.model_name_or_path", str(model), "--host", "0.0.0.0")
    for more, place in (((), "--host 0.0.0.0"), (("--api_key", "True"), "--api_key")):
        refusal = printed(stderr_of(*flags, *more))[0]
        assert refusal.place == place and KEY_VARIABLE in refusal.text


def test_a_port_in_use_is_told(server: Server) -> None:
    port = urlsplit(server.url).port or 0
    with refused(ErrorCode.CLUSTER, flag="--port", value=port):
        bind("127.0.0.1", port)


def test_sigterm_answers_what_came_before(slow_model: Path, tmp_path: Path) -> None:
    flood = ["1" * 400] * 100
    with running(slow_model, tmp_path / "stderr") as server, ThreadPoolExecutor(3) as threads:
        for _ in range(5):  # a busy machine may see no state in between
            early = [threads.submit(server.ask, flood) for _ in range(3)]
            if comes_to(server, scoring=100, waiting=200):
                break
        server.process.send_signal(signal.SIGTERM)
        statuses = [(request.result()[0], len(request.result()[1]["rewards"])) for request in early]
        assert statuses == [(200, 100)] * 3
        assert server.process.wait(timeout=30) == 0
        with pytest.raises(ConnectionRefusedError):
            server.health()
        assert server.log.read_text() == server.starting


@pytest.mark.parametrize("deaths", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_deaths_cost_no_answer(model, tmp_path, monkeypatch, deaths):
    """The process is killed by `kill -9` in the middle of the work, again and again; every reward comes, and
    is right."""
    monkeypatch.setattr(remote_reward, "LONGEST_PAUSE", 0.5)
    texts = [f"<|user|>{i} and {i}?<|end|>" for i in range((deaths + 1) * 100)]
    expected = expected_rewards(model, texts)
    expected = [reward * STD + MEAN for reward in expected]
    port, log = port_for_later(), tmp_path / "stderr"
    asked = 100
    hits: list[bool] = []  # whether a death came before all answers

    async def run() -> list[Reward]:
        server = await asyncio.to_thread(start, model, log, port=port)
        reward = RemoteReward([server.url], timeout=300, batch_size=5, key=KEY)
        rewards: list[Reward] = []
        try:
            for i in range(deaths + 1):
                batch = texts[i * asked : (i + 1) * asked]
                calls = [asyncio.ensure_future(reward(text, "", "")) for text in batch]
                if i < deaths:
                    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
                    hits.append(not all(call.done() for call in calls))
                    server.process.kill()
                    await asyncio.to_thread(server.process.wait)
                    server = await asyncio.to_thread(start, model, log, port=port)
                rewards += await asyncio.gather(*calls)
        finally:
            server.process.kill()
            await asyncio.to_thread(server.process.wait)
            reward.close()
            await asyncio.sleep(0)
        return rewards

    rewards = asyncio.run(run())
    assert len(hits) == deaths and any(hits)
    assert [reward.reward for reward in rewards] == pytest.approx(expected, abs=1e-5)
    assert {name for reward in rewards for name in reward.extra_logs} == {"cut_by_reward_model"}
