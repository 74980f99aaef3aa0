"""Predicts the time of a step, phase by phase, from operation counts and the rates of the hardware.

A phase takes as long as the slowest of computing, reading and sending. Each takes its amount divided by an
achieved rate, which is a fraction of the peak rate. These fractions are assumptions and are constants of this
module; benchmarks/gpu.py measures some of them on a GPU."""

import math
from dataclasses import dataclass

from openrlhf.api import ENGINE_ROLE as ENGINES
from openrlhf.api import ITEM_BYTES, ModelSize, PPOConfig, SupervisedConfig, not_none, state_bytes
from openrlhf.tools.plan.batches import Setup
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


def supervised_time(run: Setup) -> list[Phase]:
    config, devices, phases = run.config, run.cluster.devices, []
    for role, size in run.sizes.items():
        if role != "model" and not getattr(getattr(config, role), "precompute_enable", False):
            phases.append(_forward(run, f"{role} forward", size, devices))
    checkpointing = config.model.gradient_checkpointing_enable
    return [*phases, *_update(run, "update", run.sizes["model"], devices, checkpointing)]


def ppo_time(run: Setup) -> list[Phase]:
    config, cluster, roles = run.config, run.cluster, not_none(run.layout).roles
    phases = [_generate(run)]
    for role, place in roles.items():
        if role == ENGINES or (role == "actor" and config.skips_old_log_probs):
            continue
        name = {"critic": "values", "reward": "rewards"}.get(role, f"{role} log-probs")
        phases.append(_forward(run, name, run.sizes[role], _devices(cluster, place.mesh.size)))
    for role in (role for role in TRAINED if role in roles):
        own = config.critic.gradient_checkpointing_enable if role == "critic" else None
        checkpointing = config.actor.gradient_checkpointing_enable if own is None else own
        devices = _devices(cluster, roles[role].mesh.size)
        phases += _update(run, f"{role} update", run.sizes[role], devices, checkpointing)
    phases.append(_sync(run))
    if cluster.kind.on_gpu and (moved := _moved(run)):
        phases.append(Phase(name="offload", seconds=moved / cluster.kind.host_rate, bound="link to the host"))
    return phases


def step_seconds(config: PPOConfig | SupervisedConfig, phases: list[Phase]) -> float:
    """Returns the seconds of a step: the sum of its phases, or with asynchronous training the maximum of
    sampling and the sum of all others."""
    if isinstance(config, PPOConfig) and config.max_staleness:
        sampling = sum(phase.seconds for phase in phases if phase.name == "generate")
        return max(sampling, sum(phase.seconds for phase in phases) - sampling)
    return sum(phase.seconds for phase in phases)


def _forward(run: Setup, name: str, size: ModelSize, devices: int) -> Phase:
    flops = forward_flops(size, run.tokens, run.lengths.total)
    return _compute(name, flops, run.cluster, devices, FORWARD_MFU)


def _update(run: Setup, name: str, size: ModelSize, devices: int, checkpointing: bool) -> list[Phase]:
    """Returns two phases of a trained model: the passes of all epochs, and the optimizer."""
    config, cluster = run.config, run.cluster
    epochs = config.train.max_epochs if isinstance(config, PPOConfig) else 1
    flops = epochs * training_flops(size, run.tokens, run.lengths.total, checkpointing=checkpointing)
    mfu = cluster.kind.mfu or (MOE_MFU if size.experts else TRAIN_MFU)
    computing = _compute(name, flops, cluster, devices, mfu)
    sending = _sent(run, size) / (LINK_RATE * cluster.rate_between(devices)) if devices > 1 else 0.0
    if config.ds.zero_stage == 3 or config.ds.overlap_comm:  # sent while the passes compute
        took, bound = max((computing.seconds, computing.bound), (sending, "communication of ZeRO"))
    else:
        took = computing.seconds + sending
        bound = computing.bound if computing.seconds >= sending else "communication of ZeRO"
    return [Phase(name=name, seconds=took, bound=bound), _optimizer(run, name, size, devices)]


def _sent(run: Setup, size: ModelSize) -> float:
    """Returns the bytes that a rank sends in a step: 2 P elements of the weights' dtype per optimizer step
    (per row with ds.overlap_comm). At stage 3 it is 3 P per row, because weights are gathered for both passes
    and gradients are scattered (ZeRO, section 7)."""
    ds, updates = run.config.ds, run.batches.updates
    item, rows = ITEM_BYTES[ds.param_dtype], run.batches.rows_per_rank * updates
    sent = size.weight_bytes(item) / ds.tensor_parallel_size
    if ds.lora.rank:
        sent = size.adapted * ds.lora.rank * item
    if ds.zero_stage == 3:
        return 3 * sent * rows
    return 2 * sent * (rows if ds.overlap_comm else updates)


def _optimizer(run: Setup, name: str, size: ModelSize, devices: int) -> Phase:
    """Returns the time of AdamW. For each of its parameters a rank reads 16 bytes (gradient, master weight,
    two moments) and writes 14 (the last three and the bf16 weight). With ds.adam_offload the CPU reads and
    writes them, and 6 bytes (the gradient and the new weight) cross the link to the host."""
    ds, kind = run.config.ds, run.cluster.kind
    own = size.trained(ds) / (devices if ds.zero_stage else 1)
    seconds, bound = 30 * own / (DECODE_RATE * kind.memory_rate), "memory"
    if ds.adam_offload and kind.on_gpu:
        per_node = min(devices, run.cluster.per_node)
        seconds, bound = 30 * own * per_node / HOST_ADAM + 6 * own / kind.host_rate, "CPU memory"
    return Phase(name=f"{name}: optimizer", seconds=run.batches.updates * seconds, bound=bound)


def _generate(run: Setup) -> Phase:
    """Returns the time of sampling, which is the same for each engine:

        prefill   2 N S p / (G F)
        decode    r max(1, S / C) steps of C sequences, then the rest of the longest response with C / 16

    An engine has G GPUs of F FLOP/s each and S sequences with p prompt and r response tokens. C of them run
    at a time, as many as the KV cache and vLLM's batch hold. A step takes the longer of reading (the weights
    and the cache of its sequences, once) and computing."""
    config, size, kind, lengths = run.config, run.sizes[ENGINES], run.cluster.kind, run.lengths
    gpus = config.vllm.num_gpus if kind.on_gpu else 1
    most = largest_batch(kind)
    sequences = math.ceil(run.batches.samples / config.num_engines)
    item, length = ITEM_BYTES[config.ds.param_dtype], lengths.prompt + lengths.response / 2
    room = max(0.0, engine_cache(run)) * gpus / (size.kv_bytes(item) * lengths.total)
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


def _sync(run: Setup) -> Phase:
    """Returns the time of a weight sync: the weights (or only the adapters) are gathered at stage 3, sent to
    the engines unless these share the trainer's GPUs, read and written."""
    config, cluster, size = run.config, run.cluster, run.sizes[ENGINES]
    sent = float(size.weight_bytes(ITEM_BYTES[config.ds.param_dtype]))
    if config.ds.lora.rank and config.vllm.lora_sync == "adapter":
        sent = size.adapted * config.ds.lora.rank * ITEM_BYTES[config.ds.param_dtype]
    trainers = _devices(cluster, config.actor.num_gpus)
    seconds = 2 * sent / (DECODE_RATE * cluster.kind.memory_rate)
    if config.ds.zero_stage == 3 and trainers > 1:
        seconds += sent / (LINK_RATE * cluster.rate_between(trainers))
    if not config.engines_colocated:
        seconds += sent / (LINK_RATE * cluster.rate_between(cluster.devices))
    return Phase(name="weight sync", seconds=seconds, bound="links between devices")


def _moved(run: Setup) -> float:
    """Returns the bytes that cross a GPU's link to the host in a step. Optimizer states and an engine's
    weights cross it twice, offloaded frozen models once."""
    config, ds, moved = run.config, run.config.ds, 0.0
    for role, place in not_none(run.layout).roles.items():
        if not place.offload:
            continue
        size, weights = run.sizes[role], run.sizes[role].weight_bytes(ITEM_BYTES[ds.param_dtype])
        if role in TRAINED:
            ranks = place.mesh.size if ds.zero_stage else place.mesh.tensor
            moved += 2 * state_bytes(ds, config.train.backend) * size.trained(ds) / ranks
        elif role == ENGINES:
            moved += 2 * weights / config.vllm.num_gpus
        else:
            moved += weights / place.mesh.size
    return moved


def _devices(cluster: Cluster, ranks: int) -> int:
    """Returns the number of devices that ranks compute on: 1 without GPUs, because they share the cores."""
    return ranks if cluster.kind.on_gpu else 1


def _compute(name: str, flops: float, cluster: Cluster, devices: int, mfu: float) -> Phase:
    return Phase(name=name, seconds=flops / (devices * cluster.kind.flops * mfu), bound="compute")
