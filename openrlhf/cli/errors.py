"""What a user sees when a run cannot go on: the few lines that help. `OPENRLHF_DEBUG=1` shows the whole
trace."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_USAGE = 2
EXIT_FAILURE = 1


@contextmanager
def short_errors() -> Iterator[None]:
    """Errors that are written for people end the process with their text alone; any other keeps its trace."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        cause = getattr(error, "cause", None) or error  # of a Ray task: what the worker raised
        written_for_people = type(cause) in (ValueError, RuntimeError, FloatingPointError)
        if os.environ.get("OPENRLHF_DEBUG") or not written_for_people:
            raise
        print(f"error: {cause}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE if isinstance(cause, ValueError) else EXIT_FAILURE)
