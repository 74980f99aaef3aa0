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
from openrlhf.errors import catch_signals, describe, notify, short_errors
from openrlhf.hub import choose_hub
from openrlhf.loop.machines import plan, resolve
from openrlhf.loop.rl_checks import problems_outside
from openrlhf.loop.rl_command import run
from openrlhf.observability.startup import StartClock, process_clock


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    with short_errors():
        catch_signals()
        clock = StartClock() if RESTARTS in os.environ else process_clock()
        config = continuing(parse(PPO, argv, resolve=resolve, inspect=inspect, plan=plan))
        clock.add("checks", clock.total)
        try:
            run(config, argv, clock)
        except Exception as error:
            restart_after(error, config, argv)
            raise


def inspect(config: PPOConfig) -> list[ValueError]:
    """Returns the problems outside of the flags; see `problems_outside`. Meanwhile the libraries of workers
    are imported."""
    from openrlhf.cluster.launch import cool_down, warm_up

    check_launcher(alone=True)
    choose_hub(config.use_ms)  # the libraries read it when they are imported
    warm_up([config.train.backend, config.rollout.engine])
    problems = problems_outside(config)
    if problems:
        cool_down()
    return problems


RESTARTS = "OPENRLHF_RESTARTS"
"""Environment variable with the number of restarts of this run."""


def restart_after(error: Exception, config: PPOConfig, argv: Sequence[str]) -> None:
    """Starts the command again in this process, from the newest checkpoint, if the error is the loss of a
    process and `train.max_restarts` allows it; otherwise returns."""
    from openrlhf.cluster.deaths import is_lost_process

    count = int(os.environ.get(RESTARTS, "0")) + 1
    if count > config.train.max_restarts or not is_lost_process(error):
        return
    notify("\n".join([describe(error), *getattr(error, "__notes__", ())]))
    notify(f"restart {count} of at most {config.train.max_restarts} (--train.max_restarts)")
    resume = () if config.ckpt.load_enable else ("--ckpt.load_enable",)
    os.environ[RESTARTS] = str(count)
    os.execv(sys.executable, [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *argv, *resume])


if __name__ == "__main__":
    main()
