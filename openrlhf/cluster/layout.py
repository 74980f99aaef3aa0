"""Plans the placement of ranks and engines on GPUs, from a configuration and a cluster's resources. This
module only plans: checks read the plan, `--print_plan` prints it, and placement.py requests it from Ray."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from openrlhf.config.ppo import PPOConfig
from openrlhf.errors import ErrorCode, UsageError, as_one, counted
from openrlhf.mesh import Mesh

Nodes = Sequence[Mapping[str, float]]
"""Resources of each node, under Ray's names: GPU, CPU."""

ENGINES = "engines"
"""Name of the role of the rollout engines. The dimension `data` of its mesh counts engines, `tensor` the GPUs
of an engine."""

GPU_CLAIM = 0.2
"""Fraction of a shared GPU that a rank requests from Ray. The five models of a run fit on one GPU."""


class Device(NamedTuple):
    """A GPU of a node. Without GPUs, all cores of a node are its GPU 0."""

    node: int
    gpu: int
    """Index of the GPU on its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleLayout:
    """Placement of the ranks of one model, or of all engines."""

    mesh: Mesh
    colocated_with: str | None
    """The role whose GPUs it shares; None: it has its own GPUs."""
    offload: str
    """The flag that offloads it from GPU memory while others compute; "": it is not offloaded."""
    size_flags: str
    """The flags that set how many GPUs share one copy of its weights, for messages."""
    first: int
    """Index of the role's first bundle."""
    devices: tuple[Device, ...]
    """Device of each rank. Without GPUs each node is a single device, its cores."""

    @property
    def tensor_groups(self) -> list[tuple[Device, ...]]:
        """The devices of each engine, or of each group of tensor parallel ranks."""
        size = self.mesh.tensor
        return [self.devices[i : i + size] for i in range(0, len(self.devices), size)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Placement of a whole run, planned for an idle cluster. On a busy cluster Ray may grant other nodes;
    placement.py checks that each tensor-parallel group is on one node."""

    nodes: tuple[int, ...]
    """Number of GPUs of each node."""
    bundles: tuple[int, ...]
    """Number of GPUs of each bundle that is requested from Ray. A bundle is on one node. Empty without
    GPUs."""
    roles: Mapping[str, RoleLayout]

    @property
    def on_gpu(self) -> bool:
        return any(self.nodes)

    def home(self, role: str) -> str:
        """Returns the role that owns this role's GPUs."""
        return self.roles[role].colocated_with or role

    def companions(self, role: str) -> list[str]:
        """Returns the other roles on this role's GPUs."""
        return [other for other in self.roles if other != role and self.home(other) == self.home(role)]

    def gpu_claim(self, role: str) -> float:
        """Returns the fraction of a GPU that each rank of the role requests from Ray. It is 0 for engines
        that share GPUs."""
        if not self.companions(role):
            return 1.0
        return 0.0 if role == ENGINES else GPU_CLAIM


def compute_layout(config: PPOConfig, nodes: Nodes) -> Layout:
    """Returns the run's placement on these nodes. Raises UsageError if it does not fit."""
    if problems := resource_problems(config, nodes):
        raise as_one(problems)
    return _layout(config, nodes)


def resource_problems(config: PPOConfig, nodes: Nodes) -> list[UsageError]:
    """Returns a problem for each flag that requests more than the nodes have."""
    needs = demands(config)
    gpus, cores = total(nodes, "GPU"), total(nodes, "CPU")
    if gpus == 0:
        text = (
            f"the cluster has no GPU and {cores} CPU cores, and each rank needs a core.\nUse at most {cores}."
        )
        return [_lacking(text, flag, f"= {n}") for flag, n in needs.items() if n > max(cores, 2)]
    problems = []
    if gpus == 1 and config.train.async_enable:
        text = (
            "engines and models need separate GPUs, and the cluster has 1 GPU.\n"
            "Remove the flag, so that engines and models take turns, or use two GPUs."
        )
        problems.append(_lacking(text, "--train.async_enable"))
    elif sum(needs.values()) > gpus:
        shared = config.train.colocate_all
        text = (
            f"the run needs {sum(needs.values())} GPUs ({listed(needs)}); the cluster has {gpus}.\n"
            f"Ask for fewer{'' if shared else ', or share them with --train.colocate_all'}."
        )
        problems.append(_lacking(text))
    size = config.vllm.num_gpus
    room = sum(int(node.get("GPU", 0)) // size for node in nodes)
    if room < config.num_engines and config.num_engines * size <= gpus:
        each = ", ".join(f"{node.get('GPU', 0):g}" for node in nodes)
        text = (
            f"all GPUs of an engine must be on one node, and nodes with {each} GPUs have room for {room} of "
            f"{config.num_engines} engines.\n"
            "Choose a size that divides the GPUs of a node, or fewer --vllm.num_engines."
        )
        problems.append(_lacking(text, engine_size_flags(config), size))
    return problems or list(_split_groups(_layout(config, nodes)))


def _lacking(text: str, flag: str = "", value: int | str = "") -> UsageError:
    return UsageError(ErrorCode.RESOURCES, text, flag=flag, value=value)


def demands(config: PPOConfig) -> dict[str, int]:
    """Returns flags -> number of devices, for each role with its own devices."""
    needs = {
        f"--{role}.num_nodes x --{role}.num_gpus_per_node": count
        for role, count in config.own_placements.items()
    }
    if not config.engines_colocated:
        needs[f"--vllm.num_engines x {engine_size_flags(config)}"] = config.num_engines * config.vllm.num_gpus
    return needs


def engine_size_flags(config: PPOConfig) -> str:
    """Returns the flags that set the number of GPUs of an engine, for messages."""
    stages = " x --vllm.pipeline_parallel_size" if config.vllm.pipeline_parallel_size > 1 else ""
    return f"--vllm.tensor_parallel_size{stages}"


def listed(needs: Mapping[str, int]) -> str:
    return ", ".join(f"{flag} = {count}" for flag, count in needs.items())


def total(nodes: Nodes, resource: str) -> int:
    return int(sum(node.get(resource, 0) for node in nodes))


def described(gpus: Sequence[int]) -> Nodes:
    """Returns the resources of a cluster whose nodes have these numbers of GPUs, and this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return [{"GPU": count, "CPU": cores} for count in gpus]


def table(layout: Layout) -> str:
    """Formats the placement of every role as a table, with one line per role and node."""
    rows = [row for role in layout.roles for row in _rows(layout, role)]
    head = ("role", "ranks", "node", "devices", "shared with", "claim", "offloaded by")
    return "\n".join([*aligned([head, *rows]), _summary(layout)]) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _layout(config: PPOConfig, nodes: Nodes) -> Layout:
    """Plans the placement of a run that fits the nodes."""
    gpus = tuple(int(node.get("GPU", 0)) for node in nodes)
    own: dict[str, list[int]] = {}
    # Ray places multi-GPU engines first, and then fills their nodes with the following bundles in order. The
    # actor is last, so that it gets separate nodes.
    for role, count in reversed(config.own_placements.items()):
        own[role] = [1] * count
    engines = Mesh(data=config.num_engines, tensor=config.vllm.num_gpus)
    if not config.engines_colocated:
        own[ENGINES] = [engines.tensor] * engines.data
    bundles = [size for sizes in own.values() for size in sizes] if any(gpus) else []
    packed = _pack(bundles, gpus)
    first = dict(zip(own, accumulate(map(len, own.values()), initial=0), strict=False))

    def of(role: str, mesh: Mesh, other: str | None) -> RoleLayout:
        home = other or role
        held = packed[first[home] : first[home] + len(own[home])]
        devices = tuple(device for bundle in held for device in bundle)
        return RoleLayout(
            mesh=mesh,
            colocated_with=other,
            offload=_offload(config, role) if any(gpus) else "",
            size_flags=engine_size_flags(config) if role == ENGINES else "--ds.tensor_parallel_size",
            first=first[home],
            devices=devices if any(gpus) else _spread(mesh, nodes),
        )

    roles = {role: of(role, place.mesh, place.colocated_with) for role, place in config.placements.items()}
    roles[ENGINES] = of(ENGINES, engines, "actor" if config.engines_colocated else None)
    return Layout(nodes=gpus, bundles=tuple(bundles), roles=roles)


def _pack(bundles: Sequence[int], nodes: Sequence[int]) -> list[list[Device]]:
    """Returns the GPUs of each bundle, as Ray places bundles on an idle cluster: the largest bundle goes to
    the node with the most free GPUs, then the node is filled with further bundles, and so on. Raises
    ValueError if a bundle fits no node."""
    free, placed = list(nodes), [[] for _ in bundles]
    waiting = sorted(range(len(bundles)), key=lambda i: -bundles[i])
    while waiting:
        node = max(range(len(nodes)), key=lambda n: free[n])
        if free[node] < bundles[waiting[0]]:
            raise ValueError(f"a bundle of {bundles[waiting[0]]} GPUs fits no node: {free} are free")
        left = []
        for i in waiting:
            if bundles[i] > free[node]:
                left.append(i)
                continue
            start = nodes[node] - free[node]
            placed[i] = [Device(node, start + k) for k in range(bundles[i])]
            free[node] -= bundles[i]
        waiting = left
    return placed


def _spread(mesh: Mesh, nodes: Nodes) -> tuple[Device, ...]:
    """Distributes ranks without GPUs evenly over the nodes with a CPU core, in order; over all nodes if none
    has a core. The ranks of one copy of the weights are on one node."""
    hosts = [i for i, node in enumerate(nodes) if node.get("CPU", 0) >= 1] or range(len(nodes))
    copies = mesh.size // mesh.tensor
    homes = [hosts[copy * len(hosts) // copies] for copy in range(copies)]
    return tuple(Device(node, 0) for node in homes for _ in range(mesh.tensor))


def _split_groups(layout: Layout) -> Iterator[UsageError]:
    """Yields a problem for each role with a tensor-parallel group that spans several nodes."""
    for role, place in layout.roles.items():
        if all(len({device.node for device in group}) == 1 for group in place.tensor_groups):
            continue
        home = layout.home(role)
        held = Counter(device.node for device in place.devices).values()
        text = (
            "all GPUs of one copy of the weights must be on one node, and the nodes have "
            f"{', '.join(map(str, held))} GPUs of --{home}.num_gpus_per_node.\n"
            "Choose a size that divides the GPUs of a node."
        )
        yield _lacking(text, place.size_flags, place.mesh.tensor)


def _offload(config: PPOConfig, role: str) -> str:
    sleeps = "--ds.enable_sleep" if config.ds.enable_sleep else ""
    return {
        "actor": sleeps,
        "critic": sleeps,
        "ref": "--ref.offload" if config.ref.offload else "",
        "reward": "--reward.offload" if config.reward.offload else "",
        "teacher": "--teacher.offload" if config.teacher.offload else "",
        ENGINES: "--vllm.enable_sleep" if config.engines_sleep else "",
    }[role]


def _rows(layout: Layout, role: str) -> Iterator[tuple[str, ...]]:
    place, sharing = layout.roles[role], ("all", "-", "-")
    if layout.on_gpu:
        others, claim = ", ".join(layout.companions(role)) or "-", layout.gpu_claim(role)
        sharing = (others, f"{claim:g}" if claim else "-", place.offload or "-")
    for node in sorted({device.node for device in place.devices}):
        groups = [[d.gpu for d in group if d.node == node] for group in place.tensor_groups]
        if place.mesh.tensor == 1:
            groups = [[gpu for group in groups for gpu in group]]
        devices = ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups if g)
        ranks = str(sum(map(len, groups)))
        yield role, ranks, str(node), devices if layout.on_gpu else "cores", *sharing


def _summary(layout: Layout) -> str:
    if not layout.on_gpu:
        return f"{sum(place.mesh.size for place in layout.roles.values())} processes share the cores"
    nodes = counted(len(layout.nodes), "node")
    return f"{sum(layout.bundles)} of the {counted(sum(layout.nodes), 'GPU')} of {nodes}"
