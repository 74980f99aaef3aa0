"""Reinforcement learning on a Ray cluster: `python -m openrlhf.cli.train_ppo_ray`, or under `ray job
submit`."""

import os
import sys
from collections.abc import Sequence

from openrlhf.checkpoint.start import continuing
from openrlhf.config.checks import check_launcher
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.ppo_command import PPO
from openrlhf.errors import catch_signals, short_errors
from openrlhf.hub import choose_hub
from openrlhf.loop.machines import plan, resolve
from openrlhf.loop.restarts import RESTARTS, restart_after
from openrlhf.observability.startup import StartClock, process_clock
from openrlhf.observability.waits import checking


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with short_errors():
        catch_signals()
        clock = StartClock() if RESTARTS in os.environ else process_clock()
        config = continuing(parse(PPO, argv, resolve=resolve, inspect=inspect, plan=plan))
        clock.add("checks", clock.total)
        from openrlhf.loop.rl_command import run

        try:
            run(config, argv, clock)
        except Exception as error:
            resume = () if config.ckpt.load_enable else ("--ckpt.load_enable",)
            command = ["-m", "openrlhf.cli.train_ppo_ray", *argv, *resume]
            restart_after(error, config.train.max_restarts, command)
            raise


def inspect(config: PPOConfig) -> list[ValueError]:
    """Returns the problems outside of the flags; see `problems_outside`. Meanwhile the libraries of workers
    are imported."""
    from openrlhf.cluster.launch import cool_down, warm_up  # imports Ray

    check_launcher(alone=True)
    choose_hub(config.use_ms)  # before models are looked up, and before Ray's processes inherit it
    warm_up([config.train.backend, config.rollout.engine])
    with checking():
        from openrlhf.loop.rl_checks import problems_outside  # imports torch and transformers

        problems = problems_outside(config)
    if problems:
        cool_down()
    return problems


if __name__ == "__main__":
    main()
