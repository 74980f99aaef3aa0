"""Supervised fine-tuning: `python -m openrlhf.cli.train_sft`, or the same under torchrun or deepspeed."""

from openrlhf.config.supervised_commands import SFT
from openrlhf.loop.supervised.command import entry_point

load_task, main = entry_point(SFT, "openrlhf.loop.supervised.sft:SFTTask")

if __name__ == "__main__":
    main()
