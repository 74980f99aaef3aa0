"""DPO, IPO and cDPO: `python -m openrlhf.cli.train_dpo`, or the same under torchrun or deepspeed."""

from openrlhf.config.supervised_commands import DPO
from openrlhf.loop.supervised.command import entry_point

load_task, main = entry_point(DPO, "openrlhf.loop.supervised.dpo:DPOTask")

if __name__ == "__main__":
    main()
