"""Rewards from HTTP servers. Samples that finish at about the same time share a request, and requests go to
the servers round-robin. Temporary failures (a restart, a full queue) are retried; other failures fail only
their samples."""

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import Sequence

import aiohttp

from openrlhf.agents.base import Reward, RewardError
from openrlhf.config.sections import KEY_VARIABLE
from openrlhf.errors import without_secrets
from openrlhf.rewards.calls import BatchedReward, BatchFailed, Call
from openrlhf.rewards.values import WrongNumber, read_rewards

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
"""Seconds to establish a connection. A machine that is down does not answer at all."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Bounds in seconds of the exponential back-off after all servers have failed. The pause is a random fraction
of the first value, which doubles each round, up to the second value."""
REMIND = 60.0
"""Minimum seconds between two warnings about unavailable servers."""
ANSWER_BYTES = 64 << 20
"""Maximum size of an answer."""
SPLITTABLE_STATUSES = (400, 413, 422, 500)
"""HTTP statuses after which smaller requests may succeed, because one sample may be faulty or the request too
large."""


class RetryableError(Exception):
    """Raised for a failure that may be temporary."""

    def __init__(self, problem: str, pause: float = 0.0) -> None:
        super().__init__(problem)
        self.pause = pause
        """Seconds to wait, which the server requested; 0 without a request."""


class RemoteReward(BatchedReward):
    """A reward source that sends batches of samples to HTTP servers."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float,
        try_timeout: float | None = None,
        batch_size: int = 16,
        concurrency: int = 32,
        key: str | None = None,
    ) -> None:
        """`timeout`: seconds for one request, including all retries. `try_timeout`: seconds for one attempt;
        None: `timeout` divided by the number of servers. `batch_size`: maximum samples in a request.
        `concurrency`: maximum requests in flight. `key`: sent as `Authorization: Bearer KEY`."""
        super().__init__(batch_size=batch_size, concurrency=concurrency)
        self.timeout, self.try_timeout = timeout, try_timeout or timeout / len(urls)
        self._num_urls, self._urls = len(urls), itertools.cycle(urls)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._session: aiohttp.ClientSession | None = None
        self._closing: asyncio.Task[None] | None = None  # asyncio keeps only weak references to tasks
        self._warned_at = -REMIND

    def close(self) -> None:
        super().close()
        if self._session is not None:
            self._closing = asyncio.get_running_loop().create_task(self._session.close())

    async def ask(self, calls: Sequence[Call]) -> list[Reward]:
        """Tries the servers in turn until one answers or `timeout` is over."""
        body, problem, earlier = _body(calls), "", ""
        try:
            async with asyncio.timeout(self.timeout):
                for tries, url in enumerate(self._urls, 1):
                    problem = f"{url}: no answer{earlier}"
                    try:
                        async with asyncio.timeout(self.try_timeout):
                            return await self._post(url, body, len(calls))
                    except TimeoutError:
                        problem = f"{url}: no answer in {self.try_timeout:g} s"
                        self._warn(problem)
                    except RetryableError as error:
                        problem = str(error)
                        earlier = f"; the try before: {problem}"
                        self._warn(problem)
                        await asyncio.sleep(self._pause(tries, error.pause))
        except TimeoutError:
            raise RewardError(
                f"no reward within --reward.remote_timeout {self.timeout:g} s: {problem}"
            ) from None
        raise AssertionError("round-robin never ends")

    def _pause(self, tries: int, asked: float = 0.0) -> float:
        """Returns the seconds to wait after `tries` failures: 0 until every server has been tried. After a
        full round it is the time that the last server `asked` for, plus exponential back-off with full
        jitter, so that clients do not all return at the same time."""
        rounds, rest = divmod(tries, self._num_urls)
        if rest:
            return 0.0
        return asked + random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds - 1, 16)))

    def _warn(self, problem: str) -> None:
        if time.monotonic() - self._warned_at >= REMIND:
            self._warned_at = time.monotonic()
            logger.warning("%s; retrying for up to %g s", without_secrets(problem), self.timeout)

    async def _post(self, url: str, body: bytes, count: int) -> list[Reward]:
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
            connector = aiohttp.TCPConnector(limit=0)  # BatchedReward limits the number of requests
            self._session = aiohttp.ClientSession(connector=connector, timeout=limits, headers=self._headers)
        try:
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                status, pause = response.status, response.headers.get("Retry-After", "")
                answer = await _read_limited(response)
        except aiohttp.ClientSSLError as error:
            raise RewardError(f"{url}: {error}") from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise RetryableError(f"{url}: {str(error) or type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise RewardError(f"{url}: {type(error).__name__}: {error}") from error
        if len(answer) > ANSWER_BYTES:
            raise BatchFailed(f"{url} answered with more than {ANSWER_BYTES >> 20} MiB")
        if status == 200:
            return _read_answer(url, answer, count)
        problem = f"{url}: HTTP {status}: {answer[:300].decode(errors='replace').strip()}"
        if status in SPLITTABLE_STATUSES and (count > 1 or status < 500):
            raise BatchFailed(problem)
        if status == 429 or status >= 500:
            raise RetryableError(problem, float(pause) if pause.isdecimal() else 0.0)
        raise RewardError(f"{problem}{_remedy(status)}")


def _body(calls: Sequence[Call]) -> bytes:
    try:
        return json.dumps(
            {
                "query": [call.query for call in calls],
                "prompts": [call.prompt for call in calls],
                "labels": [call.label for call in calls],
            },
            allow_nan=False,
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BatchFailed(f"the label cannot be sent as JSON: {error}") from error


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    """Returns the answer, or the beginning of one that is larger than ANSWER_BYTES."""
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > ANSWER_BYTES:
            response.close()
            break
    return bytes(answer)


def _read_answer(url: str, answer: bytes, count: int) -> list[Reward]:
    try:
        return read_rewards(json.loads(answer), count, source=url)
    except (ValueError, RecursionError) as error:
        raise BatchFailed(f"{url} answered with invalid JSON: {answer[:100]!r}") from error
    except RewardError as error:
        raise error if isinstance(error, WrongNumber) else BatchFailed(str(error)) from error


def _remedy(status: int) -> str:
    """Returns a remedy for the HTTP status; "" if there is no known one."""
    if status == 401:
        return f"\nSet {KEY_VARIABLE} to the server's key where the run is started."
    if status in (404, 405):
        return "\nIs the path right? serve_rm answers at /get_reward."
    return ""
