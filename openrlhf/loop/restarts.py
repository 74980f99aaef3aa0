"""Starts a program again after the death of one of its processes: `train.max_restarts`."""

import os
import sys
from collections.abc import Sequence

from openrlhf.errors import describe, notify

RESTARTS = "OPENRLHF_RESTARTS"
"""Environment variable with the number of restarts of this run."""


def own_program() -> list[str]:
    """Returns the arguments of Python that start this program again; empty for a notebook, an interactive
    session or a program from standard input, which nothing can start again."""
    file = getattr(sys.modules["__main__"], "__file__", "")  # "<stdin>" for one from standard input
    is_known = os.path.exists(file) or "-c" in sys.orig_argv
    return sys.orig_argv[1:] if is_known else []


def restart_after(error: Exception, most: int, program: Sequence[str], *, resumes: bool = True) -> None:
    """Starts Python again in this process with the arguments `program`, at most `most` times, if the error is
    the loss of a process; otherwise returns. `resumes`: the program continues from its newest checkpoint.
    Prints why it does not start a program again that could not continue, or that is unknown (empty)."""
    from openrlhf.cluster.process_exits import is_lost_process  # imports Ray

    count = int(os.environ.get(RESTARTS, "0")) + 1
    if count > most or not is_lost_process(error):
        return
    if not resumes:
        notify("not started again (--train.max_restarts): a loop that never calls load_state begins anew")
        return
    if not program:
        notify("not started again (--train.max_restarts): the loop's program is not in a file")
        return
    notify("\n".join([describe(error), *getattr(error, "__notes__", ())]))
    notify(f"restart {count} of at most {most} (--train.max_restarts)")
    os.environ[RESTARTS] = str(count)
    sys.stdout.flush()  # a program's own lines, which `execv` would lose
    os.execv(sys.executable, [sys.executable, *program])
