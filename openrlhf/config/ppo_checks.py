"""Checks of the flags of `train_ppo_ray` against each other."""

import re
from collections.abc import Iterator
from itertools import product
from urllib.parse import urlsplit

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.config import checks
from openrlhf.config.checks import Unread
from openrlhf.config.choices import VLLM_LORA_RANKS
from openrlhf.config.command import Explicit, Problem, remark
from openrlhf.config.fields import values_of
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.reasoning_gym import GymSpec, is_gym, parse_gym


def ppo_problems(config: PPOConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "actor.model_name_or_path", "data.prompt_dataset"),
            *checks.local_models(
                config,
                "actor.model_name_or_path",
                "critic.model_name_or_path",
                "reward.model_name_or_path",
                "teacher.model_name_or_path",
            ),
            *checks.local_datasets(
                config,
                ("data.prompt_dataset", "data.prompt_probs"),
                ("data.pretrain_dataset", "data.pretrain_probs"),
                ("eval.dataset", None),
            ),
            *checks.template(config, explicit),
            *checks.image_rows(config),
            *_reward_source(config),
            *_gym_datasets(config),
            *_reward_shaping(config),
            *_estimator(config),
            *_collecting(config),
            *_kl(config, explicit),
            *_policy_loss(config, explicit),
            *_proximal_policy(config),
            *_old_log_probs(config),
            *_balance(config),
            *_replay(config),
            *_lengths(config),
            *_ahead(config),
            *_sampling(config),
            *_engine(config),
            *_adapters(config),
            *_evaluation(config, explicit),
            *checks.optimizer("actor.", config.actor, config.ds),
            *(checks.optimizer("critic.", config.critic, config.ds) if config.uses_critic else ()),
            *checks.backend(config),
            *checks.precision(config),
            *optimizer_sleep(config),
            *checks.four_bits(config.ds),
            *checks.outputs(config.ckpt, config.logger),
            *checks.unread(config, explicit, checks.COMMON_UNREAD + PPO_UNREAD),
        ]
    )


def ppo_placement_problems(config: PPOConfig, explicit: Explicit) -> list[Problem]:
    """Lists the problems that depend on the number of ranks, which may follow from the cluster."""
    ranks = _ranks(config)
    return checks.first_of_each(
        [
            *checks.batches(config, config.data_parallel_size, config.samples_per_step, _made(config)),
            *_placement(config, explicit),
            *checks.secondary_partition(config.ds, ranks),
            *checks.sequence_parallel(config.ds, ranks, reads_images=config.reads_images),
            *checks.tensor_parallel(config, ranks),
        ]
    )


BEST = r"_(score_mean|best_of\d+|pass\d+)$"
"""Pattern of the ends of evaluation metrics of which higher is better."""


ADAPTED = "ds.lora.rank makes the policy without its adapters the reference"
WITH_CRITIC = ", ".join(name for name, row in ESTIMATORS.items() if row.needs_critic)
WHITENING = ", ".join(name for name, row in ESTIMATORS.items() if row.whiten)

PPO_UNREAD = (
    Unread(
        keys=("vllm.sync_backend",),
        when=lambda c: c.vllm.sync_with_ray,
        why="weights travel through Ray's object store (vllm.sync_with_ray)",
    ),
    Unread(
        keys=("ref.num_nodes", "ref.num_gpus_per_node", "ref.offload", "train.colocate_actor_ref"),
        when=lambda c: c.ds.lora.rank > 0,
        why=ADAPTED,
    ),
    Unread(
        keys=("actor.ptx_coef", "data.pretrain_probs", "data.pretrain_split", "data.pretrain_key"),
        when=lambda c: c.data.pretrain_dataset is None,
        why="there is no data.pretrain_dataset",
    ),
    Unread(keys=("data.pretrain_dataset",), when=lambda c: c.actor.ptx_coef == 0, why="actor.ptx_coef is 0"),
    Unread(
        keys=(
            *("reward.num_nodes", "reward.num_gpus_per_node", "reward.offload", "reward.normalize_enable"),
            *("reward.model_weights", "train.colocate_critic_reward"),
        ),
        when=lambda c: not c.uses_reward_model,
        why="there is no reward model",
    ),
    Unread(
        keys=("critic.", "train.colocate_critic_reward"),
        when=lambda c: not c.uses_critic,
        why=f"only estimator {WITH_CRITIC} has a critic",
    ),
    Unread(
        keys=("algo.advantage.lambd",),
        when=lambda c: not c.algo.advantage.traits.needs_critic,
        why=f"only {WITH_CRITIC} uses lambda",
    ),
    Unread(
        keys=("algo.advantage.no_std_norm",),
        when=lambda c: not c.algo.advantage.traits.whiten,
        why=f"only the estimators {WHITENING} divide advantages by their deviation",
    ),
    Unread(
        keys=("algo.advantage.is_correction_type", "algo.advantage.is_correction_threshold"),
        when=lambda c: not c.algo.advantage.is_correction_enable,
        why="algo.advantage.is_correction_enable is off",
    ),
    Unread(
        keys=("algo.advantage.is_correction_sequence_threshold",),
        when=lambda c: c.algo.advantage.correction is None or not c.algo.advantage.correction.drops_sequences,
        why="only algo.advantage.is_correction_type seq-mask-tis drops sequences",
    ),
    Unread(
        keys=("algo.advantage.staleness_decay", "algo.advantage.max_token_staleness"),
        when=lambda c: c.largest_staleness == 0,
        why="every step trains on samples of its own weights; train.async_enable samples ahead",
    ),
    Unread(
        keys=("algo.advantage.max_token_staleness",),
        when=lambda c: (c.algo.advantage.max_token_staleness or 0) >= c.largest_staleness,
        why="train.async_queue_size lets nothing get older",
    ),
    Unread(
        keys=("algo.kl.target", "algo.kl.horizon", "algo.kl.estimator", "algo.kl.use_loss"),
        when=lambda c: not c.uses_reference,
        why="there is no KL penalty (algo.kl.init_coef 0)",
    ),
    Unread(
        keys=("algo.kl.horizon",),
        when=lambda c: c.algo.kl.target is None,
        why="without algo.kl.target the weight stays",
    ),
    Unread(
        keys=("algo.dynamic_filtering_range", "algo.dynamic_filtering_max_batches"),
        when=lambda c: not c.algo.dynamic_filtering_enable,
        why="algo.dynamic_filtering_enable is off",
    ),
    Unread(
        keys=("ref.", "train.colocate_actor_ref"),
        when=lambda c: not c.uses_reference,
        why="there is no reference model (algo.kl.init_coef 0)",
    ),
    Unread(
        keys=("teacher.",), when=lambda c: not c.uses_teacher, why="there is no teacher.model_name_or_path"
    ),
    Unread(
        keys=("actor.eps_clip",),
        when=lambda c: c.actor.eps_clip_low_high is not None,
        why="actor.eps_clip_low_high sets both bounds",
    ),
    Unread(
        keys=("actor.eps_clip", "actor.eps_clip_low_high", "actor.dual_clip"),
        when=lambda c: c.ratio_is_one,
        why="an RL step is one optimizer step, so the ratio is 1, inside every bound",
    ),
    *checks.optimizer_unread("actor.", lambda c: c.actor),
    *checks.optimizer_unread("critic.", lambda c: c.critic),
    Unread(
        keys=("actor.gradient_checkpointing_reentrant", "ds.activation_offload"),
        when=lambda c: (
            not c.actor.gradient_checkpointing_enable
            and not (c.uses_critic and c.critic.gradient_checkpointing_enable)
        ),
        why="actor.gradient_checkpointing_enable is off",
    ),
    Unread(
        keys=("reward.overlong_penalty_factor",),
        when=lambda c: c.reward.overlong_buffer_len is None,
        why="reward.overlong_buffer_len is not set",
    ),
    Unread(
        keys=("rollout.max_kept_tokens",),
        when=lambda c: c.rollout.top_p == 1 and c.rollout.top_k < 1 and c.train.agent_func_path is None,
        why="neither rollout.top_p nor rollout.top_k leaves tokens out",
    ),
    Unread(
        keys=("train.max_turns", "rollout.step_timeout"),
        when=lambda c: c.train.agent_func_path is None,
        why="there is no train.agent_func_path",
    ),
    Unread(
        keys=("reward.remote_url",),
        when=lambda c: c.train.agent_func_path is not None,
        why="the agent of train.agent_func_path gives the rewards",
    ),
    Unread(
        keys=("reward.timeout", "reward.num_workers", "reward.batch"),
        when=lambda c: c.reward_function is None,
        why="reward.remote_url names no reward function",
    ),
    Unread(
        keys=("reward.remote_timeout", "reward.remote_batch_size", "reward.remote_concurrency"),
        when=lambda c: not c.reward.servers,
        why="reward.remote_url names no server",
    ),
    Unread(
        keys=("reward.model_name_or_path",),
        when=lambda c: bool(c.reward.urls) and c.reward.model_weights is None,
        why="reward.remote_url gives the rewards; reward.model_weights adds those of models",
    ),
    Unread(
        keys=("ds.value_head_prefix",),
        when=lambda c: not c.uses_critic and not c.uses_reward_model,
        why="there is neither a critic nor a reward model",
    ),
    Unread(
        keys=("vllm.enable_sleep",),
        when=lambda c: not c.engines_sleep,
        why="engines have their own GPUs without train.colocate_all, and with train.async_enable",
    ),
    Unread(
        keys=("vllm.lora_sync",),
        when=lambda c: c.ds.lora.rank == 0,
        why="there are no adapters (ds.lora.rank 0)",
    ),
    Unread(
        keys=("vllm.gpu_memory_utilization",),
        when=lambda c: c.vllm.kv_cache_gb is not None,
        why="vllm.kv_cache_gb sets the size",
    ),
    Unread(
        keys=("train.async_queue_size",),
        when=lambda c: not c.train.async_enable,
        why="train.async_enable is off",
    ),
    Unread(keys=("train.ema_beta",), when=lambda c: not c.train.enable_ema, why="train.enable_ema is off"),
    checks.IMAGES_UNREAD,
    Unread(
        keys=("actor.freeze_visual_encoder",),
        when=lambda c: c.data.max_images_per_prompt == 0,
        why="data.max_images_per_prompt is 0",
    ),
    Unread(
        keys=("ckpt.best_metric_key",),
        when=lambda c: c.eval.dataset is None,
        why="without eval.dataset there is no metric",
    ),
)


def _reward_source(config: PPOConfig) -> Iterator[Problem]:
    key, reward = "reward.remote_url", config.reward
    has_source = reward.urls or reward.models or config.train.agent_func_path
    remedy = (
        "name a .py file with reward_func(queries, prompts, labels), or URLs of reward servers, or set "
        "--reward.model_name_or_path"
    )
    has_source = has_source or config.gym_verifies
    if not has_source and not config.uses_teacher:
        verified = any(is_gym(item) for item in checks.split_spec(config.data.prompt_dataset))
        why = "only reasoning_gym's own problems have a verifier" if verified else "nothing gives a reward"
        yield Problem(key, f"{why}; {remedy}")
    elif not has_source and config.algo.dynamic_filtering_enable:
        yield Problem("algo.dynamic_filtering_enable", f"nothing scores the groups; {remedy}")
    if not has_source and config.eval.dataset is not None:
        yield Problem("eval.dataset", f"nothing scores its answers; {remedy}")
    for url in reward.urls:
        if url in reward.servers:
            yield from _server_url(key, url)
        else:
            yield from checks.reward_function(key, url, alone=len(reward.urls) == 1)
    if reward.model_weights and not any(reward.model_weights):
        yield Problem("reward.model_weights", "leaves nothing of the reward models; remove them")
    if reward.model_weights is not None and reward.models and len(reward.model_weights) != len(reward.models):
        yield Problem(
            "reward.model_weights",
            f"has {len(reward.model_weights)} weights for {len(reward.models)} reward models; give each "
            "model one",
        )
    if config.train.agent_func_path is not None:
        form = "must name a .py file with the class AgentExecutor, or a class as folder/file.py:NAME"
        yield from checks.plugged("train.agent_func_path", config.train.agent_func_path, "agents", form)


def _gym_datasets(config: PPOConfig) -> Iterator[Problem]:
    keys = {"data.prompt_dataset": config.data.prompt_dataset, "eval.dataset": config.eval.dataset or ""}
    specs: dict[str, list[GymSpec]] = {key: [] for key in keys}
    for key, text in keys.items():
        for item in filter(is_gym, checks.split_spec(text)):
            try:
                specs[key].append(parse_gym(item))
            except ValueError as error:
                yield Problem(key, str(error))
    for trained, held_out in product(*specs.values()):
        if trained.overlaps(held_out):
            yield remark(
                "eval.dataset",
                f"{held_out.name} has problems of training: the i-th is made with seed + i; use another "
                f"seed, such as {trained.seed + trained.size}",
            )


def _server_url(key: str, url: str) -> Iterator[Problem]:
    if not _has_host(url) or any(character.isspace() for character in url):
        yield Problem(key, f"{url} is no URL; write http://HOST:PORT/get_reward")
    elif urlsplit(url).path in ("", "/"):
        yield remark(key, f"{url} has no path; serve_rm answers at /get_reward")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # unclosed brackets, or an invalid port
        return False


def _reward_shaping(config: PPOConfig) -> Iterator[Problem]:
    yield from _rising("reward.clip_range", config.reward.clip_range)
    buffer, longest = config.reward.overlong_buffer_len, config.longest_response
    if buffer is not None and buffer > longest:
        name = "rollout.max_new_tokens" if config.rollout.max_new_tokens else "data.max_len"
        yield Problem("reward.overlong_buffer_len", f"is more than {name} {longest}; use at most {longest}")


def _rising(key: str, bounds: tuple[float, float]) -> Iterator[Problem]:
    if bounds[0] >= bounds[1]:
        yield Problem(key, "the first bound must be less than the second")


def _estimator(config: PPOConfig) -> Iterator[Problem]:
    advantage = config.algo.advantage
    yield from _rising("algo.advantage.is_correction_threshold", advantage.is_correction_threshold)
    if advantage.is_correction_sequence_threshold is not None:
        yield from _rising(
            "algo.advantage.is_correction_sequence_threshold", advantage.is_correction_sequence_threshold
        )
    yield from _rising("algo.dynamic_filtering_range", config.algo.dynamic_filtering_range)
    samples = config.rollout.n_samples_per_prompt
    if advantage.traits.needs_group and samples == 1:
        yield remark(
            "rollout.n_samples_per_prompt",
            f"estimator {advantage.estimator} compares the samples of one prompt: alone each has "
            "advantage 0, and its reward teaches nothing; use 2 or more, or estimator reinforce",
        )
    if not advantage.traits.discounts and advantage.gamma != 1:
        yield remark(
            "algo.advantage.gamma",
            f"has no effect: estimator {advantage.estimator} does not discount; reinforce does",
        )


def _collecting(config: PPOConfig) -> Iterator[Problem]:
    algo, rollout = config.algo, config.rollout
    at_a_time = rollout.vllm_generate_batch_size or rollout.batch_size
    if algo.dynamic_filtering_enable:
        if rollout.n_samples_per_prompt == 1:
            yield Problem(
                "algo.dynamic_filtering_enable",
                "filters groups; rollout.n_samples_per_prompt must be 2 or more",
            )
        if config.uses_reward_model and not config.reward.urls and algo.dynamic_filtering_range == (0.0, 1.0):
            yield remark(
                "algo.dynamic_filtering_range",
                "the scores of a reward model need not lie between 0 and 1; set a range of its own",
            )
    if at_a_time > rollout.batch_size and not _corrects(config):
        yield remark(
            "rollout.vllm_generate_batch_size",
            "samples ahead: groups that wait are of an earlier policy; "
            "--algo.advantage.is_correction_enable corrects for that",
        )


def _kl(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    kl, samples = config.algo.kl, config.samples_per_step
    if config.adapts_kl and samples > kl.horizon:
        yield remark(
            "algo.kl.horizon",
            f"a step has {samples} samples, and the KL coefficient changes by a fifth a step at most, "
            f"as for {kl.horizon}; name {samples} or more",
        )
    if not config.uses_reference or not {"algo.kl.estimator", "algo.kl.use_loss"} & set(explicit):
        return
    has_gradient = KL_ESTIMATORS[kl.estimator].has_gradient
    if kl.use_loss and not has_gradient:
        yield remark("algo.kl.estimator", "as a loss its gradient is zero on average; k2 or k3 suit")
    if has_gradient and not kl.use_loss:
        yield remark("algo.kl.estimator", "in the reward k1 is the unbiased estimate")


def _policy_loss(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    actor = config.actor
    name = actor.policy_loss_type
    loss = actor.loss
    if loss.ratio == "sequence" and actor.loss_aggregation not in (None, loss.aggregation()):
        yield Problem(
            "actor.loss_aggregation",
            f"{name} compares sequences, which count alike however long they are; leave it at None",
        )
    clip_is_set = {"actor.eps_clip", "actor.eps_clip_low_high"} & set(explicit)
    if loss.ratio == "sequence" and not clip_is_set and not config.ratio_is_one:
        yield remark(
            "actor.policy_loss_type",
            f"the ratio of a sequence hardly ever leaves actor.eps_clip {actor.eps_clip}; its paper has "
            "--actor.eps_clip_low_high 3e-4 4e-4",
        )
    if not loss.dual_clip and actor.dual_clip is not None:
        yield Problem(
            "actor.dual_clip",
            f"bounds what {name} bounds already, for every advantage; remove it, and set "
            "--actor.eps_clip_low_high",
        )


def _corrects(config: PPOConfig) -> bool:
    """Returns whether the loss uses the sampler's log-probs."""
    advantage = config.algo.advantage
    return advantage.is_correction_enable or advantage.proximal.is_sampler


def _proximal_policy(config: PPOConfig) -> Iterator[Problem]:
    advantage = config.algo.advantage
    key, name = "algo.advantage.proximal_policy", advantage.proximal_policy
    if advantage.proximal.is_sampler and advantage.is_correction_enable:
        yield Problem(
            "algo.advantage.is_correction_enable",
            f"weighs the gap between sampler and proximal policy, and {key} {name} makes them one; "
            f"remove it, or use --{key} recomputed",
        )
    if name == "interpolated" and config.largest_staleness <= 1:
        yield remark(
            key,
            "is the sampler where samples are at most 1 step old, as here; `rollout` says so, and "
            "train.async_queue_size 2 or more lets them get older",
        )


def _old_log_probs(config: PPOConfig) -> Iterator[Problem]:
    key = "algo.skip_old_log_probs"
    if config.algo.skip_old_log_probs is not True:
        return
    several = config.updates_per_step > 1
    if several and config.algo.advantage.proximal.needs_forward:
        yield Problem(
            key,
            f"an RL step makes {config.updates_per_step} optimizer steps, and only before the first the "
            f"policy is the old one;\nuse train.batch_size {config.samples_per_step} and train.max_epochs 1, "
            "or remove it",
        )
    if config.uses_reference and not config.algo.kl.use_loss:
        yield Problem(
            key,
            "the KL in the reward needs those log-probs; add --algo.kl.use_loss --algo.kl.estimator k2, "
            "or --algo.kl.init_coef 0, or remove it",
        )
    if config.uses_teacher:
        yield Problem(
            key, "the teacher's reward needs those log-probs (teacher.model_name_or_path); remove it"
        )
    if config.algo.advantage.traits.needs_log_probs:
        yield Problem(key, "algo.advantage.estimator reads those log-probs; remove it")
    if config.adapts_kl and (several or config.rollout.mask_truncated):
        yield Problem(key, "algo.kl.target needs those log-probs of all samples; remove one of the two")


def _balance(config: PPOConfig) -> Iterator[Problem]:
    actor, critic = config.actor, config.critic
    recomputes = actor.gradient_checkpointing_enable
    roles = {"actor": (actor.aux_loss_coef, recomputes)}
    if config.uses_critic:
        own = critic.gradient_checkpointing_enable
        roles["critic"] = (config.critic_aux_loss_coef, recomputes if own is None else own)
    for role, (coef, recomputes) in roles.items():
        if coef > 0 and recomputes and actor.gradient_checkpointing_reentrant:
            yield Problem(
                "actor.gradient_checkpointing_reentrant",
                f"hides the routers from the balance loss ({role}.aux_loss_coef); remove one",
            )


def _replay(config: PPOConfig) -> Iterator[Problem]:
    """Checks the flags that vLLM needs to report the experts of each token."""
    if not config.algo.router_replay:
        return
    if not config.vllm.enable_prefix_caching:
        yield Problem(
            "algo.router_replay",
            "needs the experts of each token, which vLLM keeps with the blocks of its prefix cache; add "
            "--vllm.enable_prefix_caching",
        )
    if config.vllm.pipeline_parallel_size > 1:
        yield Problem(
            "algo.router_replay",
            "no stage of an engine knows the experts of all layers; use --vllm.pipeline_parallel_size 1",
        )
    if config.reads_images:
        yield Problem("algo.router_replay", "is for text alone (data.max_images_per_prompt); remove it")


def _lengths(config: PPOConfig) -> Iterator[Problem]:
    new, longest = config.rollout.max_new_tokens, config.data.max_len
    if new is not None and new >= longest:
        yield Problem(
            "rollout.max_new_tokens",
            f"leaves no room for a prompt in data.max_len {longest}, which counts both; raise that",
        )


def _ahead(config: PPOConfig) -> Iterator[Problem]:
    """Checks sampling that runs during training."""
    train = config.train
    if train.partial_rollout_enable and not train.async_enable:
        yield Problem("train.partial_rollout_enable", "needs --train.async_enable")
    if config.vllm.keep_cache and not train.partial_rollout_enable:
        yield Problem(
            "vllm.keep_cache",
            "keeps the cache of requests that a sync pauses, and only --train.partial_rollout_enable "
            "pauses any; add that, or remove it",
        )
    if config.vllm.keep_cache and config.reads_images:
        yield Problem(
            "vllm.keep_cache", "would give images of new prompts what the old weights saw in them; remove it"
        )
    if train.async_enable and train.colocate_all and config.placement == "manual":
        more = config.num_engines * config.vllm.num_gpus
        yield remark(
            "train.async_enable",
            "engines that sample while models train have GPUs of their own; train.colocate_all shares "
            f"those of the models. The run needs {more} more",
        )
    if config.max_staleness > 1 and not _corrects(config):
        yield remark(
            "train.async_queue_size",
            f"samples may be {config.max_staleness} steps older than the weights that they train; "
            "--algo.advantage.is_correction_enable weighs them",
        )


def _engine(config: PPOConfig) -> Iterator[Problem]:
    """Refuses vLLM where it is not installed, and with other engines features that only vLLM's have."""
    if config.rollout.engine == "vllm":
        yield from checks.vllm("rollout.engine")
        return
    needs = {
        "vllm.tensor_parallel_size": config.vllm.tensor_parallel_size > 1,
        "vllm.pipeline_parallel_size": config.vllm.pipeline_parallel_size > 1,
        "vllm.lora_sync": config.vllm.lora_sync == "adapter" and config.ds.lora.rank > 0,
        "algo.router_replay": config.algo.router_replay,
        "data.max_images_per_prompt": config.reads_images,
    }
    for key, is_needed in needs.items():
        if is_needed:
            yield Problem(key, f"--rollout.engine {config.rollout.engine} cannot; remove one of them")


def _adapters(config: PPOConfig) -> Iterator[Problem]:
    """Checks weight syncs of adapters that engines keep apart from the weights."""
    rank = config.ds.lora.rank
    if config.vllm.lora_sync == "merged" or rank == 0:
        return
    if rank > VLLM_LORA_RANKS[-1]:
        yield Problem(
            "vllm.lora_sync",
            f"vLLM has no adapters of rank {rank} (ds.lora.rank), only up to {VLLM_LORA_RANKS[-1]}; "
            "remove it, which merges them",
        )
    if config.reads_images:
        yield Problem(
            "vllm.lora_sync",
            "vLLM adapts the language part of a model alone, and ds.lora adapts the vision part too; "
            "remove it, which merges them",
        )


def _sampling(config: PPOConfig) -> Iterator[Problem]:
    if config.rollout.top_k == 1 and config.rollout.max_kept_tokens > 0:
        yield Problem(
            "rollout.top_k",
            "keeps one token, whose probability is 1 whatever the policy does, so nothing is learned; "
            "use 2 or more, or -1",
        )
    key, texts = "rollout.stop", config.rollout.stop or ()
    if "" in texts:
        yield Problem(key, "has an empty text, which would end every response; remove it")
    elif any("\\n" in text for text in texts):
        yield remark(key, checks.IN_BASH)


def _evaluation(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    samples = config.eval.n_samples_per_prompt
    if config.eval.dataset is not None and config.eval.temperature == 0 and samples > 1:
        yield Problem(
            "eval.temperature",
            f"is greedy, and eval.n_samples_per_prompt {samples} would sample the same answer {samples} "
            "times; use --eval.n_samples_per_prompt 1, or a temperature above 0",
            fatal=not explicit["eval.temperature"].old,
        )
    best = config.ckpt.best_metric_key
    if config.eval.dataset and best not in ("", "none") and not re.search(BEST, best):
        yield remark(
            "ckpt.best_metric_key",
            "the largest value is kept as the best; name a metric that ends in _score_mean, "
            "_best_ofK or _passK",
        )
    if config.eval.dataset is not None and config.eval.steps < 1:
        yield remark("eval.dataset", "is never used: eval.steps is -1; set --eval.steps N")


def _made(config: PPOConfig) -> str:
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    return f"a step makes {prompts} prompts x {samples} = {prompts * samples} samples"


def _ranks(config: PPOConfig) -> dict[str, int]:
    """Returns the number of ranks of each role with GPUs of its own."""
    values = values_of(config)
    return {
        role: values[f"{role}.num_nodes"] * values[f"{role}.num_gpus_per_node"]
        for role, (_, host) in config.placements.items()
        if not host
    }


def optimizer_sleep(config: PPOConfig) -> Iterator[Problem]:
    key, ds = "ds.enable_sleep", config.ds
    if not ds.enable_sleep:
        return
    if ds.zero_stage == 0:
        yield Problem(key, "moves sharded optimizer states; use --ds.zero_stage 1, 2 or 3")
    types = ds.param_dtype, ds.grad_accum_dtype
    if ds.zero_stage == 1 and types == ("bf16", "fp32") and not ds.adam_offload:  # DeepSpeed's BF16_Optimizer
        yield Problem(
            key,
            "cannot move the whole gradients that ds.grad_accum_dtype fp32 keeps at ds.zero_stage 1; "
            "use --ds.zero_stage 2, where each GPU has a part of them",
        )


def engines_beside_actor(config: PPOConfig) -> Iterator[Problem]:
    """Checks that engines that share the actor's GPUs use all of them."""
    gpus, per_engine = config.actor.num_gpus, config.vllm.num_gpus
    if config.engines_colocated and config.num_engines * per_engine != gpus:
        sizes = [str(n) for n in range(1, gpus + 1) if gpus % n == 0]
        fits = (
            f"use {gpus // per_engine}"
            if gpus % per_engine == 0
            else f"an engine can have {', '.join(sizes)} GPUs (vllm.tensor_parallel_size x "
            "vllm.pipeline_parallel_size)"
        )
        yield Problem(
            "vllm.num_engines",
            f"{config.num_engines} engines x {per_engine} GPUs must be the actor's {gpus} GPUs "
            f"with train.colocate_all; {fits}",
        )


def _placement(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    values = values_of(config)
    if config.placement == "auto" and "train.colocate_all" in explicit and not config.train.colocate_all:
        yield Problem(
            "train.colocate_all", "--placement auto has the models share their GPUs; remove one of the two"
        )
    for role, (_, host) in config.placements.items():
        for name in ("num_nodes", "num_gpus_per_node"):
            key = f"{role}.{name}"
            if host and key in explicit and values[key] not in (0, values[f"{host}.{name}"]):
                yield remark(
                    key, f"shares the GPUs of the {host}: {host}.{name} {values[f'{host}.{name}']} stands"
                )
            if not host and values[key] == 0:
                yield Problem(key, "0 means the actor's GPUs; add --train.colocate_all, or give it some")
    yield from engines_beside_actor(config)
