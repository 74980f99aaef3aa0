"""Configuration of `train_ppo_ray`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from openrlhf.algorithms.advantages import ESTIMATORS, AdvantageEstimator
from openrlhf.algorithms.corrections import CORRECTIONS, Correction
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES, ProximalPolicy
from openrlhf.config.checks import split_spec
from openrlhf.config.choices import (
    BackendName,
    BadRows,
    Count,
    CountOrZero,
    Decay,
    EngineName,
    EstimatorName,
    Failure,
    Fraction,
    ISCorrectionType,
    JournalMode,
    KLEstimator,
    LoraSync,
    LossAggregation,
    Placement,
    PolicyLossType,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    ProximalPolicyName,
    Range,
    Steps,
    SyncBackend,
)
from openrlhf.config.fields import values_of, with_values
from openrlhf.config.reasoning_gym import GYM_VERIFIER, is_gym
from openrlhf.config.sections import (
    AdamConfig,
    CkptConfig,
    LoggerConfig,
    OptimConfig,
    ScorerDeepSpeedConfig,
    WandbConfig,
    run_dir,
    wandb_for,
)
from openrlhf.mesh import Mesh
from openrlhf.plugins import resolve
from openrlhf.registry import Registry, Selectable

ACTOR_FLAG = "--actor.model_name_or_path"
CRITIC_FLAG = "--critic.model_name_or_path"
REWARD_FLAG = "--reward.model_name_or_path"
TEACHER_FLAG = "--teacher.model_name_or_path"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorConfig(OptimConfig):
    """The policy: what is trained and sampled."""

    model_name_or_path: str = ""
    """Hugging Face name or folder of the policy; the reference model starts from it too. Required."""
    num_nodes: Count = 1
    """Nodes of the policy's workers."""
    num_gpus_per_node: Count = 8
    """Workers on each node, one for each GPU. Without GPUs: processes. Not set: no more than
    there are."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-6))
    eps_clip: Annotated[float, Range(above=0, below=1)] = 0.2
    """The probability ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_low_high: tuple[Annotated[float, Range(above=0, at_most=1)], Positive] | None = None
    """Both bounds, `low high`: the ratio is clipped to [1 - low, 1 + high] (clip-higher of DAPO). None:
    eps_clip."""
    dual_clip: Annotated[float, Range(above=1)] | None = None
    """Bound c of dual-clip PPO: where the advantage is negative, the loss is at most -c * advantage."""
    policy_loss_type: PolicyLossType = "ppo"
    """The loss of an action."""
    loss_aggregation: LossAggregation | None = None
    """Mean of policy loss, KL and entropy. None: sample_mean where policy_loss_type has the ratio of
    sequences, otherwise token_mean."""
    entropy_coef: PositiveOrZero | None = None
    """Weight of the entropy bonus. 0: only log the entropy. None: do not compute it."""
    aux_loss_coef: PositiveOrZero = 0.0
    """Weight of the balance loss of MoE models."""
    ptx_coef: PositiveOrZero = 0.05
    """Weight of the negative log-likelihood of pre-training texts (data.pretrain_dataset) in every optimizer
    step: PPO-ptx."""
    gradient_checkpointing_enable: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    gradient_checkpointing_reentrant: bool = False
    """The reentrant variant of gradient checkpointing."""
    freeze_visual_encoder: bool = False
    """Vision-language models: train the language part only."""

    @property
    def loss(self) -> type[PolicyLoss]:
        return POLICY_LOSSES[self.policy_loss_type]

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances by which the ratio may fall below and rise above 1."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.num_gpus_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig(OptimConfig):
    """The value model of estimator gae."""

    model_name_or_path: str | None = None
    """Hugging Face name or folder. None: the first reward model, or else the policy."""
    num_nodes: CountOrZero = 1
    """Nodes of the critic's workers. On shared GPUs the actor's size holds; 0 says the same."""
    num_gpus_per_node: CountOrZero = 8
    """Workers on each node. On shared GPUs the actor's size holds."""
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    value_clip: Positive = 0.5
    """New values are clipped to this distance from the old ones."""
    aux_loss_coef: PositiveOrZero | None = None
    """Weight of the balance loss of MoE models. None: the actor's."""
    gradient_checkpointing_enable: bool | None = None
    """Recompute activations in the backward pass. None: as the actor."""
    freezing_steps: Steps = -1
    """Train only the critic for the first N steps."""
    save_value_network: bool = False
    """Write the final critic to `{ckpt.output_dir}_critic`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefConfig:
    """The reference model of the KL penalty: the policy as it was at the start."""

    num_nodes: CountOrZero = 1
    """Nodes of the reference workers. On the actor's GPUs the actor's size holds; 0 says the same."""
    num_gpus_per_node: CountOrZero = 8
    """Workers on each node. On the actor's GPUs the actor's size holds."""
    offload: bool = False
    """Keep the weights in CPU memory while they are not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOTeacherConfig:
    """A model that is imitated (on-policy distillation): on every action of the policy's own samples, its
    log-prob less the policy's is a reward."""

    model_name_or_path: str | None = None
    """Hugging Face name or folder of the teacher, which must have the policy's vocabulary. None: no
    teacher."""
    kd_coef: Positive = 1.0
    """Weight of that reward. It may be the only one: without a reward source every sample's own is 0."""
    num_nodes: CountOrZero = 1
    """Nodes of the teacher's workers. On shared GPUs the actor's size holds; 0 says the same."""
    num_gpus_per_node: CountOrZero = 8
    """Workers on each node. On shared GPUs the actor's size holds."""
    offload: bool = False
    """Keep the weights in CPU memory while they are not used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """Where rewards come from, and how they are shaped."""

    remote_url: str | None = None
    """A .py file with `reward_func(queries, prompts, labels)`, a function as `folder/file.py:NAME` or
    `package.module:NAME`, a name that an installed package registers (openrlhf.rewards), or a comma list of
    http URLs."""
    model_name_or_path: str | None = None
    """Hugging Face name or folder of a reward model; a comma list adds up several. Where remote_url gives
    rewards it is only used with model_weights."""
    model_weights: tuple[float, ...] | None = None
    """What the scores of the reward models are multiplied by, in their order, before they are added up, and
    to the rewards of remote_url. None: 1 each, and nothing beside remote_url."""
    num_nodes: CountOrZero = 1
    """Nodes of the reward model's workers. On shared GPUs the actor's size holds; 0 says the same."""
    num_gpus_per_node: CountOrZero = 8
    """Workers on each node. On shared GPUs the actor's size holds."""
    offload: bool = False
    """Keep the reward model's weights in CPU memory while they are not used."""
    normalize_enable: bool = False
    """Subtract the mean and divide by the standard deviation that the reward model's config.json holds."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """`low high`: bounds of the shaped reward, after group baselines."""
    overlong_buffer_len: Positive | None = None
    """Soft length penalty of DAPO: it grows over the last N tokens before the longest response. None: off."""
    overlong_penalty_factor: PositiveOrZero = 1.0
    """Penalty at the end of that buffer."""
    stop_properly_penalty_coef: Annotated[float, Range(at_most=1)] | None = None
    """For truncated responses: the reward times this if it is in [0, 1], this itself if it is negative. None:
    off."""
    batch: Count = 1
    """Samples that the reward function is handed in one call at most: those that finish together, or while
    its processes are busy. 1: each alone."""
    timeout: Positive = 60.0
    """Seconds that one call of the reward function may take; then it has failed."""
    num_workers: Count = 1
    """Reward processes of each engine."""
    remote_timeout: Positive = 600.0
    """Seconds that a reward over HTTP may take, from when it is first asked for, with all its tries; then its
    sample has failed."""
    remote_batch_size: Count = 16
    """Samples in one request to a reward server at most. 1: each alone."""
    remote_concurrency: Count = 32
    """Requests to reward servers that each engine has under way."""
    max_failed_ratio: Fraction = 0.5
    """Fraction of failed samples in one step above which the run stops."""

    @property
    def models(self) -> tuple[str, ...]:
        """Items of model_name_or_path; empty if remote_url gives the rewards alone."""
        if self.urls and self.model_weights is None:
            return ()
        return tuple(name.strip() for name in (self.model_name_or_path or "").split(",") if name.strip())

    @property
    def urls(self) -> tuple[str, ...]:
        """Items of remote_url."""
        return tuple(url.strip() for url in (self.remote_url or "").split(",") if url.strip())

    @property
    def servers(self) -> tuple[str, ...]:
        """URLs of reward servers; empty if remote_url names a function."""
        return tuple(url for url in self.urls if url.startswith(("http://", "https://")))

    @property
    def function(self) -> str | None:
        """File or reference of the reward function in remote_url; None if it names servers or nothing."""
        return resolve(self.urls[0], "rewards") if self.urls and not self.servers else None


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmConfig:
    """The sampling engines."""

    num_engines: Count | None = None
    """Engines. None: with train.colocate_all as many as the actor's GPUs hold, otherwise 1."""
    tensor_parallel_size: Count = 1
    """GPUs (or processes) that share each layer of one engine."""
    pipeline_parallel_size: Count = 1
    """Stages of one engine, each of which has a part of the layers on GPUs of its own. An engine has
    tensor_parallel_size times pipeline_parallel_size GPUs, on one node. For GPUs without fast links between
    them."""
    sync_backend: SyncBackend = "nccl"
    """How weights travel to engines on other GPUs. Shared GPUs use CUDA IPC, CPUs use gloo whatever it
    says."""
    sync_with_ray: bool = False
    """Weights travel through Ray's object store, to engines anywhere. It is slower than every other way, and
    works wherever Ray does: trainer and engines need no connection of their own, by NCCL, gloo or shared
    memory."""
    sync_bucket_mb: Count | None = None
    """MiB of weights that travel to the engines at a time. Both ends have up to two such buckets beside the
    weights. None: 64 over nccl and Ray's object store, 16 over gloo, 512 on GPUs that they share."""
    sync_check_steps: Count = 1
    """After every how many weight syncs engines and policy compare their log-probs of the same tokens. After
    the first one of a run, and where engines sleep, they always do."""
    lora_sync: LoraSync = "merged"
    """What a weight sync sends of a policy with adapters (ds.lora.rank). merged: all weights, adapters added
    to them. adapter: the weights below them once, and from then on the adapters alone, which engines keep
    apart: less to send, and slower to sample."""
    keep_cache: bool = False
    """With train.partial_rollout_enable: requests that a weight sync pauses go on with the KV cache of the
    old weights, instead of computing it anew with the new ones. Log-probs of later tokens are then those of
    no single weights."""
    enable_prefix_caching: bool = False
    """Keep the KV cache of prompts, for the other samples of a prompt and for later turns; it is reset at
    each weight sync."""
    enforce_eager: bool = False
    """No CUDA graphs: less memory, slower sampling."""
    enable_sleep: bool = False
    """Engines leave the GPU while the models train. With train.colocate_all only."""
    gpu_memory_utilization: PositiveFraction = 0.95
    """Fraction of the GPU's memory that an engine may take; with train.colocate_all no more than 0.95 of what
    the models leave."""
    kv_cache_gb: Positive | None = None
    """Size of an engine's KV cache, GB. None: what gpu_memory_utilization leaves; 0.25 without a GPU."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of one engine; of its processes on machines without GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How experience is sampled."""

    engine: EngineName = "vllm"
    """Library that samples. transformers: one request at a time and without vLLM, for small models and tests;
    weights travel through Ray's object store."""
    batch_size: Count = 1024
    """Prompts in one RL step."""
    n_samples_per_prompt: Count = 1
    """Responses to each prompt: the group that group estimators compare."""
    vllm_generate_batch_size: Count | None = None
    """Prompts sampled at a time. More than batch_size samples ahead: the surplus waits for the next steps.
    None: batch_size, or what dynamic filtering has not found yet."""
    micro_batch_size: Count = 1
    """Sequences in one micro-batch, a packed row, where log-probs are computed: memory and speed, not the
    result, depend on it."""
    max_tokens_per_gpu: Count | None = None
    """Tokens in such a row with train.dynamic_batch_enable. None: train.max_tokens_per_gpu."""
    temperature: Positive = 1.0
    """Sampling temperature. Training log-probs use it too."""
    top_p: PositiveFraction = 1.0
    """Sample from the most likely tokens that add up to this probability."""
    top_k: Annotated[int, Range(at_least=-1)] = -1
    """Sample from the k most likely tokens. -1: from all."""
    max_kept_tokens: CountOrZero = 32
    """With top_p or top_k, training log-probs are over the tokens that sampling kept of the vocabulary: the
    most likely of them, at most so many, and what the others had together stays as it was. 0: over the whole
    vocabulary, which is not what was sampled from."""
    max_new_tokens: Count | None = None
    """Longest response, tokens. None: what the prompt leaves of data.max_len."""
    timeout: Positive = 3600.0
    """Seconds without any finished prompt after which the run stops and says what it waits for."""
    stop: tuple[str, ...] | None = None
    """Texts that end a response too, in training and evaluation: with the token that completes one of them. A
    single word is split at its commas; YAML takes any text. None: only stop tokens end one."""
    episode_timeout: Positive | None = None
    """Seconds that one episode may take, its reward included; then it has failed. None: no limit."""
    max_concurrent_episodes: Count | None = None
    """Episodes that run at a time in each engine's process. None: all that the engine is given. Where nothing
    sets it, the variable OPENRLHF_ASYNC_NUM_TASKS does."""
    step_timeout: Positive | None = None
    """Seconds that one call of an agent's environment may take; then the episode has failed. None: no
    limit."""
    retries: CountOrZero = 0
    """How often an episode runs again, with other seeds, that failed in one of the ways of rollout.retry_on:
    the last time on another engine, where there is one."""
    retry_on: tuple[Failure, ...] = ("env_error", "timed_out", "aborted")
    """Failures after which an episode runs again. What is left of failures is not trained on, and counted:
    see reward.max_failed_ratio."""
    stop_on: tuple[Failure, ...] | None = None
    """Failures of which a single one ends the run, with its error."""
    mask_truncated: bool = False
    """Do not train on samples that ran out of tokens. Their rewards count where samples are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDataConfig:
    """Where prompts come from, and how they become text."""

    prompt_dataset: str = ""
    """Comma list of `path[@data_dir]`: .json .jsonl .csv .parquet .arrow files, also packed (.jsonl.gz), and
    folders of them, here or at URLs (s3://, gs://, hf://, https://), hub names; or of
    `reasoning_gym:NAME?size=N&seed=S`. Required."""
    prompt_probs: str | None = None
    """Comma list of probabilities, one for each dataset, to mix them. None: one after the other."""
    prompt_split: str = "train"
    """Split to take where a dataset has splits."""
    pretrain_dataset: str | None = None
    """Plain texts that the policy goes on learning while it is rewarded (PPO-ptx), as prompt_dataset: every
    optimizer step has train.batch_size of them, cut at max_len. None: none."""
    pretrain_probs: str | None = None
    """Comma list of probabilities to mix them, as prompt_probs."""
    pretrain_split: str = "train"
    """Split to take where they have splits."""
    pretrain_key: str | None = None
    """Column with the text. None: input_key."""
    max_samples: Count = 100_000_000
    """Prompts to use, of each dataset and in total."""
    max_len: Count = 2048
    """Longest sequence, tokens: prompt and response together."""
    input_key: str = "input"
    """Column with the prompt: text or messages."""
    label_key: str | None = None
    """Column with the ground truth, handed to the reward function. None: "", or where reasoning_gym verifies
    the answers its column `label`."""
    input_template: str | None = None
    """Text around the prompt, which replaces `{}`. Not with apply_chat_template."""
    apply_chat_template: bool = False
    """Format prompts with the tokenizer's chat template."""
    tokenizer_chat_template: str | None = None
    """Jinja chat template in place of the tokenizer's own."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    dataloader_num_workers: CountOrZero = 0
    """Accepted for old commands: rows are tokenised before training starts, by the tokenizer's own
    threads."""
    image_key: str = "images"
    """Column with images: a path, https:// address, data: URI, base64 or bytes, or a list of them."""
    max_images_per_prompt: CountOrZero = 0
    """Images in one prompt at most, with those that an agent's environment adds. 0: text only."""
    image_root: str | None = None
    """Folder that the paths of images begin at and may not leave. None: that of each file of rows."""
    image_hosts: tuple[str, ...] | None = None
    """Hosts whose https:// addresses are read. None: no image is downloaded."""
    bad_rows: BadRows | None = None
    """A row that cannot be used (a line that is no JSON, missing column, wrong type, empty prompt, prompt of
    data.max_len tokens or more) stops the run, or is left out and counted. None: prompts that are too long
    are left out and counted, everything else stops the run."""

    @property
    def broken_rows(self) -> BadRows:
        """Treatment of rows with faults other than excess length."""
        return self.bad_rows or "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation: sampled responses, scored by the same reward."""

    dataset: str | None = None
    """Evaluation prompts, as data.prompt_dataset; each dataset of a comma list is reported on its own. None:
    no evaluation."""
    split: str = "train"
    """Split to take where the dataset has splits."""
    steps: Steps = -1
    """Evaluate every N RL steps. -1: never."""
    temperature: PositiveOrZero = 0.6
    """Sampling temperature. 0: greedy, with one sample for each prompt."""
    n_samples_per_prompt: Count = 4
    """Responses to each prompt: the largest k of the best of k, and of pass@k."""
    max_samples: Count | None = None
    """Prompts of each dataset to use. None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Batches, passes, and who shares which GPUs."""

    batch_size: Count = 128
    """Samples in one optimizer step, over all ranks."""
    micro_batch_size: Count = 1
    """Sequences in one micro-batch: a packed row, the unit of a forward pass. Memory and speed, not the
    result, depend on it."""
    dynamic_batch_enable: bool = False
    """Fill rows up to max_tokens_per_gpu tokens; the two micro_batch_size are then not read."""
    max_tokens_per_gpu: Count = 16192
    """Tokens of one row with dynamic_batch_enable; ds.ring_attn_size times as many where ranks share rows. A
    longer sequence gets a row of its own."""
    max_epochs: Count = 1
    """Passes over the samples of each step."""
    num_episodes: Count = 1
    """Passes over the prompts."""
    max_steps: Count | None = None
    """Stop after this many RL steps. None: at the end of the prompts."""
    seed: CountOrZero = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Only deterministic kernels: the same run gives the same bits, slower."""
    backend: BackendName = "deepspeed"
    """Library that trains: DeepSpeed, or PyTorch alone, by fully_shard on several ranks (docs/models.md)."""
    colocate_all: bool = False
    """All models and engines share the actor's GPUs (hybrid engine): the GPUs of all engines must be the
    actor's. With async_enable engines have GPUs of their own."""
    colocate_actor_ref: bool = False
    """The reference model shares the actor's GPUs."""
    colocate_critic_reward: bool = False
    """Critic and reward model share GPUs."""
    placement_timeout: Positive | None = None
    """Seconds that the run waits for GPUs that others hold. None: as long as it takes."""
    async_enable: bool = False
    """Sample the next batches while training on this one."""
    async_queue_size: CountOrZero = 1
    """Batches that sampling may be ahead: steps by which a sample's weights may be older than those that it
    trains. 0: as without async_enable. Where nothing sets it, the variable OPENRLHF_ASYNC_QUEUE_SIZE does."""
    partial_rollout_enable: bool = False
    """Weight syncs pause generation instead of waiting for it. Needs async_enable."""
    enable_ema: bool = False
    """Keep a moving average of the policy, and save that."""
    ema_beta: Decay = 0.992
    """Decay rate of the moving average."""
    agent_func_path: str | None = None
    """Runs episodes of several turns and gives their rewards: a .py file with the class `AgentExecutor`, or
    in older ones a function `step`; a class as `folder/file.py:NAME` or `package.module:NAME`; or a name that
    an installed package registers (openrlhf.agents)."""
    max_turns: Count | None = None
    """Turns of one agent episode at most. None: as many as fit in data.max_len."""

    @property
    def agent(self) -> str | None:
        """File or reference of the agent's class; None without an agent."""
        return resolve(self.agent_func_path, "agents") if self.agent_func_path else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: EstimatorName = "gae"
    """How the rewards of a step become advantages of actions."""
    gamma: Fraction = 1.0
    """Discount per token, for gae and reinforce."""
    lambd: Fraction = 1.0
    """GAE: how far advantages look ahead."""
    no_std_norm: bool = False
    """Center advantages over the step without dividing by their deviation. For gae, reinforce,
    reinforce_baseline."""
    is_correction_enable: bool = False
    """Off-policy correction: for the gap between the sampler's probabilities and the trainer's."""
    is_correction_type: ISCorrectionType = "tis"
    """What is done where the two are apart."""
    is_correction_threshold: tuple[PositiveOrZero, Positive] = (0.5, 5.0)
    """`low high`: range of the ratio trainer / sampler."""
    is_correction_sequence_threshold: tuple[PositiveOrZero, Positive] | None = None
    """`low high`: range of a sequence's geometric mean ratio in seq-mask-tis, which stays much closer to 1.
    None: is_correction_threshold."""
    proximal_policy: ProximalPolicyName = "recomputed"
    """Decoupled PPO: the policy from which the clip counts; a correction weighs its gap to the sampler."""
    staleness_decay: PositiveFraction = 1.0
    """d in the weight d^s of an action's policy loss, where the weights that chose it are s steps behind. 1:
    all weigh the same."""
    max_token_staleness: CountOrZero | None = None
    """Actions chosen by weights that are more than this many steps behind have no policy loss. None: all have
    one."""

    @property
    def proximal(self) -> type[ProximalPolicy]:
        return PROXIMAL_POLICIES[self.proximal_policy]

    @property
    def traits(self) -> type[AdvantageEstimator]:
        return ESTIMATORS[self.estimator]

    @property
    def correction(self) -> type[Correction] | None:
        """Class of the off-policy correction; None without one."""
        return CORRECTIONS[self.is_correction_type] if self.is_correction_enable else None


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    """Penalty for moving away from the reference model."""

    init_coef: PositiveOrZero = 0.01
    """Weight of the penalty. 0: no reference model is loaded."""
    target: Positive | None = None
    """Adapt the weight so that the KL comes to this. None: the weight stays."""
    horizon: Count = 10000
    """Samples over which the weight may change by a fifth, which is the most in one step."""
    estimator: KLEstimator = "k1"
    """Estimate of the KL from samples (http://joschu.net/blog/kl-approx.html)."""
    use_loss: bool = False
    """Put the penalty into the loss instead of the reward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoConfig:
    """The algorithm. `--algo.options.NAME VALUE` sets an option of an estimator, a loss, a correction or a
    proximal policy of yours: a field of its class."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic_filtering_enable: bool = False
    """Drop groups whose mean score is outside dynamic_filtering_range, and sample others in their place
    (DAPO)."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """`low high`: groups with low < mean score < high are kept."""
    dynamic_filtering_max_batches: Count = 10
    """Prompts that one step may ask for, in multiples of rollout.batch_size. When they do not fill a batch,
    the run stops and says why."""
    skip_old_log_probs: bool | Literal["auto"] = "auto"
    """Where an RL step is one optimizer step, the policy before it is the policy itself: spare the forward
    pass that asks for its log-probs. auto: where nothing reads them before that step, as KL in the reward
    and a teacher do. Where algo.advantage.proximal_policy is not recomputed, however many optimizer steps
    there are."""
    max_mismatch: Positive | None = None
    """Nats by which log-probs of the engines and of the policy may differ, the mean over samples of the
    current weights, before the run stops. None: 0.3 in bf16 and 0.04 in fp16 and fp32, more than rounding
    explains. inf: never."""
    router_replay: bool = False
    """Mixtures of experts: in training every token goes to the experts that it went to when it was sampled
    (rollout routing replay), so that the gap between the sampler's probabilities and the trainer's is no
    matter of which expert a rounding chose. Needs vllm.enable_prefix_caching."""

    def build_estimator(self) -> AdvantageEstimator:
        return self.advantage.traits.of(self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOCkptConfig(CkptConfig):
    """What is written to disk, and when."""

    max_mem: Positive = float("inf")
    """Size of all kept checkpoints together, GB."""
    best_metric_key: str = ""
    """Evaluation metric that chooses the best checkpoint: default_score_mean (or default_pass1),
    default_best_of4, ... "": the mean score of the first source. none: keep no best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOLoggerConfig(LoggerConfig):
    """Where metrics and rollouts go."""

    wandb: WandbConfig = field(default_factory=lambda: wandb_for("ppo", "openrlhf_train_ppo"))
    rollouts: JournalMode = "full"
    """What the run folder keeps of each step's samples. sample: 16 from the best to the worst, and up to 16
    that failed. off: none."""


class RolePlacement(NamedTuple):
    """Placement of a model's ranks."""

    mesh: Mesh
    colocated_with: str | None
    """The role whose GPUs it shares; None: its own."""


CORRECTION_KEY = "algo.advantage.is_correction_type"
SELECTING: Mapping[str, Registry] = {
    "algo.advantage.estimator": ESTIMATORS,
    "actor.policy_loss_type": POLICY_LOSSES,
    CORRECTION_KEY: CORRECTIONS,
    "algo.advantage.proximal_policy": PROXIMAL_POLICIES,
}
"""Registries of the flags that select a class, by key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    """Reinforcement learning with Ray, vLLM and DeepSpeed."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    teacher: PPOTeacherConfig = field(default_factory=PPOTeacherConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: PromptDataConfig = field(default_factory=PromptDataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    ds: ScorerDeepSpeedConfig = field(default_factory=ScorerDeepSpeedConfig)
    ckpt: PPOCkptConfig = field(default_factory=PPOCkptConfig)
    logger: PPOLoggerConfig = field(default_factory=PPOLoggerConfig)
    placement: Placement = "manual"
    """Who chooses where models and engines run: the flags of placement (manual), or for those that nobody set
    the devices that there are (auto): all GPUs shared by models and engines, which sleep in turn, or with
    train.async_enable half of them for engines. See docs/clusters.md."""
    local_rank: int = -1
    """Set by launchers; not read, because Ray starts the workers."""
    use_ms: bool = False
    """Names of models and datasets are looked up on ModelScope in place of the Hugging Face hub."""

    @property
    def run_dir(self) -> str:
        return run_dir(self.logger, self.ckpt)

    @property
    def critic_output_dir(self) -> str:
        """Folder to which critic.save_value_network writes the critic."""
        return f"{self.ckpt.output_dir}_critic"

    @property
    def selected(self) -> dict[str, type[Selectable]]:
        """Returns the selected classes by flag."""
        return {key: SELECTING[key][name] for key, name in self._names.items()}

    @property
    def references(self) -> dict[str, str]:
        """Returns the references of flags that select a class of the user or of an installed package, by
        flag."""
        found = {key: SELECTING[key].reference(name) for key, name in self._names.items()}
        return {key: reference for key, reference in found.items() if reference}

    def with_references(self, here: Callable[[str], str]) -> "PPOConfig":
        """Returns the configuration for another machine, where `here` maps a reference to one that leads to
        the same class there, see `UserFiles.here`."""
        return with_values(self, {key: here(reference) for key, reference in self.references.items()})

    @property
    def _names(self) -> dict[str, str]:
        values = values_of(self)
        corrects = self.algo.advantage.is_correction_enable
        return {key: values[key] for key in SELECTING if corrects or key != CORRECTION_KEY}

    @property
    def uses_critic(self) -> bool:
        return self.algo.advantage.traits.needs_critic

    @property
    def critic_path(self) -> str:
        """Path of the model from which the critic starts."""
        return self.critic.model_name_or_path or (*self.reward.models, self.actor.model_name_or_path)[0]

    @property
    def critic_aux_loss_coef(self) -> float:
        own = self.critic.aux_loss_coef
        return self.actor.aux_loss_coef if own is None else own

    @property
    def frozen_actor_steps(self) -> int:
        """Number of RL steps at the start in which only the critic learns."""
        return max(0, self.critic.freezing_steps) if self.uses_critic else 0

    @property
    def gym_verifies(self) -> bool:
        """True if reasoning_gym's verifier gives the rewards: all datasets are its own, and no other reward
        source is configured."""
        others = self.reward.urls or self.reward.models or self.train.agent_func_path
        items = split_spec(self.data.prompt_dataset) + split_spec(self.eval.dataset or "")
        return not others and bool(items) and all(is_gym(item) for item in items)

    @property
    def reward_function(self) -> str | None:
        """File or reference of the reward function; None without one."""
        return GYM_VERIFIER if self.gym_verifies else self.reward.function

    @property
    def label_key(self) -> str | None:
        """Column with the ground truth; None without one."""
        return self.data.label_key or ("label" if self.gym_verifies else None)

    @property
    def uses_reward_model(self) -> bool:
        return bool(self.reward.models)

    @property
    def reads_images(self) -> bool:
        return self.data.max_images_per_prompt > 0

    @property
    def uses_reference(self) -> bool:
        return self.algo.kl.init_coef > 0

    @property
    def uses_teacher(self) -> bool:
        return self.teacher.model_name_or_path is not None

    @property
    def placements(self) -> dict[str, RolePlacement]:
        """Placement of the run's models by role; a role comes before those that share its GPUs."""
        train, everyone = self.train, "actor" if self.train.colocate_all else None
        colocated_with: dict[str, str | None] = {"actor": None}
        if self.uses_critic:
            colocated_with["critic"] = everyone
        if self.uses_reference and not self.ds.lora.rank:  # with LoRA, the bare policy is the reference
            colocated_with["ref"] = "actor" if train.colocate_actor_ref else everyone
        if self.uses_reward_model:
            with_critic = self.uses_critic and train.colocate_critic_reward
            colocated_with["reward"] = everyone or ("critic" if with_critic else None)
        if self.uses_teacher:
            colocated_with["teacher"] = everyone
        sizes = {
            "actor": self.actor,
            "critic": self.critic,
            "ref": self.ref,
            "reward": self.reward,
            "teacher": self.teacher,
        }
        return {
            role: RolePlacement(
                self._mesh((size := sizes[other or role]).num_nodes * size.num_gpus_per_node), other
            )
            for role, other in colocated_with.items()
        }

    @property
    def own_placements(self) -> dict[str, int]:
        """Number of ranks of each role with GPUs of its own."""
        return {role: p.mesh.size for role, p in self.placements.items() if p.colocated_with is None}

    def _mesh(self, num_ranks: int) -> Mesh:
        ds = self.ds
        return Mesh.within(num_ranks, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)

    @property
    def num_engines(self) -> int:
        if self.vllm.num_engines is not None:
            return self.vllm.num_engines
        return max(1, self.actor.num_gpus // self.vllm.num_gpus) if self.engines_colocated else 1

    @property
    def max_staleness(self) -> int:
        """Number of steps that sampling may be ahead."""
        return self.train.async_queue_size if self.train.async_enable else 0

    @property
    def largest_staleness(self) -> float:
        """Largest number of steps by which the weights that sampled an action may be behind those that learn
        from it; inf if surplus groups wait for later steps."""
        at_a_time, rollout = self.rollout.vllm_generate_batch_size or 0, self.rollout
        waits = at_a_time > rollout.batch_size or (at_a_time and self.algo.dynamic_filtering_enable)
        return math.inf if waits else self.max_staleness

    @property
    def engines_colocated(self) -> bool:
        """True if engines share the models' GPUs; engines that sample during training have their own."""
        return self.train.colocate_all and not self.train.async_enable

    @property
    def engines_sleep(self) -> bool:
        """True if engines sleep: vllm.enable_sleep with engines on the models' GPUs."""
        return self.vllm.enable_sleep and self.engines_colocated

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel copies of the policy, each with its own samples."""
        return self.placements["actor"].mesh.data

    @property
    def samples_per_step(self) -> int:
        return self.rollout.batch_size * self.rollout.n_samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps in one RL step."""
        batches = max(1, round(self.samples_per_step / self.train.batch_size))
        return batches * self.train.max_epochs

    @property
    def skips_old_log_probs(self) -> bool:
        """True if no forward pass before an RL step's update computes the policy's log-probs."""
        if self.algo.skip_old_log_probs != "auto":
            return self.algo.skip_old_log_probs
        kl_in_reward = self.uses_reference and not self.algo.kl.use_loss
        known_later = self.updates_per_step == 1 and not self.rollout.mask_truncated
        are_read = self.algo.advantage.proximal.needs_forward or self.adapts_kl
        read_first = kl_in_reward or self.uses_teacher or self.algo.advantage.traits.needs_log_probs
        return not read_first and (known_later or not are_read)

    @property
    def adapts_kl(self) -> bool:
        """True if the KL controller needs the KL of each step."""
        return self.uses_reference and self.algo.kl.target is not None

    @property
    def ratio_is_one(self) -> bool:
        """True if the policy is its own pi_prox, in the only optimizer step of an RL step."""
        return self.skips_old_log_probs and self.algo.advantage.proximal.needs_forward

    @property
    def longest_response(self) -> int:
        """Largest number of tokens of a response."""
        return self.rollout.max_new_tokens or self.data.max_len

    @property
    def rollout_tokens_per_gpu(self) -> int:
        """Token budget of a packed row in log-prob passes, with train.dynamic_batch_enable."""
        return self.rollout.max_tokens_per_gpu or self.train.max_tokens_per_gpu
