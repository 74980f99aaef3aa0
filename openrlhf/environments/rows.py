"""Gives agent files a command line that writes rows for --data.prompt_dataset."""

import argparse
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def write_rows(make: Callable[..., Iterable[Mapping[str, Any]]]) -> None:
    """Writes the rows that `make` yields, as JSON lines, to the file named by the last argument of the
    command line. The arguments before it are passed to `make`, whose docstring is shown by `--help`. If an
    argument is missing or a file cannot be read, the program exits with its usage."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(make) or "Writes the prompts of this agent.")
    for name in inspect.signature(make).parameters:
        parser.add_argument(name, metavar=name.upper())
    parser.add_argument("rows", metavar="ROWS", help="JSON lines file to write, for --data.prompt_dataset")
    arguments = vars(parser.parse_args())
    path = arguments.pop("rows")
    try:
        lines = [json.dumps(row) + "\n" for row in make(**arguments)]
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(lines)
    except (OSError, ValueError) as error:
        parser.error(str(error))
