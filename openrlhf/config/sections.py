"""Configuration sections that several commands share.

A field is a flag: `--actor.adam.lr` on the command line is `config.actor.adam.lr` in the code. Fields are
never renamed or changed after parsing, and the docstring under a field is its help. Values that follow from
several fields are properties.
"""

import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Literal

from openrlhf.config.choices import (
    FLASH_PACKAGES,
    Count,
    CountOrZero,
    Decay,
    ExpertsImplementation,
    Fraction,
    OptimizerName,
    ParamDtype,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    Range,
    SequenceParallelMode,
    Steps,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig:
    """AdamW."""

    lr: PositiveOrZero = 5e-6
    """Peak learning rate. With Muon: of the weights that Muon does not take."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: PositiveOrZero = 0.0
    """Decoupled weight decay. Biases, norms and other vectors are exempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """Muon, for matrices."""

    lr: PositiveOrZero = 0.02
    """Peak learning rate of the matrices."""
    momentum: Decay = 0.95
    """Decay rate of the momentum."""
    ns_steps: Count = 5
    """Newton-Schulz steps. Accepted for old commands: DeepSpeed's Muon takes 5."""
    nesterov: bool = True
    """Nesterov momentum. Accepted for old commands: DeepSpeed's Muon has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer, schedule and clipping of one model. Inherited, so the flags take the owner's prefix."""

    optim: OptimizerName = "adam"
    """Optimizer: AdamW for everything, or Muon for matrices and AdamW for the rest."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    muon: MuonConfig = field(default_factory=MuonConfig)
    lr_scheduler: str = "cosine_with_min_lr"
    """Shape of the schedule after the warm-up, by its name in transformers."""
    lr_warmup_ratio: Fraction = 0.03
    """Fraction of all optimizer steps spent warming up, rounded up to w steps: the first has 1 / w of the
    peak learning rate, the w-th all of it. 0: the peak at once."""
    lr_decay_ratio: PositiveFraction = 0.1
    """Fraction of all optimizer steps, the last ones, in which warmup_stable_decay falls from the peak."""
    min_lr_ratio: Fraction = 0.1
    """Floor of the schedules that end in `_with_min_lr`, as a fraction of the peak learning rate."""
    max_norm: PositiveOrZero = 1.0
    """Gradients are clipped to this norm. 0: no clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: CountOrZero = 0
    """Rank of the adapters. 0: the whole model is trained."""
    alpha: Count = 16
    """Adapters are scaled by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout before the adapters in training passes of every command. The reference of DPO and KTO has none,
    and the first step does not depend on it: adapters begin as 0."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get an adapter; all-linear: every one but the head. Experts of MoE
    models get none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The type of a model's weights."""

    dtype: ParamDtype
    in_4bit: bool
    """Frozen weights below adapters are NF4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Kernels of a model, by names of transformers; None: its choice."""

    attention: str
    experts: ExpertsImplementation | None
    liger: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """How many ranks share each row and each matrix, and how rows are shared."""

    sequence: int
    tensor: int
    mode: SequenceParallelMode
    heads_at_a_time: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Zero:
    """ZeRO sharding of weights, gradients and optimizer states."""

    stage: int
    adam_offload: bool
    universal_checkpoint: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """Offloading of states that a GPU does not need at the moment."""

    sleeps: bool
    """Optimizer states, while others use the GPU."""
    activations_on_host: bool
    """Inputs of checkpointed layers, until the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """Precision, sharding and kernels of the training models."""

    zero_stage: Annotated[int, Range(at_least=0, at_most=3)] = 2
    """ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    param_dtype: ParamDtype = "bf16"
    """Type of the weights. bf16 and fp16 keep fp32 master weights; fp32 computes everything in float32."""
    zpg: Count = 1
    """ZeRO++ secondary partition: number of ranks among which stage 3 gathers weights. 1: off."""
    adam_offload: bool = False
    """Keep optimizer states in CPU memory, and update the weights there, on as many threads as each rank has
    cores. Then ds.enable_sleep has nothing left to move."""
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type in which the gradients of a step's micro-batches add up. None: fp32 at stages 2 and 3, and else
    param_dtype."""
    overlap_comm: bool = False
    """Reduce gradients while the backward pass runs, which stage 3 always does. Stage 2 reduces them in every
    micro-batch, and with this it waits after each for the GPU: for slow links. Needs more memory."""
    bucket_mb: Count | None = None
    """MiB of gradients that are reduced at a time, and at stages 1 and 2 of weights that are gathered at a
    time after a step. Each GPU has a buffer of this size, two with overlap_comm. None: DeepSpeed's 500
    million elements, 1 GB of bf16."""
    activation_offload: bool = False
    """With gradient checkpointing, keep the inputs of the layers in CPU memory until the backward pass. For
    long rows: what is left on the GPU is about one layer. Each input travels twice over the bus."""
    deepcompile: bool = False
    """DeepSpeed's DeepCompile."""
    tensor_parallel_size: Count = 1
    """Ranks that share the matrices of one model copy (tensor parallelism), and have the same samples. For
    models whose weights and gradients do not fit one GPU, on GPUs with fast links."""
    ring_attn_size: Count = 1
    """Ranks that share each row (sequence parallelism): every one computes a slice of its tokens. For
    sequences whose activations do not fit one GPU."""
    ring_attn_head_stride: Count = 1
    """Heads of keys and values that are gathered at a time where sequence_parallel_mode gathers them. More of
    them: fewer messages, and more memory."""
    sequence_parallel_mode: SequenceParallelMode = "auto"
    """How attention sees all of a row that ranks share. ulysses: each rank has a part of the heads, which
    must divide. In the others each has all heads for its slice of the tokens. ring: keys and values pass from
    rank to rank. allgather: every rank gathers them. auto: ulysses where the heads divide, else ring."""
    packing_samples: bool = False
    """Accepted for old commands: rows are always packed (padding-free), and attention never crosses a
    border."""
    attn_implementation: str = "auto"
    """Attention kernel by its name in transformers (eager, sdpa, flash_attention_2, ...); one of the hub
    (kernels-community/...) needs `pip install "openrlhf[kernels]"`. auto: flash attention over packed rows
    on a GPU in half precision, otherwise sdpa one sequence at a time. The model is checked (docs/models.md):
    where packed rows would be wrong, auto runs it once for each sequence."""
    experts_implementation: ExpertsImplementation | None = None
    """Kernel for the experts of MoE models. None: as transformers chooses."""
    use_liger_kernel: bool = False
    """Liger's kernels for norms, rotary positions and gated MLPs. The model is checked: where it would
    compute something else than with transformers' own, the run is refused. Needs a GPU and
    `pip install "openrlhf[liger]"`."""
    load_in_4bit: bool = False
    """QLoRA: the linear layers of the model to train are frozen in NF4, with adapters (lora.rank) in
    param_dtype. References and teachers are not quantised. Needs `pip install "openrlhf[qlora]"`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    use_universal_ckpt: bool = False
    """Resume from the universal form of the last checkpoint, where `ckpt_ds_zero_to_universal.sh` has made
    one. Another number of ranks or another zero_stage needs neither the form nor this flag."""
    enable_sleep: bool = False
    """Move optimizer states, gradients and master weights to the CPU while others use the GPU. For RL on
    shared GPUs."""

    @property
    def precision(self) -> Precision:
        return Precision(dtype=self.param_dtype, in_4bit=self.load_in_4bit)

    @property
    def kernels(self) -> Kernels:
        """Kernels of models: attn_implementation, but auto in place of flash attention with sequence
        parallelism."""
        shared = self.ring_attn_size > 1 and self.attn_implementation in FLASH_PACKAGES
        return Kernels(
            attention="auto" if shared else self.attn_implementation,
            experts=self.experts_implementation,
            liger=self.use_liger_kernel,
        )

    @property
    def parallel(self) -> Parallelism:
        return Parallelism(
            sequence=self.ring_attn_size,
            tensor=self.tensor_parallel_size,
            mode=self.sequence_parallel_mode,
            heads_at_a_time=self.ring_attn_head_stride,
        )

    @property
    def zero(self) -> Zero:
        return Zero(
            stage=self.zero_stage,
            adam_offload=self.adam_offload,
            universal_checkpoint=self.use_universal_ckpt,
        )

    @property
    def offloading(self) -> Offloading:
        return Offloading(sleeps=self.enable_sleep, activations_on_host=self.activation_offload)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerDeepSpeedConfig(DeepSpeedConfig):
    """Precision, sharding and kernels of the training models."""

    value_head_prefix: str = "score"
    """Name of the scalar head in the saved model. Only a model whose head is called score loads with
    AutoModelForSequenceClassification. A value in the model's config.json wins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptConfig:
    """What is written to disk, and when."""

    output_dir: str = "./ckpt"
    """Where the final Hugging Face model and tokenizer go. A folder that holds a model is refused, unless the
    run resumes (load_enable) or overwrite is set."""
    overwrite: bool = False
    """Write over the model that is in output_dir."""
    path: str | None = None
    """Where resumable checkpoints go; a folder that all nodes share. None:
    `{ckpt.output_dir}/checkpoints`."""
    save_steps: Steps = -1
    """Save a checkpoint every N steps. -1: never."""
    save_hf: bool = False
    """With each checkpoint, also write a Hugging Face model to `{path}/{tag}_hf`, which is kept as long."""
    disable_ds: bool = False
    """Write no resumable checkpoints, only what save_hf asks for."""
    max_num: Count = 3
    """Checkpoints to keep; the worst metric goes first, then the oldest."""
    max_mem: Positive = 1e8
    """Size of all kept checkpoints together, GB."""
    push_to_hub: str | None = None
    """Repository on the Hugging Face hub that the final model goes to, as `owner/name`; private where it does
    not exist yet. Needs HF_TOKEN or `hf auth login`. None: nothing is uploaded."""
    load_enable: bool = False
    """Resume from the last sound checkpoint in `path`, if there is one."""
    verify: Literal["full", "structure"] = "full"
    """How a checkpoint is checked before a run resumes from it. full: every file is read and compared with
    the SHA-256 of its manifest, about 1 GB a second for each core. structure: the names and sizes of files,
    and the content of those up to 1 MiB."""

    @property
    def folder(self) -> str:
        """Folder of resumable checkpoints."""
        return self.path or f"{self.output_dir}/checkpoints"

    @property
    def is_used(self) -> bool:
        """True if checkpoints are read or written."""
        return self.load_enable or self.save_steps > 0

    @property
    def has_parts(self) -> bool:
        """True if every rank reads or writes its own part of a checkpoint."""
        return self.load_enable or (self.save_steps > 0 and not self.disable_ds)


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig:
    """Weights & Biases."""

    key: str | None = None
    """API key, or True to log in with WANDB_API_KEY or `wandb login`. None, and WANDB_MODE=disabled: off.
    Never written to a file or a log. Needs `pip install "openrlhf[wandb]"`."""
    org: str | None = None
    """Entity: user or team."""
    group: str | None = None
    """Group of the run."""
    project: str = "openrlhf"
    """Project."""
    run_name: str = ""
    """Name of the run, here and in TensorBoard and the run folder: the command, the start time, and a random
    number, so that no two runs share one."""

    @property
    def is_used(self) -> bool:
        """True if metrics are sent; WANDB_MODE=disabled, W&B's own switch, turns this off."""
        return self.key is not None and os.environ.get("WANDB_MODE") != "disabled"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """Where metrics go."""

    logging_steps: Count = 1
    """Log every N steps."""
    tensorboard_dir: str | None = None
    """TensorBoard files go to `{tensorboard_dir}/{run_name}`. None: off."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trackers: tuple[str, ...] | None = None
    """More places where metrics go: tensorboard and wandb; classes as `folder/file.py:NAME` or
    `package.module:NAME`; names that installed packages register (openrlhf.trackers)."""
    tracker_options: tuple[str, ...] | None = None
    """`NAME=VALUE ...`: options of trackers. Written to config.yaml, so no secrets."""
    run_dir: str | None = None
    """Journal, configuration and metrics of this run. None:
    `{ckpt.output_dir}/runs/{logger.wandb.run_name}`."""


def logger_for(command: str, project: str) -> LoggerConfig:
    """Returns the default logger section of a command."""
    return LoggerConfig(wandb=wandb_for(command, project))


def wandb_for(command: str, project: str) -> WandbConfig:
    """Returns the W&B section with a command's project and a new run name."""
    run_name = f"{command}_{datetime.now():%m%dT%H:%M}_{secrets.token_hex(3)}"
    return WandbConfig(project=project, run_name=run_name)


def run_dir(logger: LoggerConfig, ckpt: CkptConfig) -> str:
    return logger.run_dir or f"{ckpt.output_dir}/runs/{logger.wandb.run_name}"


def is_due(step: int, every: int) -> bool:
    """Returns whether an interval is due at a step: N is due after steps N, 2N, 3N, ...; -1 and 0 never."""
    return every > 0 and step % every == 0
