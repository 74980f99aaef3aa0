"""Builds the hooks that users attach to a run."""

from collections.abc import Sequence

from openrlhf.errors import ErrorCode, UsageError
from openrlhf.observability.hooks.base import Hook, failed
from openrlhf.registry import Registry

FLAG = "--train.hooks"
HOOKS = Registry("openrlhf.observability.hooks", Hook)


def hooks_of(names: Sequence[str] | None) -> list[Hook]:
    """Builds the hooks that `train.hooks` names. Raises UsageError, which names the flag, for one that cannot
    be imported or built."""
    return [_made(_class_of(name)) for name in names or ()]


def check_hooks(names: Sequence[str] | None) -> None:
    """Raises UsageError for a hook that cannot be imported. Builds none."""
    for name in names or ():
        _class_of(name)


def _made(hook: type[Hook]) -> Hook:
    try:
        return hook()
    except Exception as error:
        raise failed(hook, "__init__", error, UsageError) from error


def _class_of(name: str) -> type[Hook]:
    try:
        return HOOKS[name]
    except KeyError:
        text = "there is no such hook; name a class as folder/file.py:NAME or package.module:NAME"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=FLAG, value=name) from None
    except ValueError as error:
        raise UsageError(ErrorCode.USER_CODE, str(error), flag=FLAG, value=name) from error
