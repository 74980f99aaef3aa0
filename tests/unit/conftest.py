import signal
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from openrlhf import errors
from openrlhf.errors import SIGNALS, catch

# the process that only distributes tests reads this file too, so torch is imported by the fixtures
LOADING = threading.RLock()


@pytest.fixture
def threads() -> Iterator[Callable[[int, Callable[[], Any]], list[Any]]]:
    """Returns threads(n, function): the results of `function` on `n` ranks, which are threads and meet in
    real process groups."""
    import torch
    from torch.testing._internal.distributed.multi_threaded_pg import (
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )
    from transformers import PreTrainedModel

    tie_weights = PreTrainedModel.tie_weights
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("from_pretrained", "_from_config"):
            patch.setattr(PreTrainedModel, name, one_at_a_time(PreTrainedModel.__dict__[name]))
        yield in_threads
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    _uninstall_threaded_pg()
    assert PreTrainedModel.tie_weights is tie_weights and torch.get_default_dtype() == torch.float32


@pytest.fixture
def outlives_stops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps this process alive after a stop, and restores its handlers of signals."""
    monkeypatch.setattr(errors, "_force_exit", lambda stopped: None)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        catch(handler, [number])


def one_at_a_time(load: Any) -> Any:
    """Lets one thread at a time load a model. Meanwhile transformers replaces functions of its classes and of
    torch. If two threads overlap, the second restores what the first had put there, for the whole process:
    models that later tests build have no tied weights."""

    @wraps(load.__func__)
    def locked(cls: type, *args: Any, **options: Any) -> Any:
        with LOADING:
            return load.__func__(cls, *args, **options)

    return classmethod(locked)


def in_threads(num_ranks: int, function: Callable[[], Any]) -> list[Any]:
    import torch.distributed as dist

    found, failed, store = [None] * num_ranks, [], dist.HashStore()

    def be(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            found[rank] = function()
        except BaseException as error:
            failed.append(error)

    ranks = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    assert not failed and not any(thread.is_alive() for thread in ranks), failed
    return found
