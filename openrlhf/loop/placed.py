"""The engines and models of a user's loop as processes of a Ray cluster."""

from contextlib import AbstractContextManager, ExitStack

from openrlhf.cluster.disks import check_disks
from openrlhf.cluster.launch import check_resources, naming_logs, start_ray, stop_ray
from openrlhf.cluster.placement import place
from openrlhf.cluster.process_exits import explaining_exits
from openrlhf.cluster.roles import Roles, start_roles
from openrlhf.config.ppo import PPOConfig
from openrlhf.observability.waits import waiting


class PlacedRoles:
    """Joins or starts a cluster, and starts all processes of a run. They end with `close`."""

    def __init__(self, config: PPOConfig, updates: int) -> None:
        """`updates`: optimizer steps of the whole run, which determine the schedules of learning rates."""
        with ExitStack() as held:
            held.callback(stop_ray)
            with waiting("starting Ray"):
                start_ray([config.train.backend, config.rollout.engine])
            held.enter_context(naming_logs())
            layout = check_resources(config)
            places = place(config, layout)
            check_disks(config, places)
            self.roles: Roles = start_roles(config, places, layout.on_gpu, updates, updates, None)
            held.callback(self.roles.end)
            watchdog = self.roles.watchdog(config)
            watchdog.start()
            held.callback(watchdog.close)
            self._held = held.pop_all()

    def explaining(self) -> AbstractContextManager[None]:
        """Names a process that has died, and its log, in errors of the block."""
        return explaining_exits(lambda: self.roles.members)

    def close(self) -> None:
        """Ends all processes, and the cluster if it was started for them."""
        self._held.close()
