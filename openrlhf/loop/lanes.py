"""Work that verbs submit: it runs in the order of submission, and its result can be awaited."""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Event, local
from typing import Any, Generic, Literal, NoReturn, TypeVar

from openrlhf.errors import ErrorCode, UsageError, first_line

# bounded .result(): submitted work ends.

ResultT = TypeVar("ResultT")


class Result(Generic[ResultT]):
    """The result of a verb, which returned at once. Other verbs take it in the place of the value."""

    def __init__(self, future: "Future[ResultT]") -> None:
        self._future, self._is_read = future, False

    def result(self, timeout: float | None = None) -> ResultT:
        """Waits for the work and returns its result, or raises its exception. Raises TimeoutError after
        `timeout` seconds."""
        self._is_read = True
        return self._future.result(timeout)

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._future.done()

    def __getitem__(self, item: Any) -> NoReturn:
        raise TypeError("this is a Result: result() waits for its value")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Result has no {name}: result() waits for its value, which may have it")

    def __await__(self) -> Generator[Any, None, ResultT]:
        self._is_read = True
        return asyncio.wrap_future(self._future).__await__()

    def when_done(self, call: Callable[[], Any]) -> None:
        """Calls `call` when the work has ended or was cancelled."""
        self._future.add_done_callback(lambda _: call())

    def unread_error(self) -> BaseException | None:
        """Returns the exception of work that has failed while nobody asked for its result."""
        failed = self._future.done() and not self._is_read and not self._future.cancelled()
        return self._future.exception() if failed else None


def wait_for_value(value: Any) -> Any:
    """Waits for a `Result`, also inside of a list; returns other values unchanged."""
    if isinstance(value, Result):
        return value.result()
    return [wait_for_value(item) for item in value] if isinstance(value, list) else value


Lane = Literal["engines", "models"]
_of_thread = local()
"""`lanes`: those to which the current thread belongs."""


class Lanes:
    """One thread for the engines and one for the models, so that both can work at the same time.

    Work on a lane runs in the order of submission. An error whose result nobody reads is raised by the next
    verb, so that no loop goes on after it.
    """

    def __init__(
        self, *, share: bool = False, around: Callable[[], AbstractContextManager] = nullcontext
    ) -> None:
        """`share`: one thread does all work, because engines and models share their GPUs. `around`: context
        of each piece of work."""
        about = {"initializer": setattr, "initargs": (_of_thread, "lanes", self)}
        models = ThreadPoolExecutor(1, thread_name_prefix="models", **about)
        engines = models if share else ThreadPoolExecutor(1, thread_name_prefix="engines", **about)
        self._threads = {"engines": engines, "models": models}
        self._around = around
        self._submitted: list[Result] = []
        self._is_closed = False

    def on(self, lane: Lane, work: Callable[..., ResultT], *arguments: Any) -> Result[ResultT]:
        """Submits `work`. It gets the values of arguments that are results."""
        self.check()
        return self._submit(lane, work, *arguments)

    def _submit(self, lane: Lane, work: Callable[..., ResultT], *arguments: Any) -> Result[ResultT]:
        def run() -> ResultT:
            with self._around():
                try:
                    return work(*map(wait_for_value, arguments))
                except Exception as error:
                    first = self._first_unread() or error
                    if first is not error:
                        first.add_note(f"work after it failed, too: {first_line(error)}")
                raise first

        result = Result(self._threads[lane].submit(run))
        self._submitted.append(result)
        return result

    def _first_unread(self) -> BaseException | None:
        """Returns the first error that nobody has read, which counts as read from then on. Work that fails
        after it raises it too: an optimizer step has no gradient after a loss that failed."""
        for result in self._submitted:
            if error := result.unread_error():
                result._is_read = True
                return error
        return None

    def on_both(self, work: Callable[..., ResultT], *arguments: Any) -> Result[ResultT]:
        """Submits work that starts when all earlier work of both lanes is done, and before all later work."""
        if self._threads["engines"] is self._threads["models"]:
            return self.on("models", work, *arguments)
        arrived, done = Event(), Event()

        def hold() -> None:
            arrived.set()
            done.wait()  # bounded: by the work, which ends

        def run(*values: Any) -> ResultT:
            arrived.wait()  # bounded: by the work of the other lane, which ends
            return work(*values)

        self.check()
        self._threads["engines"].submit(hold)
        result = self._submit("models", run, *arguments)
        result.when_done(done.set)
        return result

    def check(self) -> None:
        """Raises UsageError if the lanes are closed, or in a thread of theirs; else does `raise_unread`."""
        if self._is_closed:
            raise UsageError(ErrorCode.CONFLICT, "this run is closed; start another rl.Run")
        if getattr(_of_thread, "lanes", None) is self:
            text = "a reward, a loss or a hook cannot call verbs of its own run, which wait for it to end"
            raise UsageError(ErrorCode.USER_CODE, f"{text}.\nCall them before, and keep the values.")
        self.raise_unread()

    def raise_unread(self) -> None:
        """Raises the first error of work whose result nobody has read."""
        error = self._first_unread()
        self._submitted = [result for result in self._submitted if not result.done()]
        if error:
            raise error

    def close(self, *, cancel: bool) -> None:
        """Waits until the submitted work is done. `cancel`: leaves out work that has not begun."""
        self._is_closed = True
        for name in ("models", "engines"):
            self._threads[name].shutdown(wait=True, cancel_futures=cancel)
