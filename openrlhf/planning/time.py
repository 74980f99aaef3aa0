"""The time of a step, phase by phase, from arithmetic and the rates of the hardware.

A phase takes the longest of what it computes, reads and sends, divided by the rate times the share of it
that such work reaches. The shares are assumptions, stated as constants here; benchmarks/gpu.py measures them
on a GPU."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf.backends.row_memory import ITEM_BYTES
from openrlhf.cluster.layout import ENGINES, Layout
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.planning.batches import Batches, Lengths
from openrlhf.planning.hardware import Cluster
from openrlhf.planning.memory import TRAINED, engine_cache
from openrlhf.planning.models import ModelSize

TRAIN_MFU = 0.4
"""Share of the data sheet's FLOP/s that forward and backward passes of dense models reach on packed rows.
Published for H100: 0.38 to 0.43 of Llama 3 405B (https://arxiv.org/abs/2407.21783, table 4)."""
MOE_MFU = 0.2
"""The same for mixtures of experts, whose products are smaller."""
FORWARD_MFU = 0.45
"""Share of FLOP/s in passes without gradients, prefill included."""
DECODE_RATE = 0.6
"""Share of the memory's rate at which an engine reads weights and cache while it decodes."""
LINK_RATE = 0.7
"""Share of the rate of links and networks that collectives reach."""
DECODE_LATENCY = 20e-6
"""Seconds of each layer of an engine's step, whatever its batch: starting kernels, and waiting for the other
tensor-parallel ranks."""
ENGINE_BATCH = {True: 1024, False: 256}
"""Maximum number of sequences of an engine's step on GPUs with and without at least 70 GB: vLLM's
defaults."""
HOST_ADAM = 50e9
"""Bytes per second of a node's memory while CPU cores update weights (ds.adam_offload)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Time of one phase of a step."""

    name: str
    seconds: float
    bound: str
    """Resource or event that the phase waits for."""


def forward_flops(size: ModelSize, tokens: float, length: float) -> float:
    """Returns the operations of a forward pass: 2 N D + 2 L Q D T, with N active parameters, D tokens, L
    layers, Q elements of a token's queries and T tokens of a sequence. The second term is attention's two
    products with the T / 2 tokens before each (https://arxiv.org/abs/2001.08361, section 2.1, causal)."""
    return tokens * (2 * size.active + 2 * size.shape.layers * size.shape.queries * length)


def training_flops(size: ModelSize, tokens: float, length: float, *, checkpointing: bool) -> float:
    """Returns three times the forward pass, because the backward pass is twice as long; four times with
    gradient checkpointing, which computes the forward pass again."""
    return (4 if checkpointing else 3) * forward_flops(size, tokens, length)


def supervised_time(
    config: SupervisedConfig,
    cluster: Cluster,
    sizes: Mapping[str, ModelSize],
    batches: Batches,
    lengths: Lengths,
) -> list[Phase]:
    """Returns the phases of an optimizer step."""
    tokens, devices = batches.samples * lengths.total, cluster.devices
    phases = []
    for role, size in sizes.items():
        if role == "model" or getattr(getattr(config, role), "precompute_enable", False):
            continue
        flops = forward_flops(size, tokens, lengths.total)
        phases.append(_compute(f"{role} forward", flops, cluster, devices, FORWARD_MFU))
    checkpointing = config.model.gradient_checkpointing_enable
    trainer = _Trainer(config, cluster, sizes["model"], batches, devices, checkpointing)
    return [*phases, *trainer.phases("update", tokens, lengths.total)]


def ppo_time(
    config: PPOConfig,
    cluster: Cluster,
    layout: Layout,
    sizes: Mapping[str, ModelSize],
    batches: Batches,
    lengths: Lengths,
) -> list[Phase]:
    """Returns the phases of an RL step, one after the other."""
    tokens = batches.samples * lengths.total
    phases = [_generate(config, cluster, layout, sizes, batches, lengths)]
    for role, place in layout.roles.items():
        if role == ENGINES or (role == "actor" and config.skips_old_log_probs):
            continue
        flops = forward_flops(sizes[role], tokens, lengths.total)
        name = {"critic": "values", "reward": "rewards"}.get(role, f"{role} log-probs")
        phases.append(_compute(name, flops, cluster, _devices(cluster, place.mesh.size), FORWARD_MFU))
    for role in (role for role in TRAINED if role in layout.roles):
        own = config.critic.gradient_checkpointing_enable if role == "critic" else None
        checkpointing = config.actor.gradient_checkpointing_enable if own is None else own
        devices = _devices(cluster, layout.roles[role].mesh.size)
        trainer = _Trainer(config, cluster, sizes[role], batches, devices, checkpointing)
        phases += trainer.phases(f"{role} update", tokens, lengths.total)
    phases.append(_sync(config, cluster, sizes[ENGINES]))
    if cluster.kind.on_gpu and (moved := _moved(config, cluster, layout, sizes)):
        phases.append(Phase(name="offload", seconds=moved / cluster.kind.host_rate, bound="link to the host"))
    return phases


def step_seconds(config: PPOConfig | SupervisedConfig, phases: list[Phase]) -> float:
    """Returns the time of a step: the sum of its phases, or with asynchronous training the longer of sampling
    and all others."""
    if isinstance(config, PPOConfig) and config.max_staleness:
        sampling = sum(phase.seconds for phase in phases if phase.name == "generate")
        return max(sampling, sum(phase.seconds for phase in phases) - sampling)
    return sum(phase.seconds for phase in phases)


class _Trainer:
    """The optimizer steps of one trained model."""

    def __init__(
        self,
        config: PPOConfig | SupervisedConfig,
        cluster: Cluster,
        size: ModelSize,
        batches: Batches,
        devices: int,
        checkpointing: bool,
    ) -> None:
        self.ds, self.cluster, self.size = config.ds, cluster, size
        self.batches, self.devices, self.checkpointing = batches, devices, checkpointing
        self.epochs = config.train.max_epochs if isinstance(config, PPOConfig) else 1

    def phases(self, name: str, tokens: float, length: float) -> list[Phase]:
        """Returns passes over `tokens` tokens in each epoch, and the optimizer's own time."""
        flops = self.epochs * training_flops(self.size, tokens, length, checkpointing=self.checkpointing)
        mfu = self.cluster.kind.mfu or (MOE_MFU if self.size.experts else TRAIN_MFU)
        computing = _compute(name, flops, self.cluster, self.devices, mfu)
        sending = self._sent() / (LINK_RATE * self.cluster.rate_between(self.devices))
        if self.devices == 1:
            sending = 0.0
        if self.ds.zero_stage == 3 or self.ds.overlap_comm:  # sent while the passes compute
            took, bound = max((computing.seconds, computing.bound), (sending, "communication of ZeRO"))
        else:
            took = computing.seconds + sending
            bound = computing.bound if computing.seconds >= sending else "communication of ZeRO"
        passes = Phase(name=name, seconds=took, bound=bound)
        return [passes, self._optimizer(name)]

    def _sent(self) -> float:
        """Returns the bytes that a rank sends in a step: 2 P for each optimizer step, in elements of the
        weights' dtype; 3 P for each row at stage 3, which gathers weights for both passes and scatters
        gradients (ZeRO, section 7)."""
        size = self.size.weight_bytes(ITEM_BYTES[self.ds.param_dtype]) / self.ds.parallel.tensor
        if self.ds.lora.rank:
            size = self.size.adapted * self.ds.lora.rank * ITEM_BYTES[self.ds.param_dtype]
        rows = self.batches.rows_per_rank * self.batches.updates
        if self.ds.zero_stage == 3:
            return 3 * size * rows
        return 2 * size * (rows if self.ds.overlap_comm else self.batches.updates)

    def _optimizer(self, name: str) -> Phase:
        """Returns the time of AdamW, which reads 16 bytes of each of its parameters (gradient, master weight,
        two moments) and writes 14 (the last three and the bf16 weight). With ds.adam_offload the CPU does so,
        and 6 bytes, the gradient and the new weight, cross the link to the host."""
        trained = self.size.adapted * self.ds.lora.rank or self.size.parameters
        own = trained / (self.devices if self.ds.zero_stage else 1)
        kind, per_node = self.cluster.kind, min(self.devices, self.cluster.per_node)
        if self.ds.adam_offload and kind.on_gpu:
            seconds = 30 * own * per_node / HOST_ADAM + 6 * own / kind.host_rate
            bound = "CPU memory"
        else:
            seconds, bound = 30 * own / (DECODE_RATE * kind.memory_rate), "memory"
        return Phase(name=f"{name}: optimizer", seconds=self.batches.updates * seconds, bound=bound)


def _generate(
    config: PPOConfig,
    cluster: Cluster,
    layout: Layout,
    sizes: Mapping[str, ModelSize],
    batches: Batches,
    lengths: Lengths,
) -> Phase:
    """Returns the time of sampling, the same on each engine:

        prefill   2 N S p / (G F)
        decode    r max(1, S / C) steps of C sequences, then the longest response with C / 16

    S sequences of an engine with p prompt and r response tokens, G GPUs of F FLOP/s each, C sequences at a
    time: what the KV cache and vLLM's batch hold. A step reads the weights and the cache of its sequences
    once; it takes the longer of that and of its products."""
    size, kind = sizes[ENGINES], cluster.kind
    gpus = config.vllm.num_gpus if kind.on_gpu else 1
    most = ENGINE_BATCH[kind.memory > 70e9]
    sequences = math.ceil(batches.samples / config.num_engines)
    item, length = ITEM_BYTES[config.ds.param_dtype], lengths.prompt + lengths.response / 2
    cache = max(0.0, engine_cache(config, cluster, layout, sizes))
    room = cache * gpus / (size.kv_bytes(item) * lengths.total)
    at_a_time = max(1.0, min(sequences, room, most))

    def step(batch: float) -> tuple[float, str]:
        read = size.read_by(batch) * item + batch * length * size.kv_bytes(item)
        reading = read / (gpus * kind.memory_rate * DECODE_RATE)
        computing = 2 * size.active * batch / (gpus * kind.flops * FORWARD_MFU)
        bound = "memory" if reading >= computing else "compute"
        return max(reading, computing) + DECODE_LATENCY * size.shape.layers, bound

    prefill = forward_flops(size, sequences * lengths.prompt, lengths.prompt) / (
        gpus * kind.flops * FORWARD_MFU
    )
    steps = lengths.response * max(1.0, sequences / at_a_time)
    took, bound = step(at_a_time)
    tail = max(0.0, lengths.longest - steps) * step(max(1.0, at_a_time / 16))[0]
    seconds = prefill + steps * took + tail
    if tail > seconds / 2:
        bound = "the longest response"
    elif room < min(sequences, most):
        bound = "KV cache"
    elif prefill > seconds / 2:
        bound = "prefill"
    return Phase(name="generate", seconds=seconds, bound=bound)


def _sync(config: PPOConfig, cluster: Cluster, size: ModelSize) -> Phase:
    """Returns the time of a weight sync: 2 P bytes are gathered at stage 3, sent to the engines, and loaded.
    With adapters alone, their bytes."""
    sent = float(size.weight_bytes(ITEM_BYTES[config.ds.param_dtype]))
    if config.ds.lora.rank and config.vllm.lora_sync == "adapter":
        sent = size.adapted * config.ds.lora.rank * ITEM_BYTES[config.ds.param_dtype]
    kind, trainers = cluster.kind, _devices(cluster, config.actor.num_gpus)
    seconds = 2 * sent / (DECODE_RATE * kind.memory_rate)
    if config.ds.zero_stage == 3 and trainers > 1:
        seconds += sent / (LINK_RATE * cluster.rate_between(trainers))
    if not config.engines_colocated:
        seconds += sent / (LINK_RATE * cluster.rate_between(cluster.devices))
    return Phase(name="weight sync", seconds=seconds, bound="links between devices")


def _moved(config: PPOConfig, cluster: Cluster, layout: Layout, sizes: Mapping[str, ModelSize]) -> float:
    """Returns the bytes that cross a GPU's link to the host in a step: optimizer states (12 P / R) and an
    engine's weights leave and come back, offloaded frozen models come once."""
    moved, item = 0.0, ITEM_BYTES[config.ds.param_dtype]
    for role, place in layout.roles.items():
        if not place.offload:
            continue
        size = sizes[role]
        if role in TRAINED:
            trained = size.adapted * config.ds.lora.rank or size.parameters
            moved += 2 * 12 * trained / (place.mesh.size if config.ds.zero_stage else place.mesh.tensor)
        elif role == ENGINES:
            moved += 2 * size.weight_bytes(item) / config.vllm.num_gpus
        else:
            moved += size.weight_bytes(item) / place.mesh.size
    return moved


def _devices(cluster: Cluster, ranks: int) -> int:
    """Returns the devices that ranks compute on; without GPUs they share the cores."""
    return ranks if cluster.kind.on_gpu else 1


def _compute(name: str, flops: float, cluster: Cluster, devices: int, mfu: float) -> Phase:
    return Phase(name=name, seconds=flops / (devices * cluster.kind.flops * mfu), bound="compute")
