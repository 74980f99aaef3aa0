"""Configuration sections that several commands share.

A field is a flag: `--actor.adam.lr` on the command line is `config.actor.adam.lr` in the code. Fields are
never renamed or changed after parsing, and the docstring under a field is its help. Values that follow from
several fields are properties.
"""

import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from openrlhf.config.choices import (
    FLASH_PACKAGES,
    BackendName,
    BadRows,
    ChatTemplate,
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
    SharePrefixes,
    Steps,
)
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.resume import Content, Free

KEY_VARIABLE = "OPENRLHF_REWARD_KEY"
"""Environment variable with the key of reward servers, read by servers and clients."""

# ---- commands


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Flags of every command that looks up models by name."""

    use_ms: Free[bool] = False
    """Look up names of models and datasets on ModelScope instead of the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class LaunchedConfig(HubConfig):
    """Flags of every command that a launcher may start on several ranks."""

    local_rank: Free[int] = -1
    """Rank on this machine. Launchers set it, and it is not read: the environment variable LOCAL_RANK has the
    same value."""


# ---- data


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenisation."""

    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer (Python) instead of the fast one (Rust)."""


@dataclass(frozen=True, kw_only=True)
class TemplateConfig(TokenizerConfig):
    """Chat templates and tokenisation."""

    apply_chat_template: bool = False
    """Format prompts and answers with the tokenizer's chat template."""
    tokenizer_chat_template: ChatTemplate | None = None
    """Jinja chat template that replaces the tokenizer's own: its text, or a file with it."""
    input_template: str | None = None
    """Text around each prompt, with `{}` where the prompt goes. Not read with data.apply_chat_template. None:
    the prompt alone."""


@dataclass(frozen=True, kw_only=True)
class RowTemplateConfig(TemplateConfig):
    """Chat templates of rows."""

    tools_key: str | None = "tools"
    """Column with the tools that the chat template lists: schemas in OpenAI's format, as a list or its JSON
    text. Rows may lack the column `tools`. None: not read."""

    @property
    def tools_column(self) -> str | None:
        """The column of tools, if rows must have it because a flag names it."""
        return self.tools_key if self.apply_chat_template and self.tools_key != "tools" else None


@dataclass(frozen=True, kw_only=True)
class LoaderConfig(TokenizerConfig):
    """Loading of rows for training."""

    dataloader_num_workers: Free[CountOrZero] = 0
    """Accepted for old commands and not read: the tokenizer's own threads read all rows before training
    starts."""


@dataclass(frozen=True, kw_only=True)
class RowFunctionConfig:
    """Conversion of rows."""

    row_func: str | None = None
    """Function of yours, as `file.py:name` or `module:name`, that each row of the datasets passes through
    first. It returns the row that the other flags read, or None to leave the row out. None: off."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(RowFunctionConfig):
    """Datasets to train on."""

    dataset: Content[str] = ""
    """Comma list of datasets, each as `path` or `path@data_dir`: a .json, .jsonl, .csv, .parquet or .arrow
    file (also compressed, such as .jsonl.gz), a folder of such files, a URL (s3://, gs://, hf://, https://)
    or a name on the hub. Required."""
    dataset_probs: str | None = None
    """Comma list of probabilities, one for each dataset, with which rows are drawn from the datasets. None:
    the datasets follow one another."""
    dataset_split: str = "train"
    """Split to read from datasets that have splits."""
    max_samples: Count = 100_000_000
    """Maximum number of rows, of each dataset and in total."""
    bad_rows: BadRows = "error"
    """Treatment of rows that cannot be used: a line that is not JSON, a missing column, a value of the wrong
    type. error: the run stops before training. skip: they are left out and counted."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Images in rows."""

    image_key: str = "images"
    """Column with the images of a row: one image or a list, each as a path, an https:// address, a data: URI,
    base64 text or bytes."""
    max_images_per_prompt: CountOrZero = 0
    """Maximum number of images in a row. 0: text only. Needs data.apply_chat_template."""
    image_root: Free[str | None] = None
    """Folder that image paths are relative to; a path that leads out of it is refused. None: the folder of
    each dataset file."""
    image_hosts: Free[tuple[str, ...] | None] = None
    """Hosts from which https:// images may be downloaded. None: no image is downloaded."""

    @property
    def reads_images(self) -> bool:
        return self.max_images_per_prompt > 0


# ---- models and optimizers


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """The model that is trained."""

    gradient_checkpointing_enable: Free[bool] = False
    """Recompute activations in the backward pass: less memory, slower steps."""
    gradient_checkpointing_reentrant: Free[bool] = False
    """Use torch's reentrant variant of gradient checkpointing."""
    freeze_visual_encoder: bool = False
    """Vision-language models: train only the language part."""
    freeze_moe_router: bool = False
    """MoE models: do not train the routers, which choose the experts of each token."""
    aux_loss_coef: PositiveOrZero = 0.0
    """MoE models: weight of the load-balancing loss, which rises when routers use experts unevenly."""
    model_kwargs: PassThrough = field(default_factory=PassThrough)
    """Options with which transformers loads the model, and its references: attributes of its config.json, and
    options of `from_pretrained` without a flag. As JSON, as a JSON file, or one by one,
    `--{section}.model_kwargs.NAME VALUE`."""


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    """AdamW."""

    lr: PositiveOrZero = 5e-6
    """Peak learning rate; with Muon only of the weights that Muon does not update."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Positive = 1e-8
    """Term added to the denominator of the update."""
    weight_decay: PositiveOrZero = 0.0
    """Decoupled weight decay. Biases, norms and other vectors have none."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon, an optimizer for weight matrices."""

    lr: PositiveOrZero = 0.02
    """Peak learning rate of the weight matrices."""
    momentum: Decay = 0.95
    """Decay rate of the momentum."""
    ns_steps: Count = 5
    """Newton-Schulz iterations. Accepted for old commands and not read: DeepSpeed's Muon always makes 5."""
    nesterov: bool = True
    """Nesterov momentum. Accepted for old commands and not read: DeepSpeed's Muon always uses it."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer, schedule and clipping of one model. Inherited, so the flags take the owner's prefix."""

    optim: OptimizerName = "adam"
    """Optimizer. adam: AdamW for all weights. muon: Muon for weight matrices and AdamW for the rest."""
    adam: AdamConfig = AdamConfig()
    muon: MuonConfig = MuonConfig()
    lr_scheduler: str = "cosine_with_min_lr"
    """Schedule of the learning rate after the warm-up, by its name in transformers (linear, cosine, constant,
    ...)."""
    lr_warmup_ratio: Fraction = 0.03
    """Fraction of all optimizer steps in which the learning rate rises to its peak. Step i of w warm-up steps
    (w is rounded up) has i / w of the peak. 0: no warm-up."""
    lr_decay_ratio: PositiveFraction = 0.1
    """Fraction of all optimizer steps, at the end of the run, in which the schedule warmup_stable_decay
    lowers the learning rate from its peak. Other schedules do not read it."""
    min_lr_ratio: Fraction = 0.1
    """Floor of the learning rate, as a fraction of its peak, in the schedules whose name ends in
    `_with_min_lr`."""
    max_norm: PositiveOrZero = 1.0
    """Maximum norm of the gradients; larger ones are scaled down to it. 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters."""

    rank: CountOrZero = 0
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: Count = 16
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Decay = 0.0
    """Dropout probability before the adapters, in the training passes of every command. The reference of DPO
    and KTO has no dropout. The first step does not depend on it, because adapters start at 0."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that get an adapter. all-linear: every linear layer except the head. Experts
    of MoE models get none."""


# ---- batches


@dataclass(frozen=True, kw_only=True)
class SeedConfig:
    """Seeds and determinism."""

    seed: CountOrZero = 42
    """Seed of all random numbers: order of the data, new weights, dropout and sampling."""
    full_determinism_enable: Free[bool] = False
    """Use only deterministic kernels, so that the same run gives the same bits. Slower."""


@dataclass(frozen=True, kw_only=True)
class BatchesConfig(SeedConfig):
    """Batches and training backend."""

    batch_size: Count = 128
    """Samples in one optimizer step, over all ranks."""
    micro_batch_size: Free[Count] = 1
    """Samples in one micro-batch: they are packed into one row, the unit of a forward pass. Memory and speed
    depend on it, the result does not."""
    dynamic_batch_enable: Free[bool] = False
    """Fill each row with as many samples as fit into train.max_tokens_per_gpu tokens, instead of a fixed
    micro_batch_size."""
    max_tokens_per_gpu: Free[Count] = 16192
    """Tokens in one row with train.dynamic_batch_enable, for each of the ds.ring_attn_size ranks that share
    it. A longer sample gets a row of its own."""
    verify_steps: Free[CountOrZero] = 1
    """Check this many first steps of the run by a second computation, without packing and chunks, on one row
    of each rank (docs/verification.md). 0: no step."""
    hooks: Free[tuple[str, ...] | None] = None
    """Own observers and checks of the steps, each a class as `folder/file.py:NAME` or `package.module:NAME`,
    or a name that an installed package registers (docs/extending.md)."""
    backend: BackendName = "deepspeed"
    """Training backend. deepspeed: DeepSpeed's ZeRO. torch: PyTorch alone, with fully_shard on several ranks
    (docs/models.md)."""
    rank_timeout: Free[Positive] = 1800.0
    """Maximum time, seconds, without an answer of a rank, or without progress of a rank that has work; after
    it the run ends. Also the limit of a collective operation."""
    grace_seconds: Free[PositiveOrZero] = 300.0
    """Maximum time, seconds, after Ctrl-C or SIGTERM to complete the current step and save a checkpoint, for
    runs with ckpt.save_steps. The exit code is then 75. 0: the run ends immediately."""
    on_nonfinite: Free[Literal["stop", "skip_step"]] = "stop"
    """Handling of an optimizer step whose loss or gradient is NaN or infinite; such a step never changes
    weights. stop: end the run. skip_step: continue with the next step; more than 10 such steps in a row end
    the run. Weights that are not finite always end the run (docs/errors.md)."""


# ---- training models: precision, sharding, kernels


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """Precision, sharding and kernels of the training models."""

    zero_stage: Free[Annotated[int, Range(at_least=0, at_most=3)]] = 2
    """ZeRO stage: what is sharded over the ranks. 0: nothing, 1: optimizer states, 2: also gradients, 3: also
    weights. A higher stage needs less memory and more communication."""
    param_dtype: ParamDtype = "bf16"
    """Data type of the weights. bf16 and fp16 keep fp32 master weights; fp32 computes everything in fp32."""
    zpg: Free[Count] = 1
    """ZeRO++ secondary partition: number of ranks among which stage 3 gathers weights, such as the GPUs of
    one node. 1: off."""
    adam_offload: Free[bool] = False
    """Keep optimizer states in CPU memory and update the weights there, with one thread for each CPU core of
    a rank. Saves GPU memory and slows down each step. ds.enable_sleep then has nothing left to move."""
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Data type in which gradients are accumulated over micro-batches. None: fp32 at stages 2 and 3,
    otherwise ds.param_dtype."""
    overlap_comm: Free[bool] = False
    """Reduce gradients during the backward pass, as stage 3 always does. Stage 2 then reduces them in every
    micro-batch and waits for the GPU after each, which is only faster on slow links. Needs more memory."""
    bucket_mb: Free[Count | None] = None
    """Communication bucket, MiB: gradients that are reduced at a time, and at stages 1 and 2 weights that are
    gathered at a time after a step. Each GPU has one buffer of this size, two with ds.overlap_comm. None:
    DeepSpeed's 500 million elements (1 GB of bf16)."""
    activation_offload: Free[bool] = False
    """With gradient checkpointing: keep the inputs of the layers in CPU memory until the backward pass. For
    long sequences: the GPU then holds the activations of about one layer. Each input is copied to the CPU and
    back."""
    deepcompile: Free[bool] = False
    """DeepSpeed's DeepCompile. Not implemented: DeepSpeed would reduce only the gradients of compiled graphs,
    and torch compiles only some of the rows, because their lengths differ."""
    tensor_parallel_size: Count = 1
    """Tensor parallelism: ranks that share the weight matrices of one model copy and read the same samples.
    For models whose weights and gradients do not fit one GPU, on GPUs with fast links."""
    ring_attn_size: Free[Count] = 1
    """Sequence (context) parallelism: ranks that share each row, each with a slice of its tokens. For
    sequences whose activations do not fit one GPU."""
    ring_attn_head_stride: Free[Count] = 1
    """Sequence parallelism: key and value heads that are gathered at a time, where ds.sequence_parallel_mode
    gathers them. More heads mean fewer messages and more memory."""
    sequence_parallel_mode: Free[SequenceParallelMode] = "auto"
    """Sequence parallelism: how attention sees the whole row. ulysses: each rank gets some of the heads for
    all tokens, so ds.ring_attn_size must divide the heads. ring: keys and values pass from rank to rank.
    allgather: every rank gathers all keys and values. auto: ulysses where the heads divide, otherwise
    ring."""
    packing_samples: Free[bool] = False
    """Accepted for old commands and not read: samples are always packed without padding, and attention never
    reaches from one sample into another."""
    attn_implementation: Free[str] = "auto"
    """Attention kernel by its name in transformers (eager, sdpa, flash_attention_2, ...), or one of the hub
    (kernels-community/..., which needs `pip install "openrlhf[kernels]"`). auto: flash attention over packed
    rows on a GPU in half precision, otherwise sdpa for one sequence at a time. A self-check compares both
    ways (docs/models.md): where packed rows would be wrong, auto runs the model once for each sequence."""
    share_prefixes: Free[SharePrefixes] = "auto"
    """Compute the common prefixes of a row's sequences once: samples of a prompt, answers of a pair. Losses
    and gradients stay the same up to rounding. auto: where a self-check of the model shows that they do
    (docs/models.md). true: refuse a model that fails it. false: compute every sequence whole."""
    experts_implementation: Free[ExpertsImplementation | None] = None
    """Kernel for the experts of MoE models. None: transformers chooses."""
    use_liger_kernel: Free[bool] = False
    """Use Liger's kernels for norms, rotary positions and gated MLPs. A self-check refuses the run if they
    compute something else than transformers' own. Needs a GPU and `pip install "openrlhf[liger]"`."""
    load_in_4bit: bool = False
    """QLoRA: freeze the linear layers of the trained model in NF4 and train adapters (ds.lora.rank) in
    ds.param_dtype. References and teachers are not quantised. Needs `pip install "openrlhf[qlora]"`."""
    lora: LoraConfig = LoraConfig()
    use_universal_ckpt: Free[bool] = False
    """Resume from the universal form of the last checkpoint, which `ckpt_ds_zero_to_universal.sh` makes. To
    resume with other ranks or another ds.zero_stage, neither that form nor this flag is needed."""
    enable_sleep: Free[bool] = False
    """Move optimizer states, gradients and master weights to CPU memory while other models or engines use the
    GPU. For RL on shared GPUs."""
    config: PassThrough = field(default_factory=PassThrough)
    """Options of DeepSpeed's configuration without a flag, for models that learn: as JSON, as a JSON file, or
    one by one, `--ds.config.SECTION.NAME VALUE` (docs/clusters.md)."""

    @property
    def attention(self) -> str:
        """Attention of models, as transformers names it. Sequence parallelism replaces flash attention."""
        shared = self.ring_attn_size > 1 and self.attn_implementation in FLASH_PACKAGES
        return "auto" if shared else self.attn_implementation


@dataclass(frozen=True, kw_only=True)
class ScorerDeepSpeedConfig(DeepSpeedConfig):
    """Precision, sharding and kernels of the training models."""

    value_head_prefix: str = "score"
    """Name of the scalar head in the saved model. AutoModelForSequenceClassification loads only models whose
    head is named score. A name in the model's config.json takes precedence."""


# ---- engines


@dataclass(frozen=True, kw_only=True)
class EngineMemoryConfig:
    """Memory of a vLLM engine."""

    enforce_eager: Free[bool] = False
    """Use no CUDA graphs: less memory and a faster start, slower sampling."""
    gpu_memory_utilization: PositiveFraction = 0.95
    """Fraction of the GPU's memory that an engine may use."""
    kv_cache_gb: Free[Positive | None] = None
    """Size of an engine's KV cache, GB. None: what vllm.gpu_memory_utilization leaves, or 0.25 without a
    GPU."""
    engine_args: PassThrough = field(default_factory=PassThrough)
    """Options of vLLM's EngineArgs without a flag: as JSON, as a JSON file, or one by one,
    `--vllm.engine_args.NAME VALUE` (docs/clusters.md)."""


# ---- outputs


@dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """Outputs: the final model and checkpoints."""

    output_dir: str = "./ckpt"
    """Folder of the final Hugging Face model and tokenizer. A folder that already holds a model is refused,
    unless the run resumes (ckpt.load_enable) or ckpt.overwrite is set."""
    overwrite: bool = False
    """Overwrite the model that is in ckpt.output_dir."""
    path: str | None = None
    """Folder of resumable checkpoints, which all nodes share. None: `{ckpt.output_dir}/checkpoints`."""
    save_steps: Steps = -1
    """Save a checkpoint every N steps. -1: never."""
    async_save: bool = False
    """Write checkpoints in the background while training continues. Each rank first copies its part to host
    memory, which must have room for the checkpoint's files. The checkpoint is complete at the end of the
    first step after its last file is on the disk; the next save and the end of the run wait for it. The
    copies of ckpt.save_hf are not written in the background."""
    save_hf: bool = False
    """With each checkpoint, also write a Hugging Face model to `{path}/{tag}_hf`, which is kept as long as
    the checkpoint."""
    disable_ds: bool = False
    """Write no resumable checkpoints, only the models of ckpt.save_hf."""
    max_num: Count = 3
    """Maximum number of checkpoints. The one with the worst evaluation metric is deleted first; one without a
    metric counts as worst, and among equals the oldest is deleted."""
    max_mem: Positive = 1e8
    """Size of all kept checkpoints together, GB."""
    max_age_hours: Positive | None = None
    """Age from which checkpoints are deleted when a newer one is complete, hours. The one with the best
    evaluation metric is kept. None: no limit."""
    push_to_hub: str | None = None
    """Repository on the Hugging Face hub to which the final model is uploaded, as `owner/name`; a new one is
    private. Needs HF_TOKEN or `hf auth login`. None: no upload."""
    load_enable: bool = False
    """Resume from the last undamaged checkpoint in ckpt.path, if there is one."""
    fork_from: str | None = None
    """With ckpt.load_enable, where ckpt.path has no checkpoint yet: begin with a copy of this one of another
    run (a folder `global_step{N}`; in RL, the one in `_actor`). The settings may differ, and are recorded."""
    verify: Literal["full", "structure"] = "full"
    """Check of a checkpoint before a run resumes from it. full: read every file and compare it with the
    SHA-256 of the manifest, at about 1 GB a second for each core. structure: only compare names and sizes,
    and the SHA-256 of files up to 1 MiB."""

    @property
    def folder(self) -> str:
        """Folder of resumable checkpoints."""
        return self.path or f"{self.output_dir}/checkpoints"

    @property
    def is_used(self) -> bool:
        """True if checkpoints are read or written."""
        return self.load_enable or self.save_steps > 0

    @property
    def saves_state(self) -> bool:
        """True if checkpoints are written from which a run can resume."""
        return self.save_steps > 0 and not self.disable_ds

    @property
    def has_parts(self) -> bool:
        """True if every rank reads or writes its own part of a checkpoint."""
        return self.load_enable or self.saves_state


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    key: str | None = None
    """@FILE for the API key in a file, True for the key of WANDB_API_KEY or `wandb login`, or the key itself,
    which is then in the process list. It is never written to a file or a log. None, or the variable
    WANDB_MODE=disabled: off. Needs `pip install "openrlhf[wandb]"`."""
    org: str | None = None
    """Entity: a user or a team."""
    group: str | None = None
    """Group of the run."""
    project: str = "openrlhf"
    """Project, also in trackio, MLflow (as experiment) and SwanLab."""
    run_name: str = ""
    """Name of the run, also in TensorBoard and of the run folder. The default is unique: the command, the
    start time and a random number."""

    @property
    def is_used(self) -> bool:
        """True if metrics are sent; WANDB_MODE=disabled, W&B's own switch, turns this off."""
        return self.key is not None and os.environ.get("WANDB_MODE") != "disabled"


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """Metrics, and where they go."""

    logging_steps: Count = 1
    """Log metrics every N steps, and at evaluations."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard, whose files go to `{tensorboard_dir}/{run_name}`. None: off."""
    wandb: WandbConfig = WandbConfig()
    trackers: tuple[str, ...] | None = None
    """Additional trackers of metrics: tensorboard, wandb, trackio, mlflow, swanlab, a class as
    `folder/file.py:NAME` or `package.module:NAME`, or a name that an installed package registers
    (openrlhf.trackers)."""
    tracker_options: tuple[str, ...] | None = None
    """Options of the trackers as `NAME=VALUE ...`. They are written to config.yaml, so use no secrets."""
    run_dir: str | None = None
    """Run folder: journal, configuration and metrics. None:
    `{ckpt.output_dir}/runs/{logger.wandb.run_name}`."""


def wandb_for(command: str) -> WandbConfig:
    """Returns the W&B section with a command's project and a new run name."""
    run_name = f"{command}_{datetime.now():%m%dT%H:%M}_{secrets.token_hex(3)}"
    return WandbConfig(project=f"openrlhf_train_{command}", run_name=run_name)


def logger_for(command: str) -> Any:
    """Returns a dataclass field: the logger section with the defaults of a command."""
    return field(default_factory=lambda: LoggerConfig(wandb=wandb_for(command)))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(LaunchedConfig):
    """Sections of every training command."""

    ckpt: CkptConfig = CkptConfig()
    logger: LoggerConfig = LoggerConfig()

    @property
    def run_dir(self) -> str:
        """Folder of the run's journal, configuration and metrics."""
        return self.logger.run_dir or f"{self.ckpt.output_dir}/runs/{self.logger.wandb.run_name}"

    @property
    def trained_models(self) -> dict[str, tuple[str, str]]:
        """Role of each model that learns -> its flag, and its name or path. The first is the policy, or the
        only one."""
        raise NotImplementedError

    @property
    def exports(self) -> dict[str, str]:
        """Flag -> folder of each model that the run writes, in the order of `trained_models`."""
        return {"--ckpt.output_dir": self.ckpt.output_dir}

    @property
    def folders(self) -> dict[str, str]:
        """Flag -> folder of all that the run writes."""
        found = self.exports | {"--logger.run_dir": self.run_dir}
        if self.ckpt.is_used:
            found["--ckpt.path"] = self.ckpt.folder
        if self.logger.tensorboard_dir:
            found["--logger.tensorboard_dir"] = self.logger.tensorboard_dir
        return found

    @property
    def checkpoints(self) -> list[str]:
        """Folder of the checkpoints of each trained model."""
        return [self.ckpt.folder]

    @property
    def keeps_best(self) -> bool:
        """True if the checkpoint with the best evaluation is kept besides the newest ones."""
        return False

    @property
    def averages(self) -> bool:
        """True if checkpoints have a moving average of the policy's weights."""
        return False


def is_due(step: int, every: int) -> bool:
    """Returns whether an interval is due at a step: N is due after steps N, 2N, 3N, ...; -1 and 0 never."""
    return every > 0 and step % every == 0
