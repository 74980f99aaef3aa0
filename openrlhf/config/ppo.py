"""Configuration of `train_ppo_ray`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from openrlhf.algorithms.advantages import ESTIMATORS, AdvantageEstimator
from openrlhf.algorithms.corrections import CORRECTIONS, Correction
from openrlhf.algorithms.corrections.gated import Gated
from openrlhf.algorithms.curricula import CURRICULA
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES, ProximalPolicy
from openrlhf.algorithms.reductions import AGGREGATIONS
from openrlhf.config.checks import split_spec
from openrlhf.config.choices import (
    BadRows,
    Count,
    CountOrZero,
    Decay,
    EngineName,
    Fraction,
    JournalMode,
    LoraSync,
    OneOf,
    Positive,
    PositiveFraction,
    PositiveOrZero,
    Range,
    Steps,
)
from openrlhf.config.fields import flag_values, with_values
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.reasoning_gym import GYM_VERIFIER, is_gym
from openrlhf.config.resume import NEW_LENGTH, Change, Content, Free, OnResume
from openrlhf.config.sections import (
    AdamConfig,
    BatchesConfig,
    CkptConfig,
    EngineMemoryConfig,
    ImagesConfig,
    LoaderConfig,
    LoggerConfig,
    OptimConfig,
    RowFunctionConfig,
    RowTemplateConfig,
    ScorerDeepSpeedConfig,
    TrainedModelConfig,
    TrainingConfig,
    WandbConfig,
    wandb_for,
)
from openrlhf.mesh import Mesh
from openrlhf.plugins import resolve
from openrlhf.registry import Registry, Selectable

EstimatorName = Annotated[str, OneOf(ESTIMATORS)]
KLEstimator = Annotated[str, OneOf(KL_ESTIMATORS)]
PolicyLossType = Annotated[str, OneOf(POLICY_LOSSES)]
LossAggregation = Annotated[str, OneOf(AGGREGATIONS)]
ISCorrectionType = Annotated[str, OneOf(CORRECTIONS)]
ProximalPolicyName = Annotated[str, OneOf(PROXIMAL_POLICIES)]
GroupEstimator = Literal["group_norm", "dr_grpo", "rloo"]
GROUP_ESTIMATORS: tuple[str, ...] = get_args(GroupEstimator)
"""Estimators that compare the samples of a prompt alone."""
CurriculumName = Annotated[str, OneOf(CURRICULA)]
Failure = Literal["env_error", "reward_error", "timed_out", "aborted"]

OTHER_REWARDS = OnResume(
    Change.REMARKED, "if the reward source changed, rewards before and after cannot be compared"
)
OTHER_AGENT = OnResume(
    Change.REMARKED, "if the agent changed, episodes and rewards before and after cannot be compared"
)

ACTOR_FLAG = "--actor.model_name_or_path"
CRITIC_FLAG = "--critic.model_name_or_path"
REWARD_FLAG = "--reward.model_name_or_path"
TEACHER_FLAG = "--teacher.model_name_or_path"


@dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimConfig, TrainedModelConfig):
    """The policy: the model that is trained and sampled from."""

    model_name_or_path: Content[str] = ""
    """Model from which policy and reference start: a Hugging Face name or a folder. Required."""
    num_nodes: Free[Count] = 1
    """Number of nodes on which the policy trains."""
    num_gpus_per_node: Free[Count] = 8
    """Ranks of the policy on each node, one for each GPU (without GPUs: processes). If unset: 8, or the
    number of GPUs of a node if that is smaller."""
    adam: AdamConfig = AdamConfig(lr=1e-6)
    eps_clip: Annotated[float, Range(above=0, below=1)] = 0.2
    """Clip range of PPO: the probability ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_low_high: tuple[Annotated[float, Range(above=0, at_most=1)], Positive] | None = None
    """Clip range with two bounds, `low high`: the ratio is clipped to [1 - low, 1 + high] (clip-higher of
    DAPO). None: actor.eps_clip on both sides."""
    dual_clip: Annotated[float, Range(above=1)] | None = None
    """Dual-clip PPO: for negative advantages the loss is at most -c * advantage, where c is this value. None:
    off."""
    policy_loss_type: PolicyLossType = "ppo"
    """Policy loss."""
    loss_aggregation: LossAggregation | None = None
    """Averaging of policy loss, KL and entropy. None: sample_mean if actor.policy_loss_type compares
    sequences, otherwise token_mean."""
    entropy_coef: PositiveOrZero | None = None
    """Weight of the entropy bonus. 0: the entropy is only logged. None: it is not computed."""
    ptx_coef: PositiveOrZero = 0.05
    """PPO-ptx: weight of the negative log-likelihood of pre-training texts (data.pretrain_dataset) in every
    optimizer step."""

    @property
    def loss(self) -> type[PolicyLoss]:
        return POLICY_LOSSES[self.policy_loss_type]

    @property
    def aggregates_by_prompt(self) -> bool:
        """True if the loss reads the prompts of actions."""
        return AGGREGATIONS[self.loss_aggregation or self.loss.aggregation()].by_prompt

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances by which the ratio may fall below and rise above 1."""
        return self.eps_clip_low_high or (self.eps_clip, self.eps_clip)

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.num_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """Placement of a model other than the policy."""

    num_nodes: Free[CountOrZero] = 1
    """Number of nodes on which the model runs. Not read if the model shares another model's GPUs, as with
    train.colocate_all; 0 is then allowed."""
    num_gpus_per_node: Free[CountOrZero] = 8
    """Ranks of the model on each node, one for each GPU. Not read if the model shares another model's GPUs.
    If unset: 8, or the number of GPUs of a node if that is smaller."""


@dataclass(frozen=True, kw_only=True)
class FrozenRoleConfig(RoleConfig):
    """Placement of a model that is not trained."""

    offload: Free[bool] = False
    """Keep the weights in CPU memory while they are not used."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimConfig, RoleConfig):
    """The value model of the estimator gae."""

    model_name_or_path: Content[str | None] = None
    """Model from which the critic starts: a Hugging Face name or a folder. None: the first reward model, or
    without one the policy."""
    model_kwargs: PassThrough = field(default_factory=PassThrough)
    """Options with which transformers loads the critic, as actor.model_kwargs."""
    adam: AdamConfig = AdamConfig(lr=9e-6)
    value_clip: Positive = 0.5
    """Clip range of the value loss: new values are clipped to this distance from the old ones."""
    aux_loss_coef: PositiveOrZero | None = None
    """MoE models: weight of the load-balancing loss. None: actor.aux_loss_coef."""
    freeze_moe_router: bool | None = None
    """MoE models: do not train the routers. None: as actor.freeze_moe_router."""
    gradient_checkpointing_enable: Free[bool | None] = None
    """Recompute activations in the backward pass. None: as actor.gradient_checkpointing_enable."""
    freezing_steps: Steps = -1
    """Warm-up of the critic: the policy does not learn in the first N steps. -1: none."""
    save_value_network: Free[bool] = False
    """Also write the final critic, to `{ckpt.output_dir}_critic`."""


@dataclass(frozen=True, kw_only=True)
class RefConfig(FrozenRoleConfig):
    """The reference model of the KL penalty: the policy as it was at the start."""


@dataclass(frozen=True, kw_only=True)
class PPOTeacherConfig(FrozenRoleConfig):
    """On-policy distillation: each action of the policy's own samples is rewarded with the teacher's log-prob
    minus the policy's."""

    model_name_or_path: Content[str | None] = None
    """Teacher model: a Hugging Face name or a folder. It must have the policy's vocabulary. None: no
    teacher."""
    model_kwargs: PassThrough = field(default_factory=PassThrough)
    """Options with which transformers loads the teacher, as actor.model_kwargs."""
    kd_coef: Positive = 1.0
    """Weight of the teacher's reward. It is added to the reward of other sources, or is the only reward."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig(FrozenRoleConfig):
    """Reward sources and reward shaping."""

    remote_url: Annotated[str | None, OTHER_REWARDS] = None
    """Reward function or reward servers: a .py file with `reward_func(queries, prompts, labels)`, a function
    as `folder/file.py:NAME` or `package.module:NAME`, a name that an installed package registers
    (openrlhf.rewards), or a comma list of http URLs."""
    model_name_or_path: Content[str | None] = None
    """Reward models: a comma list of Hugging Face names or folders, whose scores are added up. Beside
    reward.remote_url they are only used with reward.model_weights."""
    model_kwargs: PassThrough = field(default_factory=PassThrough)
    """Options with which transformers loads the reward models, as actor.model_kwargs."""
    model_weights: tuple[float, ...] | None = None
    """Weights of the reward models, in their order: each score is multiplied by its weight before all are
    added up, together with the reward of reward.remote_url. None: weight 1 each; with reward.remote_url the
    reward models are not used."""
    normalize_enable: bool = False
    """Normalise the scores of a reward model with the mean and the standard deviation of its config.json."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Bounds of the reward, `low high`: it is clipped to them after group baselines are subtracted."""
    overlong_buffer_len: Positive | None = None
    """Soft length penalty of DAPO: it grows linearly over the last N tokens before the maximum response
    length. None: off."""
    overlong_penalty_factor: PositiveOrZero = 1.0
    """Largest penalty of reward.overlong_buffer_len, for a response of the maximum length."""
    stop_properly_penalty_coef: Annotated[float, Range(at_most=1)] | None = None
    """Reward of truncated responses. From 0 to 1: their reward is multiplied by this, which raises negative
    ones. Negative: it replaces their reward. None: they keep it."""
    batch: Free[Count] = 1
    """Maximum number of samples in one call of the reward function. Samples are scored together if they
    finish at the same time or wait for a busy process. 1: one call for each sample."""
    timeout: Free[Positive] = 60.0
    """Seconds that one call of the reward function may take before it counts as failed."""
    num_workers: Free[Count] = 1
    """Processes of each engine that run the reward function."""
    memory_gb: Free[Positive | None] = None
    """Memory limit of each process of the reward function, GB. A call that needs more fails with a
    MemoryError. None: the memory of the machine."""
    remote_timeout: Free[Positive] = 600.0
    """Seconds that the reward of a sample may take over HTTP, all retries included, before it counts as
    failed."""
    remote_try_timeout: Free[Positive | None] = None
    """Seconds that one attempt at a reward server may take; after that the next server is tried. None:
    reward.remote_timeout divided by the number of servers."""
    remote_batch_size: Free[Count] = 16
    """Maximum number of samples in one request to a reward server. 1: one request for each sample."""
    remote_concurrency: Free[Count] = 32
    """Maximum number of requests to reward servers that each engine has in flight."""
    max_failed_ratio: Free[Fraction] = 0.5
    """Fraction of failed samples in one step above which the run stops."""

    @property
    def models(self) -> tuple[str, ...]:
        """Items of model_name_or_path; empty if remote_url gives the rewards alone."""
        if self.urls and self.model_weights is None:
            return ()
        return tuple(split_spec(self.model_name_or_path or ""))

    @property
    def urls(self) -> tuple[str, ...]:
        """Items of remote_url."""
        return tuple(split_spec(self.remote_url or ""))

    @property
    def servers(self) -> tuple[str, ...]:
        """URLs of reward servers; empty if remote_url names a function."""
        return tuple(url for url in self.urls if url.startswith(("http://", "https://")))

    @property
    def function(self) -> str | None:
        """File or reference of the reward function in remote_url; None if it names servers or nothing."""
        return resolve(self.urls[0], "rewards") if self.urls and not self.servers else None


@dataclass(frozen=True, kw_only=True)
class VllmConfig(EngineMemoryConfig):
    """The rollout engines."""

    num_engines: Free[Count | None] = None
    """Number of engines. None: with train.colocate_all as many as fit on the actor's GPUs, otherwise 1."""
    tensor_parallel_size: Free[Count] = 1
    """Tensor parallelism of an engine: GPUs (without GPUs: processes) that share each of its layers."""
    pipeline_parallel_size: Free[Count] = 1
    """Pipeline parallelism of an engine: stages that have some of its layers each. An engine has
    tensor_parallel_size x pipeline_parallel_size GPUs, all on one node. For GPUs without fast links."""
    sync_backend: Free[Literal["nccl", "gloo"]] = "nccl"
    """Transport of the weights to engines on other GPUs. Not read for engines on the actor's GPUs (CUDA IPC)
    and on CPUs (gloo)."""
    sync_with_ray: Free[bool] = False
    """Send weights through Ray's object store, which is slower than every other transport. For clusters in
    which trainer and engines cannot connect by NCCL, gloo or shared memory."""
    sync_bucket_mb: Free[Count | None] = None
    """Size of the buckets in which weights are sent to the engines, MiB. Sender and receiver keep up to two
    such buckets beside the weights. None: 64 for nccl and Ray's object store, 16 for gloo, 512 on shared
    GPUs."""
    sync_check_steps: Free[Count] = 1
    """Compare the log-probs of engines and policy on the same tokens after every N weight syncs. They are
    always compared after the first sync of a run, and where engines sleep."""
    lora_sync: Free[LoraSync] = "merged"
    """Content of a weight sync with LoRA (ds.lora.rank). merged: all weights with the adapters added; bf16
    and fp16 round small updates away. adapter: only the adapters; sends less and samples more slowly. If
    unset: adapter in bf16 and fp16 where vLLM has LoRA layers for the model (text, no experts, rank 512 at
    most, no speculative decoding)."""
    keep_cache: bool = False
    """With train.partial_rollout_enable: requests that a weight sync pauses keep the KV cache of the old
    weights, instead of computing it again with the new ones. Faster, but log-probs of later tokens then come
    from a mixture of both weights."""
    enable_prefix_caching: Free[bool] = False
    """Share the KV cache of a prompt among its samples and with later turns. It is reset at each weight
    sync."""
    enable_sleep: Free[bool] = False
    """Engines free the GPU while the models train. Only with train.colocate_all."""
    speculative: str | None = None
    """Speculative decoding: vLLM's speculative_config as a JSON object, or METHOD:TOKENS, such as ngram:3.
    Engines propose several tokens and check them in one pass. Samples follow the same distribution, but a
    seed gives other tokens. None: off."""
    gpu_memory_utilization: Free[PositiveFraction] = 0.95
    """Fraction of the GPU's memory that an engine may use. With train.colocate_all, at most 0.95 of what the
    models leave free."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of one engine; of its processes on machines without GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling of responses."""

    engine: Free[EngineName] = "vllm"
    """Library that samples. transformers: without vLLM, for small models and tests; weights are sent through
    Ray's object store."""
    batch_size: Count = 1024
    """Prompts in one RL step."""
    n_samples_per_prompt: Count = 1
    """Samples of each prompt: the group that group estimators compare."""
    vllm_generate_batch_size: Count | None = None
    """Prompts that are sampled at a time. More than rollout.batch_size means sampling ahead: the surplus
    waits for later steps. None: rollout.batch_size, or the prompts that dynamic filtering still needs."""
    micro_batch_size: Free[Count] = 1
    """Samples in one micro-batch, a packed row, of the passes that compute log-probs. Memory and speed depend
    on it, the result does not."""
    max_tokens_per_gpu: Free[Count | None] = None
    """Tokens in one row of the passes that compute log-probs, with train.dynamic_batch_enable. None:
    train.max_tokens_per_gpu."""
    temperature: Positive = 1.0
    """Sampling temperature. Log-probs of training use it too."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: sample from the most likely tokens whose probabilities add up to this. 1: from
    all."""
    top_k: Annotated[int, Range(at_least=-1)] = -1
    """Sample from the k most likely tokens. -1: from all."""
    max_kept_tokens: CountOrZero = 32
    """With rollout.top_p or rollout.top_k: log-probs of training are normalised over the tokens that could be
    sampled. Up to this many of them are recorded, the most likely ones; the probability of the others
    together is held constant. 0: log-probs over the whole vocabulary, which differ from those of the sampling
    distribution."""
    max_new_tokens: Count | None = None
    """Maximum length of a response, tokens. None: what the prompt leaves of data.max_len."""
    timeout: Positive = 3600.0
    """Seconds without any finished prompt after which the run stops and lists what it waits for."""
    engine_timeout: Free[Positive] = 300.0
    """Maximum time, seconds, without an answer of an engine, without a token from an engine that has
    requests, or of one call of a weight sync; after it the engine is replaced. An engine that samples tokens
    may take any time."""
    stop: tuple[str, ...] | None = None
    """Stop strings, in training and evaluation: a response ends with the token that completes one. A single
    word is split at its commas, unless it is in a list in YAML. None: only stop tokens end a response."""
    episode_timeout: Free[Positive | None] = None
    """Seconds that an episode may take, its reward included, before it counts as failed. None: no limit."""
    max_concurrent_episodes: Free[Count | None] = None
    """Maximum number of episodes that run at a time in each engine's process. None: all that the engine gets.
    The environment variable OPENRLHF_ASYNC_NUM_TASKS sets it if nothing else does."""
    step_timeout: Free[Positive | None] = None
    """Seconds that one call of an agent's environment may take before the episode counts as failed. None: no
    limit."""
    retries: Free[CountOrZero] = 0
    """Number of times that an episode is repeated with other seeds if it fails in a way named in
    rollout.retry_on. The last attempt runs on another engine if there is one."""
    retry_on: Free[tuple[Failure, ...]] = ("env_error", "timed_out", "aborted")
    """Failures after which an episode is repeated. Episodes that still fail are counted
    (reward.max_failed_ratio) and not trained on."""
    stop_on: Free[tuple[Failure, ...] | None] = None
    """Failures that end the run at once, with the error of the episode. None: no failure does."""
    mask_truncated: bool = False
    """Do not train on samples that ran out of tokens. Their rewards still count in the comparison of a
    group."""

    @property
    def is_truncated(self) -> bool:
        """True if top-p or top-k truncates the sampling distribution."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True, kw_only=True)
class PromptDataConfig(ImagesConfig, RowTemplateConfig, LoaderConfig, RowFunctionConfig):
    """The prompts, and how they become text."""

    prompt_dataset: Content[str] = ""
    """Comma list of datasets, each as `path` or `path@data_dir`: a .json, .jsonl, .csv, .parquet or .arrow
    file (also compressed, such as .jsonl.gz), a folder of such files, a URL (s3://, gs://, hf://, https://),
    a name on the hub, or problems of reasoning-gym as `reasoning_gym:NAME?size=N&seed=S`. Required."""
    prompt_probs: str | None = None
    """Comma list of probabilities, one for each dataset, with which prompts are drawn from the datasets.
    None: the datasets follow one another."""
    prompt_split: str = "train"
    """Split to read from datasets that have splits."""
    curriculum: CurriculumName | None = None
    """Order of the prompts by what the policy has learned: which prompt is sampled next. None: each prompt
    once in an epoch, at random."""
    pretrain_dataset: Content[str | None] = None
    """PPO-ptx: datasets of plain text that the policy also trains on, in the form of data.prompt_dataset.
    Every optimizer step has train.batch_size texts, cut at data.max_len. None: off."""
    pretrain_probs: str | None = None
    """Probabilities of the datasets of data.pretrain_dataset, in the form of data.prompt_probs."""
    pretrain_split: str = "train"
    """Split to read from pre-training datasets that have splits."""
    pretrain_key: str | None = None
    """Column with the pre-training text. None: data.input_key."""
    max_samples: Count = 100_000_000
    """Maximum number of prompts, of each dataset and in total."""
    max_len: Count = 2048
    """Maximum length of prompt and response together, tokens."""
    input_key: str = "input"
    """Column with the prompt: text or messages."""
    label_key: str | None = None
    """Column with the ground truth, which the reward function gets. None: an empty label, or the column
    `label` if reasoning-gym verifies the answers."""
    bad_rows: BadRows | None = None
    """Treatment of rows that cannot be used: a line that is not JSON, a missing column, a value of the wrong
    type, an empty prompt, a prompt of data.max_len tokens or more. error: the run stops before training.
    skip: they are left out and counted. None: skip for prompts that are too long, error for all others."""

    @property
    def broken_rows(self) -> BadRows:
        """Treatment of rows with faults other than excess length."""
        return self.bad_rows or "error"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """The prompts with NAME in the column `datasource`, or else those of a dataset NAME.jsonl, and what
    differs for them. None: as in the whole run."""

    quota: Count | None = None
    """Number of prompts of the task in each RL step. The quotas of all tasks add up to rollout.batch_size. A
    task starts its prompts again when they are used up. None, for all tasks: as the prompts come."""
    reward: Annotated[str | None, OTHER_REWARDS] = None
    """Reward function or reward servers of the task, in the form of reward.remote_url; of its evaluation,
    too."""
    agent: Annotated[str | None, OTHER_AGENT] = None
    """Agent of the task, in the form of train.agent_func_path."""
    temperature: Positive | None = None
    """Sampling temperature of the task in training. Log-probs of training use it too."""
    estimator: GroupEstimator | None = None
    """Advantage estimator of the task. The run's estimator must be one of these, too: they compare the
    samples of a prompt alone, so tasks do not mix."""
    kl_coef: PositiveOrZero | None = None
    """Weight of the KL penalty in the task's rewards, in place of algo.kl.init_coef."""
    overlong_buffer_len: Positive | None = None
    """Soft length penalty, as reward.overlong_buffer_len."""
    overlong_penalty_factor: PositiveOrZero | None = None
    """Largest length penalty, as reward.overlong_penalty_factor."""
    stop_properly_penalty_coef: Annotated[float, Range(at_most=1)] | None = None
    """Reward of truncated responses, as reward.stop_properly_penalty_coef."""


PENALTIES = ("overlong_buffer_len", "overlong_penalty_factor", "stop_properly_penalty_coef")
TASK_FLAGS = {
    "reward": "reward.remote_url",
    "agent": "train.agent_func_path",
    "temperature": "rollout.temperature",
    "estimator": "algo.advantage.estimator",
    **{name: f"reward.{name}" for name in PENALTIES},
}
"""Values of a task -> the flags whose values they replace."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation: sampled responses, scored by the reward sources of training."""

    dataset: str | None = None
    """Prompts to evaluate on, in the form of data.prompt_dataset. Each dataset of a comma list gets metrics
    of its own. None: no evaluation."""
    split: str = "train"
    """Split to read from datasets that have splits."""
    steps: Steps = -1
    """Evaluate before the first RL step, after every N steps and after the last one. -1: never."""
    eval_at_start: bool = False
    """Evaluate before the first RL step, whatever eval.steps is."""
    eval_only: bool = False
    """Evaluate once and end, without training and without writing a model. Of the models that learn or guide
    learning, only the policy is built, without an optimizer. With ckpt.load_enable, the last checkpoint is
    evaluated."""
    temperature: PositiveOrZero = 0.6
    """Sampling temperature. 0: greedy, with one sample of each prompt."""
    top_p: PositiveFraction | None = None
    """Nucleus sampling in evaluation. None: rollout.top_p."""
    max_new_tokens: Count | None = None
    """Maximum length of a response in evaluation, tokens. None: rollout.max_new_tokens."""
    n_samples_per_prompt: Count = 4
    """Samples of each prompt, and the largest k of the metrics best of k and pass@k."""
    max_samples: Count | None = None
    """Maximum number of prompts of each dataset. None: all."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(BatchesConfig):
    """Batches, epochs, and sharing of GPUs."""

    max_epochs: Count = 1
    """Passes over the samples of each RL step (PPO epochs)."""
    force_on_policy: bool = False
    """Take one optimizer step in each RL step, on all its samples, whatever train.batch_size is."""
    shuffle: Literal["sample", "group"] = "sample"
    """Assignment of samples to the optimizer steps of an RL step. sample: each sample by itself, at random.
    group: all samples of a prompt in the same optimizer step, whose rows compute the prompt once. It needs a
    train.batch_size of at least rollout.n_samples_per_prompt."""
    num_episodes: Annotated[Count, NEW_LENGTH] = 1
    """Epochs: passes over the prompts."""
    max_steps: Annotated[Count | None, NEW_LENGTH] = None
    """Stop after this many RL steps. None: after train.num_episodes."""
    colocate_all: Free[bool] = False
    """Hybrid engine: all models and engines share the actor's GPUs, so the engines together must have as many
    GPUs as the actor. With train.async_enable engines have GPUs of their own."""
    colocate_actor_ref: Free[bool] = False
    """The reference model shares the actor's GPUs."""
    colocate_critic_reward: Free[bool] = False
    """Critic and reward model share their GPUs."""
    placement_timeout: Free[Positive | None] = None
    """Seconds that the run waits for GPUs of a cluster that are in use. None: no limit."""
    max_restarts: Free[CountOrZero] = 0
    """Number of times that the run restarts from its newest checkpoint after a rank died or an engine could
    not be replaced. 0: the run ends."""
    async_enable: bool = False
    """Asynchronous training: sample the next batches while the models train on the current one."""
    async_queue_size: CountOrZero = 1
    """Maximum number of batches that sampling may be ahead of training: samples come from weights up to this
    many steps older than those that they train. 0: as without train.async_enable. The environment variable
    OPENRLHF_ASYNC_QUEUE_SIZE sets it if nothing else does."""
    partial_rollout_enable: bool = False
    """Weight syncs pause responses and continue them with the new weights, instead of waiting for their end.
    Needs train.async_enable."""
    enable_ema: bool = False
    """Keep an exponential moving average of the policy's weights, and save it as the final model."""
    ema_beta: Decay = 0.992
    """Decay rate of the moving average."""
    agent_func_path: Annotated[str | None, OTHER_AGENT] = None
    """Agent, which runs episodes of several turns and gives their rewards: a .py file with the class
    `AgentExecutor` (or, in old files, a function `step`), a class as `folder/file.py:NAME` or
    `package.module:NAME`, or a name that an installed package registers (openrlhf.agents)."""
    max_turns: Count | None = None
    """Maximum number of turns of an episode. None: as many as fit in data.max_len."""

    @property
    def agent(self) -> str | None:
        """File or reference of the agent's class; None without an agent."""
        return resolve(self.agent_func_path, "agents") if self.agent_func_path else None


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages and the off-policy correction."""

    estimator: EstimatorName = "gae"
    """Advantage estimator: how the rewards of a step become advantages of actions."""
    gamma: Fraction = 1.0
    """Discount per token, for gae and reinforce."""
    lambd: Fraction = 1.0
    """lambda of GAE: 0 is one-step temporal difference (least variance), 1 is Monte Carlo (least bias)."""
    no_std_norm: bool = False
    """Subtract the mean of the step's advantages without dividing by their standard deviation. For gae,
    reinforce and reinforce_baseline."""
    is_correction_level: Literal["off", "token", "seq"] = "off"
    """Off-policy correction: the policy loss of a token is multiplied by the ratio of the trainer's
    probability to the engine's, and algo.advantage.is_correction_mode bounds it. token: the bounds are those
    of each token. seq: those of a sequence's mean, which masks whole sequences."""
    is_correction_mode: Literal["mask", "clip"] = "mask"
    """mask: tokens or sequences outside of algo.advantage.is_correction_threshold have no policy loss. clip:
    the ratio of each token is clipped to it."""
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """Statistic that the mask compares with algo.advantage.is_correction_threshold. ratio: the ratio, or its
    geometric mean over a sequence. binary_kl, tv: the KL divergence and the total variation between engine
    and trainer, over two events, the sampled token and all others; a trust region."""
    is_correction_threshold: tuple[PositiveOrZero, ...] = (0.5, 5.0)
    """Bounds of the off-policy correction, `low high`, or one upper bound, `high`."""
    is_correction_enable: bool = False
    """Off-policy correction by its type: the policy loss of a token is multiplied by a weight that
    algo.advantage.is_correction_type computes from the ratio of the trainer's probability to the
    engine's."""
    is_correction_type: ISCorrectionType = "tis"
    """Type of the off-policy correction with algo.advantage.is_correction_enable. A file of your own is one
    too."""
    is_correction_sequence_threshold: tuple[PositiveOrZero, Positive] | None = None
    """seq-mask-tis: bounds of a sequence's geometric mean ratio, `low high`, which stays much closer to 1.
    None: algo.advantage.is_correction_threshold."""
    score_centering_top_k: CountOrZero = 0
    """Score centering: subtract from the score of each action, grad log pi, its mean under the sampler, so
    that differences between engine and trainer do not move the policy without a reward. Number of most likely
    tokens that the engine records for the mean, such as 32: 8 bytes for each of them and each action, in
    memory and in rollout files. Needs one optimizer step per RL step (train.force_on_policy). 0: off."""
    proximal_policy: ProximalPolicyName = "recomputed"
    """Decoupled PPO: proximal policy, the anchor of the clipped ratio. The off-policy correction weighs its
    difference to the sampling policy."""
    staleness_decay: PositiveFraction = 1.0
    """Base d of the weight d^s of an action's policy loss, where the weights that sampled it are s steps old.
    1: all actions weigh the same."""
    max_token_staleness: CountOrZero | None = None
    """Maximum age, in steps, of the weights that sampled an action; older actions have no policy loss. None:
    no limit."""

    @property
    def proximal(self) -> type[ProximalPolicy]:
        return PROXIMAL_POLICIES[self.proximal_policy]

    @property
    def traits(self) -> type[AdvantageEstimator]:
        return ESTIMATORS[self.estimator]

    @property
    def corrects(self) -> bool:
        """True with an off-policy correction."""
        return self.is_correction_enable or self.is_correction_level != "off"

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds of the off-policy correction, (low, high). The lower one is 0 if only the upper one is
        given."""
        *low, high = self.is_correction_threshold
        return low[0] if low else 0.0, high

    @property
    def gate(self) -> Gated | None:
        """The off-policy correction of `is_correction_level`; None without one."""
        if self.is_correction_level == "off":
            return None
        return Gated(
            level=self.is_correction_level, mode=self.is_correction_mode, gating=self.is_correction_gating
        )

    @property
    def correction(self) -> type[Correction] | None:
        """Class of the off-policy correction of `is_correction_type`; None without one."""
        return CORRECTIONS[self.is_correction_type] if self.is_correction_enable else None


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Penalty on the KL divergence from the reference model."""

    init_coef: PositiveOrZero = 0.01
    """Weight of the KL penalty, at the start if algo.kl.target is set. 0: no reference model is loaded."""
    target: Positive | None = None
    """Target KL per token, in nats: the weight of the penalty adapts to reach it. None: the weight is
    constant."""
    horizon: Count = 10000
    """Number of samples over which the weight may change by a fifth. It also changes by at most a fifth in
    one step."""
    estimator: KLEstimator = "k1"
    """Estimator of the KL from samples (http://joschu.net/blog/kl-approx.html)."""
    use_loss: bool = False
    """Add the KL penalty to the loss instead of subtracting it from the reward."""
    unbiased_gradient: bool = False
    """With algo.kl.use_loss: the gradient of the penalty is that of the KL divergence itself, with every
    estimator; later optimizer steps of an RL step weigh it by the probability ratio, at most 10."""
    ref: Literal["model", "rollout"] = "model"
    """Distribution that the policy is kept close to. model: the reference model. rollout: the policy that
    sampled, by the log-probs that the engine recorded; no reference model is loaded. Needs
    algo.kl.use_loss."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """The algorithm. `--algo.options.NAME VALUE` sets an option of an estimator, a loss, a correction or a
    proximal policy of your own: a field of its class."""

    advantage: AdvantageConfig = AdvantageConfig()
    kl: KLConfig = KLConfig()
    options: Mapping[str, Any] = field(default_factory=dict)
    dynamic_filtering_enable: bool = False
    """Dynamic sampling of DAPO: drop groups whose mean score is outside algo.dynamic_filtering_range, and
    sample other prompts in their place."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Groups that are kept, `low high`: those with low < mean score < high."""
    dynamic_filtering_max_batches: Free[Count] = 10
    """Maximum number of prompts that one step may sample, in multiples of rollout.batch_size. If they do not
    fill a batch, the run stops."""
    skip_old_log_probs: bool | Literal["auto"] = "auto"
    """Skip the forward pass that computes the policy's log-probs before the update: if an RL step has only
    one optimizer step, the update's own pass gives the same numbers. auto: skip it if nothing needs the
    log-probs earlier; KL in the reward and a teacher do. With algo.advantage.proximal_policy other than
    recomputed, it can be skipped for any number of optimizer steps."""
    max_mismatch: Free[Positive | None] = None
    """Largest mean difference between log-probs of engines and policy for the same weights, in nats, before
    the run stops. None: 0.3 in bf16, 0.04 in fp16 and fp32, which is more than rounding explains; no limit
    with rollout.max_kept_tokens 0 if top-p or top-k truncates, since the distributions differ. inf: no
    limit."""
    router_replay: bool = False
    """MoE models: in training each token goes to the experts that it went to when it was sampled (rollout
    routing replay), so that engine and trainer do not diverge because rounding picked different experts.
    Needs vllm.enable_prefix_caching."""

    def build_estimator(self) -> AdvantageEstimator:
        return self.advantage.traits.of(self.options)


@dataclass(frozen=True, kw_only=True)
class PPOCkptConfig(CkptConfig):
    """Outputs: the final model and checkpoints."""

    max_mem: Positive = float("inf")
    best_metric_key: str = ""
    """Evaluation metric that chooses the best checkpoint, such as default_score_mean, default_pass1 or
    default_best_of4. Empty: the mean score of the first dataset. none: no best checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PPOLoggerConfig(LoggerConfig):
    """Metrics and samples, and where they go."""

    wandb: WandbConfig = field(default_factory=lambda: wandb_for("ppo"))
    rollouts: JournalMode = "full"
    """Samples of each step that the run folder keeps. full: all. sample: 16 from the best to the worst, and
    up to 16 that failed. off: none."""


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
    "data.curriculum": CURRICULA,
}
"""Registries of the flags that select a class, by key."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig(TrainingConfig):
    """Reinforcement learning with Ray, vLLM and DeepSpeed."""

    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    teacher: PPOTeacherConfig = PPOTeacherConfig()
    reward: RewardConfig = RewardConfig()
    data: PromptDataConfig = PromptDataConfig()
    TABLES: ClassVar[Mapping[str, type]] = {"tasks": TaskConfig}
    tasks: Mapping[str, Any] = field(default_factory=dict)
    rollout: RolloutConfig = RolloutConfig()
    vllm: VllmConfig = VllmConfig()
    train: TrainConfig = TrainConfig()
    algo: AlgoConfig = AlgoConfig()
    eval: EvalConfig = EvalConfig()
    ds: ScorerDeepSpeedConfig = ScorerDeepSpeedConfig()
    ckpt: PPOCkptConfig = PPOCkptConfig()
    logger: PPOLoggerConfig = field(default_factory=PPOLoggerConfig)
    placement: Free[Literal["manual", "auto"]] = "manual"
    """Placement of models and engines on GPUs. manual: by the placement flags. auto: unset placement flags
    are chosen for the cluster: models and engines share all GPUs and are offloaded in turn, or with
    train.async_enable half of the GPUs are for engines (docs/clusters.md)."""

    @property
    def trained_models(self) -> dict[str, tuple[str, str]]:
        policy = {"policy": (ACTOR_FLAG, self.actor.model_name_or_path)}
        return policy | ({"critic": (CRITIC_FLAG, self.critic_path)} if self.uses_critic else {})

    @property
    def exports(self) -> dict[str, str]:
        if self.eval.eval_only:
            return {}
        saves = self.uses_critic and self.critic.save_value_network
        critic = {"--critic.save_value_network": self.critic_output_dir} if saves else {}
        return super().exports | critic

    @property
    def checkpoints(self) -> list[str]:
        critic = [f"{self.ckpt.folder}/_critic"] if self.uses_critic else []
        return [f"{self.ckpt.folder}/_actor", *critic]

    @property
    def keeps_best(self) -> bool:
        return self.ckpt.best_metric_key != "none" and self.eval.steps > 0

    @property
    def averages(self) -> bool:
        return self.train.enable_ema

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
        values = flag_values(self)
        corrects = self.algo.advantage.is_correction_enable
        chosen = [key for key in SELECTING if values[key] and (corrects or key != CORRECTION_KEY)]
        return {key: values[key] for key in chosen}

    def task_values(self, name: str) -> dict[str, Any]:
        """Returns task -> its value of `TaskConfig.{name}`, for the tasks that have one."""
        values = {key.partition(".")[::2]: value for key, value in self.tasks.items()}
        return {task: value for (task, own), value in values.items() if own == name and value is not None}

    def for_source(self, source: str) -> "PPOConfig":
        """Returns the configuration of the prompts of a source: with the values of its task."""
        values = {flag: self.task_values(key).get(source) for key, flag in TASK_FLAGS.items()}
        return with_values(self, {flag: value for flag, value in values.items() if value is not None})

    def temperature(self, source: str) -> float:
        """Returns the sampling temperature of a source in training."""
        return self.task_values("temperature").get(source, self.rollout.temperature)

    @property
    def batch_columns(self) -> dict[str, Any]:
        """Arguments of `Batch.of` for the columns that not every run needs."""
        temperature = self.temperature if self.task_values("temperature") else None
        return {"by_prompt": self.actor.aggregates_by_prompt, "temperature": temperature}

    @property
    def draws_prompts(self) -> bool:
        """True if quotas or a curriculum choose the prompts, which then repeat as needed."""
        return bool(self.task_values("quota")) or self.data.curriculum is not None

    @property
    def agents(self) -> dict[str, str]:
        """References of the agents' classes by flag."""
        named = {"train.agent_func_path": self.train.agent_func_path}
        named |= {f"tasks.{task}.agent": name for task, name in self.task_values("agent").items()}
        return {key: resolve(name, "agents") for key, name in named.items() if name}

    @property
    def reward_functions(self) -> dict[str, str]:
        """References of the reward functions by flag, without reasoning_gym's verifier."""
        named = {f"tasks.{task}.reward": self.for_source(task).reward for task in self.task_values("reward")}
        named["reward.remote_url"] = self.reward
        return {key: name for key, reward in named.items() if (name := reward.function)}

    @property
    def users_files(self) -> list[str | None]:
        """References of all agents, reward functions and algorithms of users."""
        own = *self.agents.values(), *self.reward_functions.values(), *self.references.values()
        return [self.reward_function, *own]

    @property
    def has_rewards(self) -> bool:
        """True if rewards come from another source than a teacher."""
        reward = self.reward
        return bool(reward.urls or reward.models or self.train.agent_func_path or self.gym_verifies)

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
    def critic_freezes_router(self) -> bool:
        own = self.critic.freeze_moe_router
        return self.actor.freeze_moe_router if own is None else own

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
        return self.data.reads_images

    @property
    def learns(self) -> bool:
        """False for an evaluation alone."""
        return not self.eval.eval_only

    @property
    def uses_reference(self) -> bool:
        return self.algo.kl.init_coef > 0 and self.algo.kl.ref == "model"

    @property
    def uses_teacher(self) -> bool:
        return self.teacher.model_name_or_path is not None

    @property
    def placements(self) -> dict[str, RolePlacement]:
        """Placement of the run's models by role; a role comes before those that share its GPUs. An evaluation
        alone has the policy, whose weights engines get, and the reward models."""
        train, everyone = self.train, "actor" if self.train.colocate_all else None
        colocated_with: dict[str, str | None] = {"actor": None}
        has_critic = self.uses_critic and self.learns
        if has_critic:
            colocated_with["critic"] = everyone
        is_bare_policy = bool(self.ds.lora.rank)  # the reference of adapters
        if self.uses_reference and self.learns and not is_bare_policy:
            colocated_with["ref"] = "actor" if train.colocate_actor_ref else everyone
        if self.uses_reward_model:
            with_critic = has_critic and train.colocate_critic_reward
            colocated_with["reward"] = everyone or ("critic" if with_critic else None)
        if self.uses_teacher and self.learns:
            colocated_with["teacher"] = everyone
        found = {}
        for role, other in colocated_with.items():
            size, ds = getattr(self, other or role), self.ds
            ranks = size.num_nodes * size.num_gpus_per_node
            mesh = Mesh.within(ranks, sequence=ds.ring_attn_size, tensor=ds.tensor_parallel_size)
            found[role] = RolePlacement(mesh, other)
        return found

    @property
    def own_placements(self) -> dict[str, int]:
        """Number of ranks of each role with GPUs of its own."""
        return {role: p.mesh.size for role, p in self.placements.items() if p.colocated_with is None}

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
    def samples_freely(self) -> bool:
        """True if all answers are sampled from the whole vocabulary: without top-p, top-k and agents, which
        may use other settings."""
        return not self.rollout.is_truncated and not self.agents

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
    def samples_per_update(self) -> int:
        """Number of samples of one optimizer step."""
        return self.samples_per_step if self.train.force_on_policy else self.train.batch_size

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps in one RL step."""
        batches = max(1, round(self.samples_per_step / self.samples_per_update))
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
    def largest_mismatch(self) -> float | None:
        """`algo.max_mismatch`; if it is not set, infinity where top-p or top-k truncates the sampling
        distribution and no nuclei are recorded: training then computes the log-probs of another
        distribution. None: the default limit, rounding."""
        rollout, limit = self.rollout, self.algo.max_mismatch
        is_other = rollout.is_truncated and not rollout.max_kept_tokens
        return math.inf if limit is None and is_other else limit

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
    def action_limit(self) -> int | None:
        """Limit of the actions of a sequence. None: no limit, or an agent that samples several times."""
        return None if self.agents else self.rollout.max_new_tokens

    @property
    def rollout_tokens_per_gpu(self) -> int:
        """Token budget of a packed row in log-prob passes, with train.dynamic_batch_enable."""
        return self.rollout.max_tokens_per_gpu or self.train.max_tokens_per_gpu
