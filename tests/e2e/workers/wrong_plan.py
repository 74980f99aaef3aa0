"""`train_sft` with a wrong plan in which each rank keeps its own part of a sum; reports its error."""

import json
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn

from openrlhf.backends.distributed import init_distributed, leave_distributed
from openrlhf.config.parse import parse
from openrlhf.loop.supervised.run import SupervisedRun
from openrlhf.loop.supervised.sft import SFTTask
from openrlhf.models import tensor_parallel


class NoSum(nn.Linear):
    pass


def main(spec: dict) -> None:
    init_distributed()
    tensor_parallel.STYLES["rowwise"] = partial(tensor_parallel._shard_rows, kind=NoSum)
    argv = shlex.split(spec["flags"])
    try:
        SupervisedRun(SFTTask(parse(SFTTask.command, argv).config), argv, ExitStack())
        said = ""
    except ValueError as error:
        said = str(error)
    Path(spec["out"], f"rank{dist.get_rank()}.json").write_text(json.dumps({"said": said}))
    leave_distributed()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
