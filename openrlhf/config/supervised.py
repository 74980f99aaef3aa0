"""Configuration of the supervised commands: SFT, reward models, process reward models, DPO, KTO and
distillation."""

from dataclasses import dataclass, field

from openrlhf.config.choices import (
    BackendName,
    BadRows,
    Count,
    CountOrZero,
    DistillationLoss,
    Fraction,
    PairLoss,
    Positive,
    PositiveOrZero,
    Smoothing,
    Steps,
)
from openrlhf.config.sections import (
    AdamConfig,
    CkptConfig,
    DeepSpeedConfig,
    LoggerConfig,
    OptimConfig,
    ScorerDeepSpeedConfig,
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
    dropout_enable: bool = False
    """Train with the dropout, skipped layers and router noise that the model's config.json asks for. Not in
    DPO and KTO, whose policy must begin as its reference. Adapters have ds.lora.dropout."""
    freeze_visual_encoder: bool = False
    """Vision-language models: train the language part only."""
    aux_loss_coef: PositiveOrZero = 0.0
    """Weight of the balance loss of MoE models, which rises where routers use experts unevenly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where rows come from, and how they become tokens."""

    dataset: str = ""
    """Comma list of `path[@data_dir]`: .json .jsonl .csv .parquet .arrow files, also packed (.jsonl.gz), and
    folders of them, here or at URLs (s3://, gs://, hf://, https://), hub names. Required."""
    dataset_probs: str | None = None
    """Comma list of probabilities, one for each dataset, to mix them. None: one after the other."""
    dataset_split: str = "train"
    """Split to take where a dataset has splits."""
    max_samples: Count = 1_000_000
    """Rows to use, of each dataset and in total."""
    max_len: Count = 2048
    """Longest sequence, tokens; the rest is cut off."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    dataloader_num_workers: CountOrZero = 0
    """Accepted for old commands: rows are tokenised before training starts, by the tokenizer's own
    threads."""
    bad_rows: BadRows = "error"
    """A row that cannot be used (a line that is no JSON, missing column, a type that most rows do not have)
    stops the run, or is left out and counted. Rows without anything to learn, and prompts without room for an
    answer, are always left out and counted."""
    cache_enable: bool = True
    """Keep tokenised rows on disk, and read them from there when the files, the tokenizer and the data flags
    are the same again."""
    cache_dir: str | None = None
    """Where they are kept. None: `$OPENRLHF_CACHE`, or `~/.cache/openrlhf`."""

    @property
    def reads_images(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateDataConfig(DataConfig):
    """Where rows come from, and how they become tokens."""

    apply_chat_template: bool = False
    """Format rows with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageDataConfig(TemplateDataConfig):
    """Where rows come from, and how they become tokens."""

    image_key: str = "images"
    """Column with images: a path, https:// address, data: URI, base64 or bytes, or a list of them."""
    max_images_per_prompt: CountOrZero = 0
    """Images in one row at most. 0: text only. Needs apply_chat_template."""
    image_root: str | None = None
    """Folder that the paths of images begin at and may not leave. None: that of each file of rows."""
    image_hosts: tuple[str, ...] | None = None
    """Hosts whose https:// addresses are read. None: no image is downloaded."""

    @property
    def reads_images(self) -> bool:
        return self.max_images_per_prompt > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out rows."""

    dataset: str | None = None
    """Evaluation rows, as data.dataset. None: no evaluation."""
    split: str = "train"
    """Split to take where the dataset has splits."""
    steps: Steps = -1
    """Evaluate every N optimizer steps. -1: at the end of each epoch and of the run."""
    max_samples: Count | None = None
    """Rows to use. None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batches and passes."""

    batch_size: Count = 128
    """Sequences in one optimizer step, over all ranks."""
    micro_batch_size: Count = 8
    """Sequences in one micro-batch: a packed row, the unit of a forward pass. Memory and speed, not the
    result, depend on it."""
    dynamic_batch_enable: bool = False
    """Fill rows up to max_tokens_per_gpu tokens; micro_batch_size is then not read."""
    max_tokens_per_gpu: Count = 16192
    """Tokens of one row with dynamic_batch_enable; ds.ring_attn_size times as many where ranks share rows. A
    longer sequence gets a row of its own."""
    max_epochs: Count = 2
    """Passes over the rows."""
    max_steps: Count | None = None
    """Stop after this many optimizer steps, with the learning rate of a run of that length. None: after
    max_epochs."""
    seed: CountOrZero = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Only deterministic kernels: the same run gives the same bits, slower."""
    backend: BackendName = "deepspeed"
    """Library that trains: DeepSpeed, or PyTorch alone, by fully_shard on several ranks (docs/models.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisedConfig(OptimConfig):
    """Configuration that every supervised command has."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ds: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    local_rank: int = -1
    """Set by the launchers; torchrun and deepspeed say the same in the environment."""
    use_ms: bool = False
    """Names of models and datasets are looked up on ModelScope in place of the Hugging Face hub."""

    @property
    def run_dir(self) -> str:
        return run_dir(self.logger, self.ckpt)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefConfig:
    """The frozen model that the trained one is compared with."""

    model_name_or_path: str = ""
    """Hugging Face name or folder. Empty: the model to train, as it is before training."""
    offload: bool = False
    """Keep its weights in CPU memory."""
    precompute_enable: bool = False
    """Compute its log-probs once before training, keep them in the data cache, and free its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTModelConfig(ModelConfig):
    """The model that is trained."""

    pretrain_mode_enable: bool = False
    """Continued pre-training: loss on all tokens, and no end-of-sequence token is added."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTDataConfig(ImageDataConfig):
    """Where rows come from, and how they become tokens."""

    input_key: str = "input"
    """Column with the prompt: text, or messages with apply_chat_template."""
    output_key: str | None = None
    """Column with the response. None: the last message of input_key, or with model.pretrain_mode_enable plain
    text."""
    input_template: str | None = None
    """Text around the prompt, which replaces `{}`. Not read with apply_chat_template."""
    multiturn: bool = False
    """Loss on every assistant turn, not only on the last. Needs apply_chat_template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning."""

    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    logger: LoggerConfig = field(default_factory=lambda: logger_for("sft", "openrlhf_train_sft"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RMModelConfig(ModelConfig):
    """The model that is trained."""

    loss_type: PairLoss = "sigmoid"
    """-log sigmoid(chosen - rejected - margin), or logexp: log(1 + exp(rejected - chosen)), without a
    margin."""
    margin_loss_enable: bool = False
    """Scores of a pair shall differ by at least its `margin` column."""
    compute_fp32_loss_enable: bool = False
    """Accepted for old commands: scores and losses are always float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairDataConfig(ImageDataConfig):
    """Where rows come from, and how they become tokens."""

    prompt_key: str | None = None
    """Column with the prompt that both answers share. None: each answer holds the whole conversation."""
    chosen_key: str = "chosen"
    """Column with the better answer."""
    rejected_key: str = "rejected"
    """Column with the worse answer."""
    input_template: str | None = None
    """Text around the prompt, which replaces `{}`. Not read with apply_chat_template."""
    max_len: Count = 512
    """Longest sequence, tokens; the rest is cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RMConfig(SupervisedConfig):
    """Reward model from pairs of answers."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    model: RMModelConfig = field(default_factory=RMModelConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_epochs=1, micro_batch_size=1))
    ds: ScorerDeepSpeedConfig = field(default_factory=ScorerDeepSpeedConfig)
    logger: LoggerConfig = field(default_factory=lambda: logger_for("rm", "openrlhf_train_rm"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOModelConfig(ModelConfig):
    """The model that is trained."""

    beta: Positive = 0.1
    """Strength of the pull to the reference."""
    ipo_enable: bool = False
    """IPO: (h - 1 / (2 beta))^2 in place of -log sigmoid(beta h), with h summed over the answer's tokens."""
    label_smoothing: Smoothing = 0.0
    """cDPO: probability that a pair is labelled the wrong way round."""
    nll_loss_coef: PositiveOrZero = 0.0
    """Weight of the mean negative log-likelihood of chosen answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DPOConfig(SupervisedConfig):
    """DPO, IPO and cDPO: a policy from pairs of answers, without a reward model."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    model: DPOModelConfig = field(default_factory=DPOModelConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    data: PairDataConfig = field(default_factory=PairDataConfig)
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(split="test"))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_epochs=1))
    logger: LoggerConfig = field(default_factory=lambda: logger_for("dpo", "openrlhf_train_dpo"))


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOModelConfig(ModelConfig):
    """The model that is trained."""

    beta: Positive = 0.01
    """Strength of the pull to the reference."""
    desirable_loss_weight: PositiveOrZero = 1.0
    """Weight of the loss of good answers."""
    undesirable_loss_weight: PositiveOrZero = 1.0
    """Weight of the loss of bad answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KTODataConfig(TemplateDataConfig):
    """Where rows come from, and how they become tokens."""

    input_key: str = "input"
    """Column with the prompt: text, or messages with apply_chat_template."""
    output_key: str | None = None
    """Column with the answer. None: the last message of input_key."""
    label_key: str = "label"
    """Column that says whether the answer is good: true or false, 1 or 0."""
    input_template: str | None = None
    """Text around the prompt, which replaces `{}`. Not read with apply_chat_template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KTOConfig(SupervisedConfig):
    """KTO: a policy from single answers that are good or bad."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    model: KTOModelConfig = field(default_factory=KTOModelConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    data: KTODataConfig = field(default_factory=KTODataConfig)
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(split="test"))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_epochs=1))
    logger: LoggerConfig = field(default_factory=lambda: logger_for("kto", "openrlhf_train_kto"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PRMDataConfig(DataConfig):
    """Where rows come from, and how they become tokens."""

    input_key: str = "input"
    """Column with the whole text, a placeholder at the end of each step."""
    label_key: str = "label"
    """Column with a list, one label for each placeholder: the token that the model is to write there, or the
    probability of the first of data.reward_tokens."""
    placeholder_token: str = ""
    """The text that ends a step: one token or several, of which the last carries the label. Required."""
    reward_tokens: tuple[str, ...] | None = None
    """The tokens that labels may be: the probabilities of these alone add up to 1. None: any token. Labels
    that are probabilities need two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PRMConfig(SupervisedConfig):
    """Process reward model: scores every step of a solution."""

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-6))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: PRMDataConfig = field(default_factory=PRMDataConfig)
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(split="test"))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_epochs=1, micro_batch_size=1))
    logger: LoggerConfig = field(default_factory=lambda: logger_for("prm", "openrlhf_train_prm"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """The model that is imitated."""

    model_name_or_path: str = ""
    """Hugging Face name or folder of the teacher, which must have the student's vocabulary. Required."""
    offload: bool = False
    """Keep its weights in CPU memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KDModelConfig(SFTModelConfig):
    """The model that is trained."""

    kd_coef: Fraction = 0.4
    """Weight of the teacher: the loss is (1 - kd_coef) of the data's and kd_coef of the teacher's."""
    kd_temperature: Positive = 1.0
    """Divides the logits of both; the loss is multiplied by its square, as its gradient shrinks by that."""
    kd_loss_type: DistillationLoss = "forward_kl"
    """KL(teacher || student), which covers all that the teacher does, or reverse_kl: KL(student || teacher),
    which settles on a part of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KDDataConfig(SFTDataConfig):
    """Where rows come from, and how they become tokens."""

    output_key: str | None = "output"
    """Column with the response. None: the last message of input_key, or with model.pretrain_mode_enable plain
    text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KDConfig(SupervisedConfig):
    """Knowledge distillation: a student imitates a teacher on given texts."""

    model: KDModelConfig = field(default_factory=KDModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    data: KDDataConfig = field(default_factory=KDDataConfig)
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(split="test"))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_epochs=1))
    logger: LoggerConfig = field(default_factory=lambda: logger_for("kd", "openrlhf_train_kd"))
