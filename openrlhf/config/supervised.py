"""Configuration of the supervised commands: SFT, reward models, process reward models, DPO, KTO and
distillation."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from openrlhf.config.choices import (
    Count,
    Fraction,
    Positive,
    PositiveOrZero,
    Range,
    Steps,
)
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.resume import NEW_LENGTH, Content, Free
from openrlhf.config.sections import (
    AdamConfig,
    BatchesConfig,
    DatasetConfig,
    DeepSpeedConfig,
    ImagesConfig,
    LoaderConfig,
    LoggerConfig,
    OptimConfig,
    RowTemplateConfig,
    ScorerDeepSpeedConfig,
    TrainedModelConfig,
    TrainingConfig,
    logger_for,
)

MODEL_FLAG = "--model.model_name_or_path"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(TrainedModelConfig):
    """The model that is trained."""

    model_name_or_path: Content[str] = ""
    """Model to train: a Hugging Face name or a folder. Required."""
    dropout_enable: bool = False
    """Train with the dropout, skipped layers and router noise of the model's config.json. Not for DPO and
    KTO, whose policy must start equal to its reference. The dropout of adapters is ds.lora.dropout."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(DatasetConfig, LoaderConfig):
    """The dataset, and how its rows become tokens."""

    column_keys: ClassVar[tuple[str, ...]] = ()
    """The flags of this section that name a column which rows must have."""

    max_samples: Count = 1_000_000
    max_len: Count = 2048
    """Maximum length of a sequence, tokens. Longer ones are cut off at the end."""
    cache_enable: Free[bool] = True
    """Keep tokenised rows on disk, and reuse them as long as the files, the tokenizer and the data flags stay
    the same."""
    cache_dir: Free[str | None] = None
    """Folder of the tokenised rows. None: `$OPENRLHF_CACHE`, or `~/.cache/openrlhf`."""

    @property
    def columns(self) -> dict[str, str | None]:
        """Flag -> the column that it names and that rows must have."""
        keys = (*self.column_keys, *(("image_key",) if self.reads_images else ()))
        columns = {f"--data.{key}": getattr(self, key) for key in keys}
        return columns | {"--data.tools_key": getattr(self, "tools_column", None)}

    @property
    def reads_images(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class ImageDataConfig(ImagesConfig, RowTemplateConfig, DataConfig):
    """The dataset, and how its rows become tokens."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out rows."""

    dataset: str | None = None
    """Datasets to evaluate on, in the form of data.dataset. None: no evaluation."""
    split: str = "train"
    """Split to read from datasets that have splits."""
    steps: Steps = -1
    """Evaluate every N optimizer steps. -1: at the end of each epoch and of the run."""
    max_samples: Count | None = None
    """Maximum number of rows. None: all."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(BatchesConfig):
    """Batches, epochs and training backend."""

    micro_batch_size: Free[Count] = 8
    max_epochs: Annotated[Count, NEW_LENGTH] = 1
    """Epochs: passes over the rows."""
    max_steps: Annotated[Count | None, NEW_LENGTH] = None
    """Stop after this many optimizer steps, with the learning rate schedule of a run of that length. None:
    after train.max_epochs."""

    def total_steps(self, steps_per_epoch: int) -> int:
        """Returns the number of optimizer steps of the whole run."""
        steps = steps_per_epoch * self.max_epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(OptimConfig, TrainingConfig):
    """Configuration that every supervised command has."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig(split="test")
    ds: DeepSpeedConfig = DeepSpeedConfig()

    @property
    def columns(self) -> dict[str, str | None]:
        return self.data.columns

    @property
    def trained_models(self) -> dict[str, tuple[str, str]]:
        return {"policy": (MODEL_FLAG, self.model.model_name_or_path)}

    @property
    def folders(self) -> dict[str, str]:
        cache = self.data.cache_dir if self.data.cache_enable else None
        return super().folders | ({"--data.cache_dir": cache} if cache else {})

    @property
    def reads_images(self) -> bool:
        return self.data.reads_images


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen reference model, with which the trained one is compared."""

    model_name_or_path: Content[str] = ""
    """Reference model: a Hugging Face name or a folder. Empty: the model to train, as it is before
    training."""
    offload: Free[bool] = False
    """Keep the weights of the reference in CPU memory while they are not used."""
    precompute_enable: Free[bool] = False
    """Compute the reference's log-probs once before training, keep them in the data cache, and free its
    memory."""


@dataclass(frozen=True, kw_only=True)
class SFTModelConfig(ModelConfig):
    """The model that is trained."""

    pretrain_mode_enable: bool = False
    """Continued pre-training: the loss is over all tokens, and no end-of-sequence token is added."""


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(ImageDataConfig):
    """The dataset, and how its rows become tokens."""

    column_keys = ("input_key", "output_key")

    input_key: str = "input"
    """Column with the prompt: text, or with data.apply_chat_template messages."""
    output_key: str | None = None
    """Column with the response. None: the response is the last message of data.input_key, or with
    model.pretrain_mode_enable there is only text."""
    multiturn: bool = False
    """Train on every assistant turn, not only on the last. Needs data.apply_chat_template."""


@dataclass(frozen=True, kw_only=True)
class ResponsesConfig(SupervisedConfig):
    """Learning from responses, or from plain text."""

    model: SFTModelConfig = SFTModelConfig()
    data: SFTDataConfig = SFTDataConfig()

    @property
    def columns(self) -> dict[str, str | None]:
        plain_text = {"--data.output_key": None} if self.model.pretrain_mode_enable else {}
        return self.data.columns | plain_text


@dataclass(frozen=True, kw_only=True)
class SFTConfig(ResponsesConfig):
    """Supervised fine-tuning."""

    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig(max_epochs=2)
    logger: LoggerConfig = logger_for("sft")


@dataclass(frozen=True, kw_only=True)
class RMModelConfig(ModelConfig):
    """The model that is trained."""

    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    """Loss of a pair. sigmoid: -log sigmoid(chosen - rejected - margin). logexp: log(1 + exp(rejected -
    chosen)), without a margin."""
    margin_loss_enable: bool = False
    """Require the scores of a pair to differ by at least the value of its column `margin`."""
    compute_fp32_loss_enable: Free[bool] = False
    """Accepted for old commands and not read: scores and losses are always fp32."""


@dataclass(frozen=True, kw_only=True)
class PairDataConfig(ImageDataConfig):
    """The dataset, and how its rows become tokens."""

    column_keys = ("prompt_key", "chosen_key", "rejected_key")

    prompt_key: str | None = None
    """Column with the prompt of both answers. None: the columns of the answers hold whole conversations."""
    chosen_key: str = "chosen"
    """Column with the better answer."""
    rejected_key: str = "rejected"
    """Column with the worse answer."""
    max_len: Count = 512


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """Reward model from pairs of answers."""

    adam: AdamConfig = AdamConfig(lr=9e-6)
    model: RMModelConfig = RMModelConfig()
    data: PairDataConfig = PairDataConfig()
    eval: EvalConfig = EvalConfig()
    train: TrainConfig = TrainConfig(micro_batch_size=1)
    ds: ScorerDeepSpeedConfig = ScorerDeepSpeedConfig()
    logger: LoggerConfig = logger_for("rm")

    @property
    def margin_key(self) -> str | None:
        """Column with the margins; None if they are not used."""
        is_used = self.model.margin_loss_enable and self.model.loss_type == "sigmoid"
        return "margin" if is_used else None

    @property
    def columns(self) -> dict[str, str | None]:
        return self.data.columns | {"--model.margin_loss_enable": self.margin_key}


@dataclass(frozen=True, kw_only=True)
class DPOModelConfig(ModelConfig):
    """The model that is trained."""

    beta: Positive = 0.1
    """Strength of the KL constraint: with a larger beta the policy stays closer to the reference."""
    ipo_enable: bool = False
    """Use the loss of IPO, (h - 1 / (2 beta))^2, instead of -log sigmoid(beta h). h sums log-probs over the
    tokens of an answer."""
    label_smoothing: Annotated[float, Range(at_least=0, below=0.5)] = 0.0
    """cDPO: probability that chosen and rejected are swapped in a pair of the data."""
    nll_loss_coef: PositiveOrZero = 0.0
    """Weight of an additional loss: the mean negative log-likelihood of the chosen answers."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """DPO, IPO and cDPO: a policy from pairs of answers, without a reward model."""

    adam: AdamConfig = AdamConfig(lr=1e-5)
    model: DPOModelConfig = DPOModelConfig()
    ref: RefConfig = RefConfig()
    data: PairDataConfig = PairDataConfig()
    logger: LoggerConfig = logger_for("dpo")


@dataclass(frozen=True, kw_only=True)
class KTOModelConfig(ModelConfig):
    """The model that is trained."""

    beta: Positive = 0.01
    """Strength of the KL constraint: with a larger beta the policy stays closer to the reference."""
    desirable_loss_weight: PositiveOrZero = 1.0
    """Weight of the loss of good answers."""
    undesirable_loss_weight: PositiveOrZero = 1.0
    """Weight of the loss of bad answers."""


@dataclass(frozen=True, kw_only=True)
class KTODataConfig(RowTemplateConfig, DataConfig):
    """The dataset, and how its rows become tokens."""

    column_keys = ("input_key", "output_key", "label_key")

    input_key: str = "input"
    """Column with the prompt: text, or with data.apply_chat_template messages."""
    output_key: str | None = None
    """Column with the answer. None: the answer is the last message of data.input_key."""
    label_key: str = "label"
    """Column that says whether an answer is good: true or false, 1 or 0."""


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SupervisedConfig):
    """KTO: a policy from single answers that are good or bad."""

    adam: AdamConfig = AdamConfig(lr=1e-5)
    model: KTOModelConfig = KTOModelConfig()
    ref: RefConfig = RefConfig()
    data: KTODataConfig = KTODataConfig()
    logger: LoggerConfig = logger_for("kto")


@dataclass(frozen=True, kw_only=True)
class PRMDataConfig(DataConfig):
    """The dataset, and how its rows become tokens."""

    column_keys = ("input_key", "label_key")

    input_key: str = "input"
    """Column with problem and solution as one text, with a placeholder at the end of each step."""
    label_key: str = "label"
    """Column with a list of one label for each placeholder: the token to predict there, or
    the probability of the first of data.reward_tokens."""
    placeholder_token: str = ""
    """Text that ends a step: one token, or several of which the last carries the label. Required."""
    reward_tokens: tuple[str, ...] | None = None
    """Tokens that labels may be: the predicted probabilities of these tokens alone add up to 1. None: any
    token. Labels that are probabilities need exactly two."""


@dataclass(frozen=True, kw_only=True)
class PRMConfig(SupervisedConfig):
    """Process reward model: scores every step of a solution."""

    adam: AdamConfig = AdamConfig(lr=1e-6)
    data: PRMDataConfig = PRMDataConfig()
    train: TrainConfig = TrainConfig(micro_batch_size=1)
    logger: LoggerConfig = logger_for("prm")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The frozen model that the student imitates."""

    model_name_or_path: Content[str] = ""
    """Teacher model: a Hugging Face name or a folder. It must have the student's vocabulary. Required."""
    model_kwargs: PassThrough = field(default_factory=PassThrough)
    """Options with which transformers loads the teacher, as model.model_kwargs."""
    offload: Free[bool] = False
    """Keep the weights of the teacher in CPU memory while they are not used."""


@dataclass(frozen=True, kw_only=True)
class KDModelConfig(SFTModelConfig):
    """The model that is trained."""

    kd_coef: Fraction = 0.4
    """Weight of the distillation loss. The loss on the data has the weight 1 - kd_coef."""
    kd_temperature: Positive = 1.0
    """Temperature of teacher and student in the distillation loss. The loss is multiplied by its square,
    because the gradient shrinks by that."""
    kd_loss_type: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """Distillation loss. forward_kl: KL(teacher || student), which covers everything that the teacher does.
    reverse_kl: KL(student || teacher), which concentrates on the teacher's most likely answers."""


@dataclass(frozen=True, kw_only=True)
class KDDataConfig(SFTDataConfig):
    """The dataset, and how its rows become tokens."""

    output_key: str | None = "output"


@dataclass(frozen=True, kw_only=True)
class KDConfig(ResponsesConfig):
    """Knowledge distillation: a student imitates a teacher on given texts."""

    model: KDModelConfig = KDModelConfig()
    teacher: TeacherConfig = TeacherConfig()
    data: KDDataConfig = KDDataConfig()
    logger: LoggerConfig = logger_for("kd")
