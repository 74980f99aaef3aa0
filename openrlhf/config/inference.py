"""Configuration of `batch_inference` and `interactive_chat`."""

from dataclasses import dataclass, field

from openrlhf.config.choices import (
    BadRows,
    Count,
    CountOrZero,
    EngineName,
    InferenceTask,
    ParamDtype,
    Positive,
    PositiveFraction,
    PostProcessor,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceModelConfig:
    """The model that answers, or that scores answers."""

    model_name_or_path: str = ""
    """Hugging Face name or folder. Required."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceDataConfig:
    """Where rows come from, and how they become text."""

    dataset: str = ""
    """Comma list of `path[@data_dir]`: .json .jsonl .csv .parquet .arrow files, also packed (.jsonl.gz), and
    folders of them, here or at URLs (s3://, gs://, hf://, https://), hub names. Required."""
    dataset_probs: str | None = None
    """Comma list of probabilities, one for each dataset, to mix them. None: one after the other."""
    dataset_split: str = "train"
    """Split to take where a dataset has splits."""
    max_samples: Count = 100_000_000
    """Rows to use, of each dataset and in total."""
    input_key: str = "input"
    """Column with the prompt: text, or messages with apply_chat_template."""
    output_key: str = "output"
    """Column with the answer that task rm scores."""
    input_template: str | None = None
    """Text around the prompt, which replaces `{}`. Not with apply_chat_template."""
    apply_chat_template: bool = False
    """Format prompts with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own."""
    prompt_max_len: Count = 1024
    """Longest prompt, tokens; a longer one is a bad row."""
    max_len: Count = 2048
    """Task rm: longest prompt and answer together, tokens; the rest is cut off, but for the token that ends
    it."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    bad_rows: BadRows = "error"
    """A row that cannot be used (a line that is no JSON, missing column, wrong type, prompt too long) stops
    the run, or is left out and counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerConfig:
    """How answers are sampled."""

    engine: EngineName | None = None
    """Library that samples. None: vllm for task generate_vllm, transformers for task generate. transformers
    needs no vLLM."""
    n_samples_per_prompt: Count = 1
    """Answers to each prompt. Each has a seed of its own, so it does not depend on what else is sampled."""
    batch_size: Count = 2048
    """With iter: prompts of one iteration."""
    max_new_tokens: Count = 1024
    """Longest answer, tokens."""
    greedy: bool = False
    """Always the most likely token."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: PositiveFraction = 1.0
    """Sample from the most likely tokens that add up to this probability."""
    repetition_penalty: Positive = 1.0
    """Logits of tokens that already occurred are divided by this if positive, multiplied if negative. 1:
    off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreConfig:
    """Rewards of task rm."""

    normalize_enable: bool = False
    """Subtract the mean and divide by the standard deviation that the reward model's config.json holds. With
    post_processor csft: those of all rewards in the output."""
    template: str = "{input} <rm_score>: {reward} "
    """The input that post_processor csft writes; {reward} has two decimals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CsftConfig:
    """Prompts that ask for a reward, for a model that was trained on the rows of post_processor csft."""

    enable: bool = False
    """Append a space, csft.prompt and a space to each prompt, before any template."""
    prompt: str = "<rm_score>: 5.00"
    """The reward to ask for, written as in reward.template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceVllmConfig:
    """The vLLM engine."""

    tensor_parallel_size: Count | None = None
    """GPUs of the engine. None: all; without GPUs 1."""
    max_num_seqs: Count = 256
    """Answers that are sampled at a time."""
    enable_prefix_caching: bool = False
    """Keep the KV cache of prompts."""
    enforce_eager: bool = False
    """No CUDA graphs: less memory, slower sampling."""
    gpu_memory_utilization: PositiveFraction = 0.95
    """Fraction of the GPU's memory that the engine may take."""
    kv_cache_gb: Positive | None = None
    """Size of the KV cache, GB. None: what gpu_memory_utilization leaves; 0.25 without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceTrainConfig:
    """Batches and seeds."""

    micro_batch_size: Count = 16
    """Sequences in one forward pass of task rm, and of rollout.engine transformers."""
    seed: CountOrZero = 1234
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Only deterministic kernels: the same run gives the same bits, slower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceDsConfig:
    """Precision and kernels."""

    zero_stage: CountOrZero = 0
    """Accepted for old commands: each rank holds the whole model. One that is too large for a GPU answers
    with task generate_vllm, over the GPUs of vllm.tensor_parallel_size."""
    param_dtype: ParamDtype = "bf16"
    """Type of the weights."""
    load_in_4bit: bool = False
    """Weights of linear layers but the head in NF4, a quarter of bf16's memory (bitsandbytes). In task rm,
    and with rollout.engine transformers."""
    attn_implementation: str = "auto"
    """Attention kernel by its name in transformers (eager, sdpa, flash_attention_2, ...). auto: the fastest
    that this machine has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerInferenceDsConfig(InferenceDsConfig):
    """Precision and kernels."""

    value_head_prefix: str = "value_head"
    """Name of the reward model's scalar head, where neither its config.json says it nor it is `score`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInferenceConfig:
    """Answers to prompts, or rewards of answers, of a whole dataset."""

    task: InferenceTask | None = None
    """generate_vllm: answers, sampled by vLLM. generate: answers, sampled by transformers, on one or several
    ranks. rollout.engine names another library for both. rm: rewards of answers, on one or several ranks.
    Required."""
    output_path: str = ""
    """The .jsonl file to write: rows {"input", "output"} with "finish_reason", or "reward" in task rm, and
    "prompt_id", "sample_index". Results are appended as they come; the same command continues after a stop,
    and sorts them at the end. Beside it: .meta.json (what the rows were made from; another command is
    refused), .rankN.jsonl (rows of the other ranks while they run), and with a post_processor .raw.jsonl
    (the rows before it). Required."""
    post_processor: PostProcessor | None = None
    """What becomes of the rows of task rm. rs: the best answer to each input. csft: the reward written into
    the input. iter_dpo: best and worst answer as {"prompt", "chosen", "rejected"} with their rewards."""
    iter: CountOrZero | None = None
    """Take only the prompts of this iteration: rows [iter * B, (iter + 1) * B) with B = rollout.batch_size,
    going around the dataset. None: all prompts."""
    model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    data: InferenceDataConfig = field(default_factory=InferenceDataConfig)
    rollout: AnswerConfig = field(default_factory=AnswerConfig)
    reward: ScoreConfig = field(default_factory=ScoreConfig)
    csft: CsftConfig = field(default_factory=CsftConfig)
    vllm: InferenceVllmConfig = field(default_factory=InferenceVllmConfig)
    train: InferenceTrainConfig = field(default_factory=InferenceTrainConfig)
    ds: ScorerInferenceDsConfig = field(default_factory=ScorerInferenceDsConfig)
    local_rank: int = -1
    """Set by the launchers; torchrun and deepspeed say the same in the environment."""
    use_ms: bool = False
    """Names of models and datasets are looked up on ModelScope in place of the Hugging Face hub."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDataConfig:
    """How a conversation becomes text."""

    max_len: Count = 4096
    """Longest conversation, tokens."""
    input_template: str | None = None
    """Text around each message, which replaces `{}`. Not read with apply_chat_template."""
    apply_chat_template: bool = False
    """Format the conversation with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSamplingConfig:
    """How answers are sampled."""

    engine: EngineName = "transformers"
    """Library that samples. vllm: an engine in a process of its own, which samples faster and starts more
    slowly."""
    max_new_tokens: Count | None = None
    """Longest answer, tokens. None: what the conversation leaves of data.max_len."""
    greedy: bool = False
    """Always the most likely token."""
    temperature: Positive = 0.2
    """Sampling temperature."""
    top_p: PositiveFraction = 0.9
    """Sample from the most likely tokens that add up to this probability."""
    repetition_penalty: Positive = 1.2
    """Logits of tokens that already occurred are divided by this if positive, multiplied if negative. 1:
    off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatVllmConfig:
    """The vLLM engine, with rollout.engine vllm."""

    tensor_parallel_size: Count | None = None
    """GPUs of the engine. None: all; without GPUs 1."""
    enforce_eager: bool = False
    """No CUDA graphs: the engine starts sooner and answers more slowly."""
    gpu_memory_utilization: PositiveFraction = 0.95
    """Fraction of the GPU's memory that the engine may take."""
    kv_cache_gb: Positive | None = None
    """Size of the KV cache, GB. None: what gpu_memory_utilization leaves; 0.25 without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTrainConfig:
    """Seeds."""

    seed: CountOrZero = 1234
    """Seed of sampling: the same conversation is answered the same way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDsConfig:
    """Precision and kernels."""

    param_dtype: ParamDtype = "bf16"
    """Type of the weights."""
    attn_implementation: str = "auto"
    """Attention kernel by its name in transformers (eager, sdpa, flash_attention_2, ...). auto: the fastest
    that this machine has. With rollout.engine transformers."""
    load_in_4bit: bool = False
    """Weights of linear layers but the head in NF4, a quarter of bf16's memory (bitsandbytes). With
    rollout.engine transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """A conversation with a model, on a terminal or with lines from a pipe."""

    ta_prompt: str | None = None
    """A text file that every conversation starts with: the system message with data.apply_chat_template."""
    model: InferenceModelConfig = field(default_factory=InferenceModelConfig)
    data: ChatDataConfig = field(default_factory=ChatDataConfig)
    rollout: ChatSamplingConfig = field(default_factory=ChatSamplingConfig)
    csft: CsftConfig = field(default_factory=CsftConfig)
    vllm: ChatVllmConfig = field(default_factory=ChatVllmConfig)
    train: ChatTrainConfig = field(default_factory=ChatTrainConfig)
    ds: ChatDsConfig = field(default_factory=ChatDsConfig)
    use_ms: bool = False
    """Names of models and datasets are looked up on ModelScope in place of the Hugging Face hub."""

    @property
    def engine(self) -> EngineName:
        """Library that samples the answers."""
        return self.rollout.engine
