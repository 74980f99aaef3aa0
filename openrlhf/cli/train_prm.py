"""Process reward models: `python -m openrlhf.cli.train_prm`, or the same under torchrun or deepspeed."""

from openrlhf.config.supervised_commands import PRM
from openrlhf.loop.supervised.command import entry_point

load_task, main = entry_point(PRM, "openrlhf.loop.supervised.prm:ProcessRewardTask")

if __name__ == "__main__":
    main()
