"""Checks options of DeepSpeed before anything starts."""

from importlib.util import find_spec
from typing import Any

from openrlhf.config.pass_through import unknown_option
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.errors import ErrorCode, UsageError

FLAG = "--ds.config"


class Asked(dict[str, Any]):
    """A configuration that remembers for which names it was asked."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: Any) -> bool:
        self.names.add(name)
        return super().__contains__(name)

    def keys(self) -> Any:
        return self  # so that `name in config.keys()` asks, too

    def __copy__(self) -> "Asked":
        return self


def check_options(ds: DeepSpeedConfig) -> None:
    """Raises UsageError if the installed DeepSpeed refuses `--ds.config`, or never asks for one of its names,
    so that it would ignore the option. Imports DeepSpeed if there are any options."""
    if not ds.config or find_spec("deepspeed") is None:
        return
    from deepspeed.runtime.config import DeepSpeedConfig as Reader  # takes seconds

    from openrlhf.backends.deepspeed.config import training_config

    asked = Asked(training_config(ds, max_norm=0.0))
    try:
        Reader(asked)
    except Exception as error:  # of pydantic, of DeepSpeed, or by a value of the wrong type
        text = f"DeepSpeed refuses it: {' '.join(str(error).split())}"
        raise UsageError(ErrorCode.INVALID_VALUE, text, flag=FLAG) from error
    for name in ds.config:
        if name not in asked.names:
            problem = "DeepSpeed's configuration has no such name, so that it would be ignored"
            raise unknown_option(FLAG, name, asked.names, problem)
