"""`train_sft` with a wrong plan in which each rank keeps its own part of a sum; reports its error."""

import shlex
from contextlib import ExitStack
from functools import partial

from torch import nn

from openrlhf.config.parse import parse
from openrlhf.loop.supervised.run import SupervisedRun
from openrlhf.loop.supervised.sft import SFTTask
from openrlhf.models import tensor_parallel


class NoSum(nn.Linear):
    pass


def on_rank(spec: dict) -> dict:
    tensor_parallel.STYLES["rowwise"] = partial(tensor_parallel._shard_rows, kind=NoSum)
    argv = shlex.split(spec["flags"])
    try:
        SupervisedRun(SFTTask(parse(SFTTask.command, argv).config), argv, ExitStack())
        said = ""
    except ValueError as error:
        said = str(error)
    return {"said": said}
