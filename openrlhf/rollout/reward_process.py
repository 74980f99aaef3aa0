"""A process that calls a user's reward function: it may hang or die, and whoever asked is told so."""

import asyncio
import importlib.util
import inspect
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from openrlhf.rollout.calls import BatchFailed
from openrlhf.rollout.reward_values import read_rewards
from openrlhf.utils.agent import Reward, RewardError

RewardFunc = Callable[[list[str], list[str], list[Any]], Any]


class RewardProcess:
    """One process with the function of one file, started when it is first asked and after every death.

    It has a pipe of its own: it is always known which batch a death belongs to, and no other batch suffers.
    """

    def __init__(self, path: str, *, timeout: float) -> None:
        """`timeout`: seconds for one call; the import of the file is not limited."""
        self.path, self.timeout = path, timeout
        self._import_problem = ""
        # Not fork: the parent runs vLLM's and Ray's threads.
        self._context = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    async def ask(self, queries: list[str], prompts: list[str], labels: list[Any]) -> list[Reward]:
        """One call of the function, and none before the last has ended.

        Raises BatchFailed where the call failed, RewardError where no call can be made.
        """
        try:
            pipe = await self._ready()
            pipe.send((queries, prompts, labels))
            async with asyncio.timeout(self.timeout):
                await _readable(pipe)
            answer = pipe.recv()
        except TimeoutError:
            self.stop()
            raise BatchFailed(
                f"{self.path}: reward_func took longer than --reward.timeout {self.timeout:g} s"
            ) from None
        except (EOFError, ConnectionError):
            raise BatchFailed(
                f"{self.path}: reward_func's process died with exit code {self.stop()}"
            ) from None
        except BaseException:  # nobody would receive the answer
            self.stop()
            raise
        if isinstance(answer, str):
            raise BatchFailed(answer)
        return answer

    def stop(self) -> int | None:
        """Kill the process and those that it has started; its exit code."""
        process, self._process, self._pipe = self._process, None, None
        if process is None or process.pid is None:
            return None
        with suppress(ProcessLookupError):  # it has died before it had a group, or all of its group have
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return process.exitcode

    async def _ready(self) -> Connection:
        """The pipe to a process that waits for calls."""
        if self._import_problem:
            raise RewardError(self._import_problem)
        if self._process is not None and self._process.is_alive() and self._pipe is not None:
            return self._pipe
        self.stop()
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(self.path, theirs), name="reward_func")
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        try:
            await _readable(self._pipe)
            self._import_problem = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RewardError(
                f"{self.path}: the process that imported the file died with exit code {self.stop()}"
            ) from None
        if self._import_problem:
            raise RewardError(self._import_problem)
        return self._pipe


async def _readable(pipe: Connection) -> None:
    """Until there is something to receive, or the other end is gone."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())


def _serve(path: str, pipe: Connection) -> None:
    """What the process does until the other end of the pipe is gone."""
    os.setpgid(0, 0)  # to be killed together with what the function starts, and by no Ctrl-C
    try:
        function = _load(path)
    except BaseException:
        pipe.send(f"{path} could not be imported:\n{traceback.format_exc(limit=-3)}")
        return
    pipe.send("")
    while True:
        try:
            queries, prompts, labels = pipe.recv()
        except EOFError:
            return
        pipe.send(_call(function, queries, prompts, labels))


def _load(path: str) -> RewardFunc:
    spec = importlib.util.spec_from_file_location("reward_func", path)
    assert spec is not None and spec.loader is not None  # as of every .py file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def _call(
    function: RewardFunc, queries: list[str], prompts: list[str], labels: list[Any]
) -> list[Reward] | str:
    """The rewards, or what went wrong: the exception itself may not survive the way between processes."""
    try:
        answer = function(queries, prompts, labels)
        if inspect.iscoroutine(answer):
            answer = asyncio.run(answer)
    except RewardError as error:
        return str(error)
    except BaseException:  # SystemExit too
        return f"reward_func raised:\n{traceback.format_exc(limit=-3)}"
    try:
        return read_rewards(answer, len(queries))
    except RewardError as error:
        return str(error)
