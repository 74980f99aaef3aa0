"""A vLLM engine in another process. An engine that counts stands in for vLLM."""

import asyncio
import multiprocessing
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf.backends.vllm import stream
from openrlhf.backends.vllm.stream import VLLMStream, _Server
from openrlhf.completions import SamplingParams
from openrlhf.errors import ErrorCode, UsageError


async def count(prompt: list[int], params: SamplingParams) -> Any:
    for i in range(params.max_tokens or 0):
        await asyncio.sleep(0.01)
        yield [prompt[0] + i]


def test_a_stop_before_the_first_token_leaves_nothing_to_the_next_answer() -> None:
    own, theirs = multiprocessing.Pipe()
    engine, messages, events = VLLMStream.__new__(VLLMStream), queue.SimpleQueue(), [KeyboardInterrupt]

    def get() -> tuple[str, Any]:
        if events:
            raise events.pop()
        return messages.get(timeout=30)

    engine._connection, shared = own, SimpleNamespace(get=get, put=messages.put)
    engine._messages = shared  # pyrefly: ignore[bad-assignment]
    idle: Any = SimpleNamespace(start=lambda: asyncio.sleep(0), stream=count, shutdown=lambda: None)
    for work in (lambda: asyncio.run(_Server(theirs, idle).run()), engine._listen):
        threading.Thread(target=work, daemon=True).start()
    assert messages.get(timeout=30) == ("ready", None)
    with own:
        with pytest.raises(KeyboardInterrupt):
            next(engine.stream([100], 0, SamplingParams(max_tokens=1000)))
        assert list(engine.stream([200], 0, SamplingParams(max_tokens=3))) == [200, 201, 202]


def test_a_refused_option_is_no_failure_of_the_process() -> None:
    own, theirs = multiprocessing.Pipe()
    refusal = UsageError(ErrorCode.UNSUPPORTED, "vLLM refuses it", flag="--vllm.engine_args", value="{}")

    async def refuse() -> None:
        raise refusal

    engine: Any = SimpleNamespace(start=refuse)
    asyncio.run(_Server(theirs, engine).run())
    kind, received = own.recv()
    assert (kind, str(received)) == ("refused", str(refusal))


def test_an_engine_that_is_starting_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(get=lambda: (_ for _ in ()).throw(KeyboardInterrupt), put=lambda message: None)
    monkeypatch.setattr(stream, "_serve", print)
    monkeypatch.setattr(queue, "SimpleQueue", lambda: broken)
    options: Any = None
    with pytest.raises(KeyboardInterrupt):
        VLLMStream(options)
    (process,) = (p for p in multiprocessing.active_children() if p.name == "vllm")
    process.join(60)
    assert process.exitcode == -9
