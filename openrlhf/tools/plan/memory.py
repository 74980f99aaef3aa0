"""Predicts the memory that a run needs on a device, phase by phase, from the estimates of openrlhf/memory."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from openrlhf.api import (
    BUCKET_BYTES,
    CPU_KV_CACHE_GB,
    FITS,
    ITEM_BYTES,
    RankMemory,
    bucket_size,
    forward_memory,
    gathered_bytes,
    memory_fraction,
    not_none,
    training_memory,
    transfer_backend,
)
from openrlhf.api import ENGINE_ROLE as ENGINES
from openrlhf.tools.plan.batches import Setup
from openrlhf.tools.plan.hardware import Cluster

Parts = Mapping[str, float]
"""Part of a device's memory -> its bytes. Parts are named in `PARTS`."""

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "KV cache", "buffers", "libraries")

LIBRARIES = 2**30
"""Bytes of a process's libraries on a GPU: the upper end of the range in docs/models.md."""
ENGINE_WORK = 3 * 2**30
"""Assumed bytes of an engine on a GPU besides weights and cache: activations of a batch of 8,192 tokens and
CUDA graphs."""

TRAINED = ("actor", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Memory that one phase needs on each device of a group."""

    devices: str
    """Names of the roles on these devices."""
    count: int
    """Number of devices."""
    phase: str
    parts: Parts
    capacity: float
    """Memory of a device, bytes."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        return self.total / self.capacity

    @property
    def limit(self) -> float:
        """Maximum share. While engines sample it is 1, because they take all that the models leave."""
        return 1.0 if self.phase == "generate" else FITS

    @property
    def fits(self) -> bool:
        return self.share <= self.limit


def combined(parts: Iterable[Parts]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for some in parts:
        total.update(some)
    return {name: total[name] for name in PARTS if total[name]}


# ---- supervised commands


def supervised_memory(run: Setup) -> list[Demand]:
    """Returns the memory of an optimizer step of a supervised command, whose ranks fill the cluster."""
    cluster, ds = run.cluster, run.config.ds
    ranks = max(1, cluster.devices // ds.tensor_parallel_size)
    checkpointing = run.config.model.gradient_checkpointing_enable
    trained = _update(run, "model", ranks, checkpointing).parts
    others = [_frozen_idle(run, role, ranks) for role in run.sizes if role != "model"]
    parts = combined([trained, *others, _libraries(cluster, 1)])
    many = 1 if cluster.kind.on_gpu else cluster.devices
    return [
        Demand(
            devices=", ".join(run.sizes),
            count=cluster.devices,
            phase="train",
            parts={name: many * count for name, count in parts.items()},
            capacity=cluster.kind.memory,
        )
    ]


# ---- reinforcement learning


def ppo_memory(run: Setup) -> list[Demand]:
    """Returns the memory of each group of devices with the same roles, in each phase of a step."""
    layout = not_none(run.layout)
    homes = [home for home in layout.roles if layout.home(home) == home]
    return [demand for home in homes for demand in _Group(run, home).demands()]


def engine_cache(run: Setup) -> float:
    """Returns the bytes of an engine's KV cache on each of its devices. They are negative if its weights do
    not fit."""
    return _Group(run, not_none(run.layout).home(ENGINES)).cache()


class _Group:
    """The devices of one role, and all roles that share them."""

    def __init__(self, run: Setup, home: str) -> None:
        self.run, self.config, self.layout = run, run.config, not_none(run.layout)
        self.home, self.roles = home, [home, *self.layout.companions(home)]
        self.ds, self.gpu = run.config.ds, run.cluster.gpu

    def demands(self) -> list[Demand]:
        phases: dict[str, list[dict[str, float]]] = {}
        if ENGINES in self.roles:
            phases["generate"] = [self.together({ENGINES: self.engine(with_cache=True)})]
        computing = [role for role in self.roles if self.reads(role)]
        if computing:
            phases["log-probs"] = [self.asleep({role: self.forward(role)}) for role in computing]
        if trained := [role for role in self.roles if role in TRAINED]:
            phases["update"] = [self.asleep({role: self.update(role).parts}) for role in trained]
        if {"actor", ENGINES} & {*self.roles}:
            phases["sync"] = [self.together(self.sync())]
        count = len({*self.layout.roles[self.home].devices})
        return [
            Demand(
                devices=", ".join(self.roles),
                count=count,
                phase=phase,
                parts=max(found, key=lambda parts: sum(parts.values())),
                capacity=self.run.cluster.kind.memory,
            )
            for phase, found in phases.items()
        ]

    def reads(self, role: str) -> bool:
        if role == "actor":
            return not self.config.skips_old_log_probs
        return role != ENGINES

    def asleep(self, active: Mapping[str, Parts]) -> dict[str, float]:
        """Returns the memory of a phase in which models compute and engines sleep (or, if they never do, keep
        their memory)."""
        if ENGINES not in self.roles or self.config.engines_sleep:
            return self.together(active)
        return self.together({ENGINES: self.engine(with_cache=True), **active})

    def together(self, active: Mapping[str, Parts]) -> dict[str, float]:
        """Adds up the memory of the active roles, of the other roles at rest, and of all libraries."""
        resting = {role: self.at_rest(role) for role in self.roles if role not in active}
        needs: dict[str, Parts] = {**resting, **active}
        scaled = ({n: self.processes(role) * x for n, x in parts.items()} for role, parts in needs.items())
        return combined([*scaled, _libraries(self.run.cluster, len(self.roles))])

    def processes(self, role: str) -> int:
        """Returns the number of the role's processes on a device, which is 1 on a GPU."""
        devices = self.layout.roles[role].devices
        return 1 if self.gpu is not None else max(Counter(devices).values())

    def at_rest(self, role: str) -> dict[str, float]:
        if role == ENGINES:
            return {} if self.config.engines_sleep else self.engine(with_cache=True)
        if role not in TRAINED:
            return _frozen_idle(self.run, role, self.layout.roles[role].mesh.copies)
        needed = self.update(role)
        sleeps = self.ds.enable_sleep and self.gpu is not None
        return {"weights": needed.weights, "optimizer": 0 if sleeps else needed.optimizer}

    def update(self, role: str) -> RankMemory:
        config = self.config
        checkpointing = config.actor.gradient_checkpointing_enable
        if role == "critic" and config.critic.gradient_checkpointing_enable is not None:
            checkpointing = config.critic.gradient_checkpointing_enable
        ranks, has_entropy = self.layout.roles[role].mesh.copies, bool(config.actor.entropy_coef)
        return _update(self.run, role, ranks, checkpointing, with_entropy=has_entropy)

    def forward(self, role: str) -> dict[str, float]:
        config, sequence = self.config, self.ds.ring_attn_size
        row = config.data.max_len * config.rollout.micro_batch_size
        if config.train.dynamic_batch_enable:
            row = max(config.data.max_len, config.rollout_tokens_per_gpu * sequence)
        backend, trained, held = config.train.backend, role in TRAINED, self.at_rest(role)
        shape = self.run.sizes[role].on_rank(self.ds, backend, trained=trained)
        if trained:
            gathered = self.update(role).gathered
        else:  # if it is offloaded, layers are copied from the CPU one after the other
            is_split = self.ds.zero_stage == 3 or not held
            gathered = gathered_bytes(shape, self.ds, backend, trained=False) if is_split else 0
        work = forward_memory(shape, -(-row // sequence), ITEM_BYTES[self.ds.param_dtype], self.gpu)
        return combined([held, {"buffers": gathered}, work])

    def engine(self, *, with_cache: bool) -> dict[str, float]:
        work = ENGINE_WORK if self.gpu is not None else 0
        parts = {"weights": self.engine_weights(), "activations": work}
        return parts | ({"KV cache": max(0.0, self.cache())} if with_cache else {})

    def engine_weights(self) -> float:
        size = self.run.sizes[ENGINES].weight_bytes(ITEM_BYTES[self.ds.param_dtype])
        return size / self.config.vllm.num_gpus

    def cache(self) -> float:
        """Returns the bytes of the KV cache on a device: the engine's share of the memory that resting models
        leave, minus its weights and activations."""
        vllm, whole = self.config.vllm, self.run.cluster.kind.memory
        if vllm.kv_cache_gb is not None:
            return vllm.kv_cache_gb * 2**30
        if self.gpu is None:
            return CPU_KV_CACHE_GB * 2**30
        others = [role for role in self.roles if role != ENGINES]
        held = [sum(self.at_rest(role).values()) + LIBRARIES for role in others]
        free = 1 - sum(held) / whole if others else None
        share = memory_fraction(vllm.gpu_memory_utilization, free)
        return share * whole - self.engine_weights() - ENGINE_WORK - LIBRARIES

    def sync(self) -> dict[str, Parts]:
        """Returns the memory of the roles in a weight sync: two buckets on each side, and at ZeRO stage 3 the
        largest gathered parameter on the trainer's side."""
        vllm, active = self.config.vllm, {}
        transport = transfer_backend(self.config, self.gpu is not None)
        size, item = self.run.sizes["actor"], ITEM_BYTES[self.ds.param_dtype]
        largest = max(size.embedding, size.head) * item
        most = vllm.sync_bucket_mb << 20 if vllm.sync_bucket_mb else BUCKET_BYTES[transport]
        bucket = bucket_size(largest, size.weight_bytes(item), most)
        if ENGINES in self.roles:
            asleep = self.config.engines_sleep
            active[ENGINES] = combined([self.engine(with_cache=not asleep), {"buffers": 2 * bucket}])
        if "actor" in self.roles:
            buffers = 2 * bucket + (largest if self.ds.zero_stage == 3 else 0)
            active["actor"] = combined([self.at_rest("actor"), {"buffers": buffers}])
        return active


def _update(run: Setup, role: str, ranks: int, checkpointing: bool, **more: bool) -> RankMemory:
    ds, backend = run.config.ds, run.config.train.backend
    shape = run.sizes[role].on_rank(ds, backend, trained=True)
    row = -(-run.batches.row_tokens // ds.ring_attn_size)
    return training_memory(shape, ds, backend, row, checkpointing, ranks=ranks, gpu=run.cluster.gpu, **more)


def _frozen_idle(run: Setup, role: str, ranks: int) -> dict[str, float]:
    config = run.config
    if getattr(config, role).offload and run.cluster.kind.on_gpu:
        return {}
    weights = run.sizes[role].on_rank(config.ds, config.train.backend, trained=False).weight_bytes
    return {"weights": weights / ranks if config.ds.zero_stage == 3 else weights}


def _libraries(cluster: Cluster, processes: int) -> dict[str, float]:
    return {"libraries": LIBRARIES * processes} if cluster.kind.on_gpu else {}
