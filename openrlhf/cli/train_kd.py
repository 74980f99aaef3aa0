"""Knowledge distillation: `python -m openrlhf.cli.train_kd`, or the same under torchrun or deepspeed."""

from openrlhf.config.supervised_commands import KD
from openrlhf.loop.supervised.command import entry_point

load_task, main = entry_point(KD, "openrlhf.loop.supervised.kd:DistillationTask")

if __name__ == "__main__":
    main()
