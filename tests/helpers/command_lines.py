"""Command lines: what a refused one prints, and Python in a process of its own."""

import os
import subprocess
import sys

import pytest
from refusals import printed

from openrlhf.config.parse import parse


def refused(command, argv, capsys):
    """Returns the stderr of a command line that must be refused."""
    with pytest.raises(SystemExit) as exit_:
        parse(command, argv)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def problems_of(lines):
    """Returns the code and the place of each problem among the lines of stderr."""
    return [(problem.code, problem.place) for problem in printed("\n".join(lines))]


def run(*argv, **options):
    """Runs Python with these arguments, from this folder's package."""
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environ, **options)
