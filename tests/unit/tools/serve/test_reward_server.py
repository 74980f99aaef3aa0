"""Parts of the reward server; tests/e2e/test_serve_rm.py runs it as a process."""

import asyncio
import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from fastapi.testclient import TestClient
from refusals import printed, refused
from torch import Tensor

from openrlhf.config.commands import SERVE_RM
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.sections import KEY_VARIABLE
from openrlhf.config.serve_rm import ServeRMConfig
from openrlhf.data.encode import Text
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.models.scorer import ScoreModel, load_scorer
from openrlhf.rows import PackedRow
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tools.serve import serve_rm, server
from openrlhf.tools.serve.scoring import ROUND, QueueFull, Scored, ScoreQueue, TextScorer
from openrlhf.tools.serve.serve_rm import check, load
from openrlhf.tools.serve.serve_rm import run as serve
from openrlhf.tools.serve.server import build_app, occurs, prepare_text, read_question

TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def config_of(*flags: str) -> ServeRMConfig:
    return parse(SERVE_RM, ["--reward.model_name_or_path", "org/rm", *flags]).config


@pytest.mark.parametrize(
    ("flag", "value", "code", "place"),
    [
        ("--reward.model_name_or_path", "None", "missing-flag", "--reward.model_name_or_path"),
        ("--reward.model_name_or_path", "./nothing", "not-found", "--reward.model_name_or_path ./nothing"),
        ("--host", "0.0.0.0", "conflict", "--host 0.0.0.0"),
        ("--host", "::", "conflict", "--host ::"),
        ("--host", "rm0.example.org", "conflict", "--host rm0.example.org"),
        ("--api_key", "True", "missing-flag", "--api_key"),
        ("--api_key", "***", "invalid-value", "--api_key"),
        ("--port", "65536", "invalid-value", "--port 65536"),
        ("--max_queue", "10", "conflict", "--max_texts 4096 (default)"),
        ("--ds.attn_implementation", "paged", "invalid-value", "--ds.attn_implementation paged"),
    ],
)
def test_wrong_flags_are_refused(
    flag: str, value: str, code: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        config_of(flag, value)
    assert stop.value.code == 2
    assert [error[:2] for error in printed(capsys.readouterr().err)] == [(code, place)]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert config_of("--host", host).key is None


def test_where_a_key_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of("--host", "0.0.0.0", "--api_key", "abc").key == "abc"
    monkeypatch.setenv(KEY_VARIABLE, "def")
    assert config_of("--host", "0.0.0.0").key == "def"
    assert config_of("--api_key", "True").key == config_of("--api_key", "true").key == "def"
    assert config_of("--api_key", "abc").key == "abc"


def test_a_key_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("--api_key", "abc123")
    assert "abc123" not in to_yaml(config)
    with pytest.raises(SystemExit):
        config_of("--api_key", "abc123", "--help")
    with pytest.raises(SystemExit):
        config_of("--api_key", "abc123", "abc123")
    printed = capsys.readouterr()
    assert re.search(r"--api_key TEXT \| None \(now: \*\*\*\)", printed.out)
    assert "abc123" not in printed.out


@pytest.mark.parametrize(
    ("query", "prompt", "expected"),
    [
        ("a: b", "", Text(text="a: b")),
        ("a: b", "a: ", Text(text="a: b", spans=((3, 4),))),
        ("a: b\n\n", "a: ", Text(text="a: b", spans=((3, 4),))),
        ("a: b", "elsewhere", Text(text="a: b")),
        ("a: ", "a: ", Text(text="a: ")),
        ("\n", "", Text(text="\n")),
    ],
)
def test_what_the_model_reads_of_a_query(query: str, prompt: str, expected: Text) -> None:
    assert prepare_text(query, prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "query", "answer"),
    [
        ("2 + 2?", "2 + 2? 4", True),
        ("2 + 2?\n", "<|user|>2 + 2?<|end|><|assistant|>4", True),  # the text before its template
        ("<s>[INST] hi", "<s> [INST] hi [/INST] you", True),  # some decoders write it in this form
        ("", "4", True),
        ("2 + 2?", "4", False),
        ("2 + 2?", "3 + 2? 4", False),
        ("2 + 2? 4", "2 + 2?", False),
    ],
)
def test_a_prompt_is_part_of_its_query(prompt: str, query: str, answer: bool) -> None:
    assert occurs(prompt, query) is answer


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_request_becomes_texts(is_chat: bool) -> None:
    config = config_of("--data.apply_chat_template", str(is_chat))
    body = b'{"query": ["a: b", "a: cd"], "prompts": ["a: ", "a: c"], "labels": ["x", null]}'
    texts = [Text(text="a: b", spans=((3, 4),), is_chat=is_chat)]
    texts += [Text(text="a: cd", spans=((4, 5),), is_chat=is_chat)]
    assert read_question(body, config) == texts
    alone = [replace(text, spans=()) for text in texts]
    assert read_question(b'{"query": ["a: b", "a: cd"]}', config) == alone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ScoreModel:
    folder = tiny_chat_model(tmp_path_factory.mktemp("lm"))
    torch.manual_seed(0)
    return load_scorer(str(folder), flag="--model", dtype="fp32", attention="auto").eval()


class Watched(ScoreModel):
    """Model that keeps the lengths of its rows, and refuses rows with more than `most` tokens."""

    def __init__(self, model: ScoreModel, most: int = 10**9) -> None:
        super().__init__(model.model)
        self.most, self.rows = most, []

    def forward(self, row: PackedRow) -> Tensor:
        self.rows.append(row.lengths)
        if sum(row.lengths) > self.most:
            raise RuntimeError("out of memory")
        return super().forward(row)


TEXTS = [Text(text="1" * n) for n in (30, 2, 9, 14, 1, 22, 5)]
"""Texts with one token for each character, and one for the end."""


@pytest.mark.parametrize(
    ("max_tokens", "batch_size", "most_tokens", "most_texts"),
    [(1000, None, 90, 7), (32, None, 32, 7), (1000, 2, 90, 2), (5, None, 31, 7)],
)
def test_scores_do_not_depend_on_rows(
    model: ScoreModel, max_tokens: int, batch_size: int | None, most_tokens: int, most_texts: int
) -> None:
    alone = [TextScorer(model, TOKENIZER, max_len=64, max_tokens=1000)([text])[0] for text in TEXTS]
    watched = Watched(model)
    scorer = TextScorer(watched, TOKENIZER, max_len=64, max_tokens=max_tokens, batch_size=batch_size)
    results = scorer(TEXTS)
    # Rows change the order of additions: H products err by up to H 2^-24 |hidden| |head|, in head and layers.
    hidden_size = model.model.config.hidden_size
    atol = 3 * hidden_size * 2**-24 * hidden_size**0.5 * model.model.score.weight.norm().item()
    assert [r.score for r in results] == pytest.approx([r.score for r in alone], abs=atol)
    assert max(r.score for r in alone) - min(r.score for r in alone) > 100 * atol
    assert max(sum(row) for row in watched.rows) <= most_tokens
    assert max(len(row) for row in watched.rows) <= most_texts
    assert sum(len(row) for row in watched.rows) == len(TEXTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_served_in_the_type_of_its_files(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_scorer(str(tiny_chat_model(tmp_path)), flag="--x", dtype="fp32", attention="auto")
    model.model.to(dtype).save_pretrained(tmp_path)
    config = parse(SERVE_RM, ["--reward.model_name_or_path", str(tmp_path)]).config
    check(replace(config, data=replace(config.data, max_len=64)))
    assert load(config).model.model.dtype == dtype
    flash = replace(config, ds=replace(config.ds, attn_implementation="flash_attention_2"))
    if dtype == torch.float32:
        with refused(ErrorCode.CONFLICT, flag="--ds.attn_implementation", value="flash_attention_2"):
            check(replace(flash, data=replace(config.data, max_len=64)))


def test_scores_are_normalized(model: ScoreModel) -> None:
    plain = TextScorer(model, TOKENIZER, max_len=64, max_tokens=1000)(TEXTS)
    normalized = TextScorer(model, TOKENIZER, max_len=64, max_tokens=1000, mean=3.0, std=2.0)(TEXTS)
    assert [r.score for r in normalized] == pytest.approx([(r.score - 3) / 2 for r in plain])


def test_a_long_text_is_cut_before_its_end(model: ScoreModel) -> None:
    scorer = TextScorer(model, TOKENIZER, max_len=10, max_tokens=1000)
    long, short, fits = scorer([Text(text="1" * 30), Text(text="1" * 9), Text(text="1" * 8)])
    assert (long.is_cut, short.is_cut, fits.is_cut) == (True, False, False)
    assert long.score == pytest.approx(short.score) and long.score != pytest.approx(fits.score)


def test_a_row_that_fails_fails_alone(model: ScoreModel, caplog: pytest.LogCaptureFixture) -> None:
    scorer = TextScorer(Watched(model, most=20), TOKENIZER, max_len=64, max_tokens=20)
    results = scorer(TEXTS)
    assert [isinstance(result, RuntimeError) for result in results] == [True, *[False] * 4, True, False]
    assert caplog.text.count("RuntimeError: out of memory") == 2


def test_a_text_with_a_token_without_an_embedding_fails_alone(model: ScoreModel) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"], special_tokens=True)
    watched = Watched(model)
    first, new, last = TextScorer(watched, tokenizer, max_len=64, max_tokens=1000)(
        [Text(text="11"), Text(text="1<new>"), Text(text="111")]
    )
    assert isinstance(first, Scored) and isinstance(last, Scored) and sum(map(len, watched.rows)) == 2
    assert isinstance(new, UsageError) and "'<new>'" in str(new)


class Slow:
    """Model that scores the length of a text once it is permitted to; `calls` has the number of texts of each
    call."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.started, self.allowed = threading.Semaphore(0), threading.Event()

    def __call__(self, texts):
        self.calls.append(len(texts))
        self.started.release()
        assert self.allowed.wait(10)
        fates = {"nan": float("nan"), "bad": RuntimeError("no")}
        return [self._result(fates.get(text.text, float(len(text.text)))) for text in texts]

    @staticmethod
    def _result(fate):
        return fate if isinstance(fate, Exception) else Scored(score=fate, is_cut=False)


def submit(queue: ScoreQueue, *texts: str) -> Future:
    return queue.submit([Text(text=text) for text in texts])


def test_requests_that_wait_are_scored_together() -> None:
    score = Slow()
    queue = ScoreQueue(score, max_waiting=1000)
    requests = [submit(queue, "a")]
    assert score.started.acquire(timeout=10)
    requests += [submit(queue, "bb", "ccc"), submit(queue, *["d"] * (ROUND - 2)), submit(queue, "eeee")]
    assert (queue.num_waiting, queue.num_scoring) == (ROUND + 1, 1)
    score.allowed.set()
    assert [result.score for result in requests[1].result(10)] == [2.0, 3.0]
    assert [result.score for result in requests[3].result(10)] == [4.0]
    assert score.calls == [1, ROUND, 1]
    queue.close()
    assert not queue.is_working and queue.num_waiting == 0


def test_a_full_queue_takes_no_more() -> None:
    score = Slow()
    queue = ScoreQueue(score, max_waiting=3)
    first = submit(queue, "a")
    assert score.started.acquire(timeout=10)
    second = submit(queue, "b", "c")
    with pytest.raises(QueueFull):
        submit(queue, "d", "e")
    third = submit(queue, "f")
    score.allowed.set()
    assert [len(request.result(10)) for request in (first, second, third)] == [1, 2, 1]
    queue.close()


def test_a_cancelled_request_is_not_scored() -> None:
    score = Slow()
    queue = ScoreQueue(score, max_waiting=10)
    submit(queue, "a")
    assert score.started.acquire(timeout=10)
    assert submit(queue, "b", "c").cancel()
    last = submit(queue, "d")
    score.allowed.set()
    last.result(10)
    assert score.calls == [1, 1]
    queue.close()


def test_one_bad_request_fails_alone() -> None:
    score = Slow()
    queue = ScoreQueue(score, max_waiting=10)
    submit(queue, "a")
    assert score.started.acquire(timeout=10)
    fine, nan, bad = submit(queue, "b"), submit(queue, "c", "nan"), submit(queue, "bad")
    score.allowed.set()
    assert [result.score for result in fine.result(10)] == [1.0]
    with pytest.raises(RuntimeError, match=r"text 1 .*nan$"):
        nan.result(10)
    with pytest.raises(RuntimeError, match=r"^text 0 .*RuntimeError$"):
        bad.result(10)
    assert submit(queue, "later").result(10)[0].score == 5.0
    queue.close()


def test_an_error_outside_the_model_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    def fail(texts):
        raise KeyError("private")

    queue = ScoreQueue(fail, max_waiting=10)
    with pytest.raises(RuntimeError, match="KeyError"):
        submit(queue, "a").result(10)
    assert queue.is_working and "private" not in caplog.text
    queue.close()


def test_a_model_without_statistics_is_told(tmp_path: Path) -> None:
    from openrlhf.tools.serve.serve_rm import check

    folder = str(tiny_chat_model(tmp_path / "lm"))
    flags = ("--reward.model_name_or_path", folder)
    check(config_of(*flags, "--data.max_len", "512"))
    with refused(ErrorCode.INVALID_MODEL, flag="--reward.normalize_enable"):
        check(config_of(*flags, "--reward.normalize_enable"))
    with refused(ErrorCode.TOO_LONG, flag="--data.max_len", value="2048 (default)") as told:
        check(config_of(*flags))
    assert "--data.max_len 512" in told.value.text


def test_the_command_serves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens before it loads the model, and answers requests with the model's scores."""
    folder = str(tiny_chat_model(tmp_path))
    made = load_scorer(folder, flag="--x", dtype="fp32", attention="auto")
    made.model.save_pretrained(tmp_path)
    words = ("--data.max_len", "512", "--port", "0", "--max_queue", "4096", "--drain_seconds", "7")
    config = config_of("--reward.model_name_or_path", folder, "--ds.param_dtype", "fp32", *words)
    found = []

    def ask(app: Any, bound: socket.socket, seconds: float) -> None:
        client = TestClient(app, base_url=f"http://localhost:{bound.getsockname()[1]}")
        found.append((client.get("/health"), client.post("/get_reward", json={"query": ["four"]}), seconds))

    monkeypatch.setattr(serve_rm, "serve", ask)
    serve(config)
    ((health, answer, seconds),) = found
    assert health.json() == {"ok": True, "waiting": 0, "scoring": 0, "scored": 0}
    assert health.status_code == 200 and answer.status_code == 200 and seconds == 7
    score = TextScorer(made.eval(), TOKENIZER, max_len=512, max_tokens=1000)
    assert answer.json()["rewards"] == [pytest.approx(score([Text(text="four")])[0].score, abs=1e-6)]


def test_a_body_that_does_not_arrive_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_SECONDS", 0.05)
    app = build_app(SimpleNamespace(), config_of())
    scope = {
        "type": "http", "method": "POST", "path": "/get_reward", "raw_path": b"/get_reward",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "http_version": "1.1", "scheme": "http",
        "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "root_path": "",
    }  # fmt: skip
    sent: list[dict] = []

    async def receive() -> dict:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits that long")

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Iterator[int]:
    """Serves as `serve_rm` does, in a thread; yields the port. The score of a text is its length."""
    made: list[uvicorn.Server] = []
    score = lambda texts: [Scored(score=float(len(text.text)), is_cut=False) for text in texts]
    monkeypatch.setattr(server.signal, "signal", lambda number, handler: None)  # only in the main thread
    monkeypatch.setattr(
        uvicorn, "Server", lambda config, own=uvicorn.Server: made.append(own(config)) or made[0]
    )
    app, bound = build_app(ScoreQueue(score, max_waiting=9), config_of(*flags)), server.bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve, args=(app, bound, 1.0))
    thread.start()
    while not (made and made[0].started):
        time.sleep(0.01)
    yield bound.getsockname()[1]
    made[0].should_exit = True
    thread.join(30)
    assert not thread.is_alive()


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (JSON, 200),
        ({"Content-Type": "application/json; charset=utf-8", "Host": "localhost:5000"}, 200),
        (JSON | {"Host": "[::1]:5000"}, 200),
        (JSON | {"Host": "rebound.example.org"}, 400),
        ({"Content-Type": "text/plain", "Origin": "https://example.org"}, 415),
        ({}, 415),
    ],
)
@pytest.mark.processes
def test_without_a_key_no_web_site_can_ask(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], status: int
) -> None:
    """A page of a browser on this machine can reach loopback, and send what is no JSON to any address."""
    with served(monkeypatch) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/get_reward", b'{"query": ["four"]}', headers)
        answer = connection.getresponse()
        assert answer.status == status
        assert (b'"rewards":[4.0]' in answer.read()) == (status == 200)


def test_with_a_key_a_server_has_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, "--api_key", "sesame") as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Host": "rm0.example.org", "Authorization": "Bearer sesame"}
        connection.request("POST", "/get_reward", b'{"query": ["four"]}', headers)
        assert connection.getresponse().status == 200


def test_a_request_that_is_given_up_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(monkeypatch) as port:
        head = b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + b'Content-Length: 1000\r\n\r\n{"query"')
            time.sleep(0.1)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == [
        "a client left before its request had arrived"
    ]
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.processes
def test_half_a_header_ends_its_connection(monkeypatch: pytest.MonkeyPatch, before: bytes) -> None:
    """Also behind a request that was answered, and if the bytes come one by one."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    with served(monkeypatch) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(before + b"GET /health HTTP/1.1\r\nHost: ")
        began, got = time.monotonic(), b""
        with suppress(ConnectionError):
            client.settimeout(0.05)
            while time.monotonic() < began + 20:
                with suppress(TimeoutError):
                    if not (part := client.recv(999)):
                        break
                    got += part
                client.sendall(b"x")
        assert time.monotonic() < began + 10
    assert (b"200 OK" in got) == bool(before)


def test_a_request_that_works_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.2)
    with served(monkeypatch) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        body = b'{"query": ["four"]}'
        head = f"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n")
        time.sleep(0.5)
        client.sendall(body)
        assert b"200 OK" in client.recv(999)
