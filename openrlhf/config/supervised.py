"""Everything that `train_sft` can be told, in sections that other supervised commands can take over."""

from dataclasses import dataclass, field

from openrlhf.config.choices import BadRows, Count, CountOrZero, PositiveOrZero, Steps
from openrlhf.config.sections import (
    CkptConfig,
    DeepSpeedConfig,
    LoggerConfig,
    OptimConfig,
    logger_for,
    run_dir,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model that is trained."""

    model_name_or_path: str = ""
    """Hugging Face name or folder of the model to train. Required."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    gradient_checkpointing_reentrant: bool = False
    """The reentrant variant of gradient checkpointing."""
    aux_loss_coef: PositiveOrZero = 0.0
    """Weight of the balance loss of MoE models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where rows come from, and how they become tokens."""

    dataset: str = ""
    """Comma list of `path[@data_dir]`: .json .jsonl .csv .parquet .arrow files, folders, hub names.
    Required."""
    dataset_probs: str | None = None
    """Comma list of probabilities, one for each dataset, to mix them. None: one after the other."""
    dataset_split: str = "train"
    """Split to take where a dataset has splits."""
    max_samples: Count = 1_000_000
    """Rows to use, of each dataset and in total."""
    max_len: Count = 2048
    """Longest sequence, tokens; the rest is cut off."""
    apply_chat_template: bool = False
    """Format rows with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    dataloader_num_workers: CountOrZero = 0
    """Accepted for old commands: rows are tokenised before training starts, by the tokenizer's own
    threads."""
    bad_rows: BadRows = "error"
    """A row that cannot be used (missing column, wrong type, nothing to train on) stops the run, or is left
    out and counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out rows."""

    dataset: str | None = None
    """Evaluation rows, as data.dataset. None: no evaluation."""
    split: str = "train"
    """Split to take where the dataset has splits."""
    steps: Steps = -1
    """Evaluate every N optimizer steps. -1: once per epoch."""
    max_samples: Count | None = None
    """Rows to use. None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batches and passes."""

    batch_size: Count = 128
    """Sequences in one optimizer step, over all ranks."""
    micro_batch_size: Count = 8
    """Sequences in one packed row, the unit of a forward pass: memory and speed, not the result, depend on
    it."""
    dynamic_batch_enable: bool = False
    """Fill rows up to max_tokens_per_gpu tokens; micro_batch_size is then not read."""
    max_tokens_per_gpu: Count = 16192
    """Tokens in one row with dynamic_batch_enable. A longer sequence gets a row of its own."""
    max_epochs: Count = 2
    """Passes over the rows."""
    seed: CountOrZero = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Only deterministic kernels: the same run gives the same bits, slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedConfig(OptimConfig):
    """What every supervised command has."""

    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ds: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    local_rank: int = -1
    """Set by the launchers; torchrun and deepspeed say the same in the environment."""
    use_ms: bool = False
    """Download from ModelScope in place of the Hugging Face hub."""

    @property
    def run_dir(self) -> str:
        return run_dir(self.logger, self.ckpt)


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTModelConfig(ModelConfig):
    """The model that is trained."""

    pretrain_mode_enable: bool = False
    """Continued pre-training: loss on all tokens, and no end-of-sequence token is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTDataConfig(DataConfig):
    """Where rows come from, and how they become tokens."""

    input_key: str = "input"
    """Column with the prompt: text, or messages with apply_chat_template."""
    output_key: str | None = None
    """Column with the response. None: the last message of input_key, or with model.pretrain_mode_enable plain
    text."""
    input_template: str | None = "User: {}\nAssistant: "
    """Text around the prompt, which replaces `{}`. Not read with apply_chat_template."""
    multiturn: bool = False
    """Loss on every assistant turn, not only on the last. Needs apply_chat_template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    ckpt: CkptConfig = field(default_factory=lambda: CkptConfig(path="./ckpt/checkpoints_sft"))
    logger: LoggerConfig = field(default_factory=lambda: logger_for("sft", "openrlhf_train_sft"))
