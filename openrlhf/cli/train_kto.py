"""KTO: `python -m openrlhf.cli.train_kto`, or the same under torchrun or deepspeed."""

from openrlhf.config.supervised_commands import KTO
from openrlhf.loop.supervised.command import entry_point

load_task, main = entry_point(KTO, "openrlhf.loop.supervised.kto:KTOTask")

if __name__ == "__main__":
    main()
