"""Configuration of `batch_inference` and `interactive_chat`."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.choices import (
    Count,
    CountOrZero,
    EngineName,
    ParamDtype,
    Positive,
    PositiveFraction,
)
from openrlhf.config.sections import (
    DatasetConfig,
    EngineMemoryConfig,
    HubConfig,
    LaunchedConfig,
    RowTemplateConfig,
    SeedConfig,
    TemplateConfig,
)


@dataclass(frozen=True, kw_only=True)
class InferenceModelConfig:
    """The model that answers, or that scores answers."""

    model_name_or_path: str = ""
    """Model: a Hugging Face name or a folder. Required."""


@dataclass(frozen=True, kw_only=True)
class InferenceDataConfig(DatasetConfig, RowTemplateConfig):
    """The dataset, and how its rows become text."""

    input_key: str = "input"
    """Column with the prompt: text, or with data.apply_chat_template messages."""
    output_key: str = "output"
    """Column with the answer that task rm scores."""
    prompt_max_len: Count = 1024
    """Maximum length of a prompt, tokens. A row with a longer one cannot be used (data.bad_rows). If it is
    not set, at most what the model reads beside an answer."""
    max_len: Count = 2048
    """Task rm: maximum length of prompt and answer together, tokens. Longer ones are cut off before their
    last token. If it is not set, at most what the model reads."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of answers."""

    greedy: bool = False
    """Always take the most likely token."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: sample from the most likely tokens whose probabilities add up to this. 1: from
    all."""
    repetition_penalty: Positive = 1.0
    """Penalty on tokens that occurred before: their logits are divided by it if positive, multiplied if
    negative. 1: off."""


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(SamplingConfig):
    """Sampling of answers."""

    engine: EngineName | None = None
    """Library that samples. None: vllm for task generate_vllm, transformers for task generate."""
    n_samples_per_prompt: Count = 1
    """Number of answers to each prompt. Each has its own seed and does not depend on other requests."""
    batch_size: Count = 2048
    """Number of prompts in one iteration, with the flag iter."""
    max_new_tokens: Count = 1024
    """Maximum length of an answer, tokens. If it is not set, at most what the model reads behind a prompt."""


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Rewards of task rm."""

    normalize_enable: bool = False
    """Normalise rewards with the mean and the standard deviation of the reward model's config.json; with
    post_processor csft, with those of all rewards in the output."""
    template: str = "{input} <rm_score>: {reward} "
    """Input that post_processor csft writes; {reward} has two decimals."""


@dataclass(frozen=True, kw_only=True)
class CsftConfig:
    """Conditional SFT: prompts that ask for a reward, for a model trained on the rows of post_processor
    csft."""

    enable: bool = False
    """Append a space, csft.prompt and a space to each prompt, before any template."""
    prompt: str = "<rm_score>: 5.00"
    """Reward to ask for, in the form of reward.template."""


@dataclass(frozen=True, kw_only=True)
class ChatVllmConfig(EngineMemoryConfig):
    """The vLLM engine."""

    tensor_parallel_size: Count | None = None
    """GPUs of the engine. None: all; without GPUs one process."""


@dataclass(frozen=True, kw_only=True)
class InferenceVllmConfig(ChatVllmConfig):
    """The vLLM engine."""

    max_num_seqs: Count = 256
    """Maximum number of answers that are sampled at a time."""
    enable_prefix_caching: bool = False
    """Share the KV cache of prompts that start alike."""


@dataclass(frozen=True, kw_only=True)
class InferenceTrainConfig(SeedConfig):
    """Batches and seeds."""

    micro_batch_size: Count = 16
    """Sequences in one forward pass, in task rm and with transformers."""
    seed: CountOrZero = 1234


@dataclass(frozen=True, kw_only=True)
class InferenceKernelsConfig:
    """Precision and kernels."""

    load_in_4bit: bool = False
    """Quantise all linear layers except the head to NF4, which needs a quarter of bf16's memory
    (bitsandbytes). With vLLM use a quantised model instead."""
    attn_implementation: str = "auto"
    """Attention kernel by its name in transformers (eager, sdpa, flash_attention_2, ...). auto: the fastest
    that this machine has. vLLM chooses its own kernels."""


@dataclass(frozen=True, kw_only=True)
class InferenceDsConfig(InferenceKernelsConfig):
    """Precision and kernels."""

    param_dtype: ParamDtype = "bf16"
    """Data type of the weights."""


@dataclass(frozen=True, kw_only=True)
class ScorerInferenceDsConfig(InferenceDsConfig):
    """Precision and kernels."""

    zero_stage: CountOrZero = 0
    """Accepted for old commands and not read: each rank holds the whole model. To spread a large model over
    GPUs use task generate_vllm with vllm.tensor_parallel_size."""
    value_head_prefix: str = "value_head"
    """Name of the reward model's scalar head. Needed only if the head is not named `score` and config.json
    does not name it."""


@dataclass(frozen=True, kw_only=True)
class BatchInferenceConfig(LaunchedConfig):
    """Answers to prompts, or rewards of answers, of a whole dataset."""

    task: Literal["generate_vllm", "generate", "rm"] | None = None
    """Task to run on the rows. generate_vllm: sample answers with vLLM. generate: sample answers with
    transformers, on one or several ranks. rm: score answers with a reward model, on one or several ranks.
    rollout.engine overrides the library of both generate tasks. Required."""
    output_path: str = ""
    """The .jsonl file to write: rows {"input", "output"} with "finish_reason" (in task rm "reward"),
    "prompt_id" and "sample_index". Results are appended as they arrive and sorted at the end. After a
    stop the same command continues. Files beside it: .meta.json (flags, data and model of the rows; a command
    with others is refused), .rankN.jsonl (rows of other ranks during the run), and with a post_processor
    .raw.jsonl (rows before post-processing). Required."""
    post_processor: Literal["rs", "csft", "iter_dpo"] | None = None
    """Processing of the rows of task rm. rs: keep the best answer to each input (rejection sampling). csft:
    write the reward into the input. iter_dpo: best and worst answer as {"prompt", "chosen", "rejected"} with
    their rewards. None: keep the rows as they are."""
    iter: CountOrZero | None = None
    """Use only the prompts of this iteration: rows iter * B to (iter + 1) * B - 1 with B =
    rollout.batch_size, starting again at the end of the dataset. None: all prompts."""
    model: InferenceModelConfig = InferenceModelConfig()
    data: InferenceDataConfig = InferenceDataConfig()
    rollout: AnswerConfig = AnswerConfig()
    reward: ScoreConfig = ScoreConfig()
    csft: CsftConfig = CsftConfig()
    vllm: InferenceVllmConfig = InferenceVllmConfig()
    train: InferenceTrainConfig = InferenceTrainConfig()
    ds: ScorerInferenceDsConfig = ScorerInferenceDsConfig()

    @property
    def engine(self) -> EngineName:
        """Library that samples the answers; transformers for task rm, which scores them with it."""
        if self.task == "rm":
            return "transformers"
        return self.rollout.engine or ("vllm" if self.task == "generate_vllm" else "transformers")

    @property
    def raw_path(self) -> str:
        """File of the rows before post-processing."""
        return f"{self.output_path}.raw.jsonl" if self.post_processor else self.output_path

    @property
    def meta_path(self) -> str:
        return f"{self.output_path}.meta.json"


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig(TemplateConfig):
    """Conversion of a conversation to text."""

    apply_chat_template: bool = False
    """Format messages with the tokenizer's chat template. If neither this flag nor data.input_template is
    set, it is on where the tokenizer has a template."""
    max_len: Count = 4096
    """Maximum length of the conversation, tokens. If it is not set, at most what the model reads."""


@dataclass(frozen=True, kw_only=True)
class ChatSamplingConfig(SamplingConfig):
    """Sampling of answers."""

    engine: EngineName = "transformers"
    """Library that samples. vllm samples faster, starts more slowly and runs in a process of its own."""
    max_new_tokens: Count | None = None
    """Maximum length of an answer, tokens. None: the tokens of data.max_len that the conversation has not
    used."""
    temperature: Positive = 0.2
    top_p: PositiveFraction = 0.9
    repetition_penalty: Positive = 1.2


@dataclass(frozen=True, kw_only=True)
class ChatTrainConfig:
    """Seeds."""

    seed: CountOrZero = 1234
    """Seed of sampling: the same conversation gets the same answers."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(HubConfig):
    """A conversation with a model, on a terminal or through a pipe with one message per line."""

    ta_prompt: str | None = None
    """Text file with the start of every conversation; with data.apply_chat_template it is the system
    message."""
    model: InferenceModelConfig = InferenceModelConfig()
    data: ChatDataConfig = ChatDataConfig()
    rollout: ChatSamplingConfig = ChatSamplingConfig()
    csft: CsftConfig = CsftConfig()
    vllm: ChatVllmConfig = ChatVllmConfig()
    train: ChatTrainConfig = ChatTrainConfig()
    ds: InferenceDsConfig = InferenceDsConfig()

    @property
    def engine(self) -> EngineName:
        """Library that samples the answers."""
        return self.rollout.engine
