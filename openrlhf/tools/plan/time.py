"""Predicts the time of a step, phase by phase, from operation counts and the rates of the hardware.

A phase takes as long as the slowest of computing, reading and sending. Each takes its amount divided by an
achieved rate, which is a fraction of the peak rate. These fractions are assumptions and are constants of this
module; benchmarks/gpu.py measures some of them on a GPU."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf.api import ENGINE_ROLE as ENGINES
from openrlhf.api import ITEM_BYTES, Layout, ModelSize, PPOConfig, SupervisedConfig, state_bytes
from openrlhf.tools.plan.batches import Batches, Lengths
from openrlhf.tools.plan.hardware import Cluster, Kind
from openrlhf.tools.plan.memory import TRAINED, engine_cache

TRAIN_MFU = 0.4
"""Fraction of the data sheet's FLOP/s that forward and backward passes of dense models reach on packed rows.
Published for Llama 3 405B on H100: 0.38 to 0.43 (https://arxiv.org/abs/2407.21783, table 4)."""
MOE_MFU = 0.2
"""The same fraction for mixtures of experts, whose matrix products are smaller."""
FORWARD_MFU = 0.45
"""Fraction of the data sheet's FLOP/s that passes without gradients reach, prefill included."""
DECODE_RATE = 0.6
"""Fraction of the memory bandwidth that an engine reaches when it reads weights and cache while decoding."""
LINK_RATE = 0.7
"""Fraction of the bandwidth of links and networks that collectives reach."""
DECODE_LATENCY = 20e-6
"""Seconds per layer of an engine's step, for any batch: kernel launches, and waiting for the other
tensor-parallel ranks."""

HOST_ADAM = 50e9
"""Bytes per second that a node's CPU cores read and write while they update weights (ds.adam_offload)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Time of one phase of a step."""

    name: str
    seconds: float
    bound: str
    """The bottleneck: the resource or event that the phase waits for."""


def forward_flops(size: ModelSize, tokens: float, length: float) -> float:
    """Returns the operations of a forward pass: 2 N D + 2 L Q D T, with N active parameters, D tokens, L
    layers, Q elements of a token's queries and T tokens per sequence. The second term is attention's two
    matrix products of each token with the T / 2 tokens before it (https://arxiv.org/abs/2001.08361, section
    2.1, causal)."""
    return tokens * (2 * size.active + 2 * size.shape.layers * size.shape.queries * length)


def training_flops(size: ModelSize, tokens: float, length: float, *, checkpointing: bool) -> float:
    """Returns the operations of forward and backward pass: three times the forward pass, or four times with
    gradient checkpointing, which repeats it."""
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
    """Returns the phases of an RL step, in order."""
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
    """Returns the seconds of a step: the sum of its phases, or with asynchronous training the maximum of
    sampling and the sum of all others."""
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
        """Returns two phases: the passes over `tokens` tokens in all epochs, and the optimizer."""
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
        """Returns the bytes that a rank sends in a step: 2 P elements of the weights' dtype per optimizer
        step (per row with ds.overlap_comm). At stage 3 it is 3 P per row, because weights are gathered for
        both passes and gradients are scattered (ZeRO, section 7)."""
        size = self.size.weight_bytes(ITEM_BYTES[self.ds.param_dtype]) / self.ds.tensor_parallel_size
        if self.ds.lora.rank:
            size = self.size.adapted * self.ds.lora.rank * ITEM_BYTES[self.ds.param_dtype]
        rows = self.batches.rows_per_rank * self.batches.updates
        if self.ds.zero_stage == 3:
            return 3 * size * rows
        return 2 * size * (rows if self.ds.overlap_comm else self.batches.updates)

    def _optimizer(self, name: str) -> Phase:
        """Returns the time of AdamW. For each of its parameters a rank reads 16 bytes (gradient, master
        weight, two moments) and writes 14 (the last three and the bf16 weight). With ds.adam_offload the CPU
        reads and writes them, and 6 bytes (the gradient and the new weight) cross the link to the host."""
        own = self.size.trained(self.ds) / (self.devices if self.ds.zero_stage else 1)
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
    """Returns the time of sampling, which is the same for each engine:

        prefill   2 N S p / (G F)
        decode    r max(1, S / C) steps of C sequences, then the rest of the longest response with C / 16

    An engine has G GPUs of F FLOP/s each and S sequences with p prompt and r response tokens. C of them run
    at a time, as many as the KV cache and vLLM's batch hold. A step takes the longer of reading (the weights
    and the cache of its sequences, once) and computing."""
    size, kind = sizes[ENGINES], cluster.kind
    gpus = config.vllm.num_gpus if kind.on_gpu else 1
    most = largest_batch(kind)
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


def largest_batch(kind: Kind) -> int:
    """Returns vLLM's default of the maximum number of sequences in an engine's step: 1,024 on GPUs of at
    least 70 GiB except A100, else 256 (`max_num_seqs` in vllm/engine/arg_utils.py)."""
    is_large = kind.on_gpu and kind.memory >= 70 * 2**30 and "A100" not in kind.name.upper()
    return 1024 if is_large else 256


def _sync(config: PPOConfig, cluster: Cluster, size: ModelSize) -> Phase:
    """Returns the time of a weight sync: the weights (or only the adapters) are gathered at stage 3, sent to
    the engines unless these share the trainer's GPUs, read and written."""
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
    """Returns the bytes that cross a GPU's link to the host in a step. Optimizer states and an
    engine's weights cross it twice, offloaded frozen models once."""
    moved, item = 0.0, ITEM_BYTES[config.ds.param_dtype]
    for role, place in layout.roles.items():
        if not place.offload:
            continue
        size = sizes[role]
        if role in TRAINED:
            moved += (
                2
                * state_bytes(config.ds, config.train.backend)
                * size.trained(config.ds)
                / (place.mesh.size if config.ds.zero_stage else place.mesh.tensor)
            )
        elif role == ENGINES:
            moved += 2 * size.weight_bytes(item) / config.vllm.num_gpus
        else:
            moved += size.weight_bytes(item) / place.mesh.size
    return moved


def _devices(cluster: Cluster, ranks: int) -> int:
    """Returns the number of devices that ranks compute on: 1 without GPUs, because they share the cores."""
    return ranks if cluster.kind.on_gpu else 1


def _compute(name: str, flops: float, cluster: Cluster, devices: int, mfu: float) -> Phase:
    return Phase(name=name, seconds=flops / (devices * cluster.kind.flops * mfu), bound="compute")
