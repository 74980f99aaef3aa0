"""Reward models: `python -m openrlhf.cli.train_rm`, or the same under torchrun or deepspeed."""

from openrlhf.config.supervised_commands import RM
from openrlhf.loop.supervised.command import entry_point

load_task, main = entry_point(RM, "openrlhf.loop.supervised.rm:RewardModelTask")

if __name__ == "__main__":
    main()
