"""Checks of the flags of `train_ppo_ray` against each other."""

import importlib.util
import os
import re
from collections.abc import Iterator
from itertools import product
from urllib.parse import urlsplit

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.config import checks
from openrlhf.config.choices import VLLM_LORA_RANKS
from openrlhf.config.command import Explicit, Problem, remark
from openrlhf.config.fields import flag_values
from openrlhf.config.owned_options import owned_options
from openrlhf.config.ppo import GROUP_ESTIMATORS, PPOConfig, RewardConfig
from openrlhf.config.reasoning_gym import GymSpec, is_gym, parse_gym
from openrlhf.config.sections import KEY_VARIABLE
from openrlhf.config.speculation import parse_speculation
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.plugins import is_reference, parse_file, registered


def ppo_problems(config: PPOConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.modelscope(config),
            *checks.required(config, "actor.model_name_or_path", "data.prompt_dataset"),
            *checks.local_models(
                config, *(f"{role}.model_name_or_path" for role in ("actor", "critic", "reward", "teacher"))
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
            *_bounds(config),
            *_sources(config),
            *_tasks(config),
            *_quotas(config),
            *_policy(config),
            *_correction(config),
            *_centering(config),
            *_sampling(config),
            *_asynchronous(config),
            *_kl(config, explicit),
            *_policy_loss(config, explicit),
            *_balance(config),
            *_engine(config),
            *_evaluation(config, explicit),
            *checks.optimizer("actor.", config.actor, config.ds),
            *(checks.optimizer("critic.", config.critic, config.ds) if config.uses_critic else ()),
            *checks.backend(config),
            *owned_options(config),
            *checks.precision(config),
            *optimizer_sleep(config),
            *checks.four_bits(config.ds),
            *checks.outputs(config.ckpt, config.logger, config.train.hooks),
            *checks.remark_ignored(config, explicit, _ignored(config)),
        ]
    )


LOOP_IGNORED = (
    "data.prompt_dataset data.prompt_probs data.curriculum data.pretrain_dataset eval.dataset eval.steps "
    "eval.eval_at_start rollout.batch_size train.max_steps train.num_episodes "
    "train.async_enable train.async_queue_size train.partial_rollout_enable algo.dynamic_filtering_enable "
    "ckpt.load_enable "
    "ckpt.fork_from ckpt.best_metric_key placement actor.ptx_coef train.shuffle critic.freezing_steps "
    "critic.save_value_network",
    "because the loop is a program, which samples, evaluates and saves itself",
)


def loop_problems(config: PPOConfig, explicit: Explicit) -> list[Problem]:
    """Lists the problems of a user's own loop, which may bring prompts, those to evaluate on too, and rewards
    itself."""
    evaluates, unread = "eval.eval_only", {*LOOP_IGNORED[0].split()}
    is_own = lambda p: p.key == "reward.remote_url" and p.code is ErrorCode.MISSING_FLAG
    left_out = lambda p: (
        p.key in {evaluates, *unread} or p.text.endswith("without --eval.dataset") or is_own(p)
    )
    found = [problem for problem in ppo_problems(config, explicit) if not left_out(problem)]
    found += checks.remark_ignored(config, explicit, [LOOP_IGNORED])
    found += [
        remark(f"tasks.{t}.quota", f"has no effect {LOOP_IGNORED[1]}") for t in config.task_values("quota")
    ]
    if config.eval.eval_only:
        text = "builds a policy that cannot learn; leave it out: run.evaluate evaluates"
        found.append(Problem(evaluates, text))
    return found


def ppo_placement_problems(config: PPOConfig, explicit: Explicit) -> list[Problem]:
    """Lists the problems that depend on the number of ranks, which may follow from the cluster."""
    ranks = _ranks(config)
    return checks.first_of_each(
        [
            *_batches(config),
            *_placement(config, explicit),
            *checks.secondary_partition(config.ds, ranks),
            *checks.sequence_parallel(config.ds, ranks, reads_images=config.reads_images),
            *checks.tensor_parallel(config, ranks),
        ]
    )


BEST = r"_(score_mean|best_of\d+|pass\d+)$"
"""Pattern of the suffixes of evaluation metrics for which higher is better."""

WITH_CRITIC = ", ".join(name for name, row in ESTIMATORS.items() if row.needs_critic)
WHITENING = ", ".join(name for name, row in ESTIMATORS.items() if row.whiten)

NEEDS = {
    "data.pretrain_dataset": "actor.ptx_coef data.pretrain_probs data.pretrain_split data.pretrain_key",
    "actor.ptx_coef": "data.pretrain_dataset",
    "algo.advantage.is_correction_enable": "algo.advantage.is_correction_type",
    "algo.kl.target": "algo.kl.horizon",
    "algo.dynamic_filtering_enable": "algo.dynamic_filtering_range algo.dynamic_filtering_max_batches",
    "teacher.model_name_or_path": "teacher.",
    "train.dynamic_batch_enable": "rollout.max_tokens_per_gpu",
    "ds.lora.rank": "vllm.lora_sync",
    "train.async_enable": "train.async_queue_size",
    "rollout.retries": "rollout.retry_on",
    "train.enable_ema": "train.ema_beta",
    "data.max_images_per_prompt": f"{checks.IMAGE_FLAGS} actor.freeze_visual_encoder",
    "eval.dataset": "ckpt.best_metric_key eval.eval_at_start eval.top_p eval.max_new_tokens",
}
"""Flags of RL that need another one, as `checks.NEEDS`."""


def _ignored_by_algorithm(c: PPOConfig) -> Iterator[checks.IgnoredFlags]:
    """Yields flags that belong to other estimators, corrections, losses than those chosen."""
    advantage = c.algo.advantage
    if not c.uses_critic:
        keys = "critic. train.colocate_critic_reward"
        yield keys, f"because only the estimator {WITH_CRITIC} has a critic"
        yield "algo.advantage.lambd", f"because only {WITH_CRITIC} uses lambda"
    if not advantage.traits.whiten:
        why = f"because only {WHITENING} divide advantages by their standard deviation"
        yield "algo.advantage.no_std_norm", why
    if advantage.correction is None or not advantage.correction.drops_sequences:
        why = "without --algo.advantage.is_correction_type seq-mask-tis, which alone drops sequences"
        yield "algo.advantage.is_correction_sequence_threshold", why
    if advantage.is_correction_level == "off":
        keys = "algo.advantage.is_correction_mode algo.advantage.is_correction_gating"
        yield keys, "without --algo.advantage.is_correction_level token or seq"
    if not advantage.corrects:
        yield "algo.advantage.is_correction_threshold", "without --algo.advantage.is_correction_level"
    if c.largest_staleness == 0:
        why = "because every step trains on samples of its own weights; --train.async_enable samples ahead"
        yield "algo.advantage.staleness_decay algo.advantage.max_token_staleness", why
    if (advantage.max_token_staleness or 0) >= c.largest_staleness:
        why = "because train.async_queue_size lets no sample get older"
        yield "algo.advantage.max_token_staleness", why
    if c.algo.kl.init_coef == 0:
        keys = "algo.kl.target algo.kl.horizon algo.kl.estimator algo.kl.use_loss algo.kl.ref "
        yield f"{keys}algo.kl.unbiased_gradient", "without a KL penalty (algo.kl.init_coef 0)"
        yield "ref. train.colocate_actor_ref", "without a reference model (algo.kl.init_coef 0)"
    elif c.algo.kl.ref == "rollout":
        keys = "ref. train.colocate_actor_ref algo.kl.unbiased_gradient"
        yield keys, "with --algo.kl.ref rollout, which compares the policy with the one that sampled"
    elif not c.algo.kl.use_loss:
        yield "algo.kl.unbiased_gradient", "without --algo.kl.use_loss: a reward has no gradient"
    if c.actor.eps_clip_low_high is not None:
        yield "actor.eps_clip", "with --actor.eps_clip_low_high, which sets both bounds"
    if c.ratio_is_one:
        keys = "actor.eps_clip actor.eps_clip_low_high actor.dual_clip"
        yield keys, "because an RL step is one optimizer step, so that the ratio is 1"


def _ignored(c: PPOConfig) -> Iterator[checks.IgnoredFlags]:
    """Yields flags of RL without effect."""
    yield from checks.common_ignored(c)
    yield from checks.template_ignored(c)
    if c.vllm.sync_with_ray:
        yield "vllm.sync_backend", "with --vllm.sync_with_ray: Ray's object store transports the weights"
    if c.ds.lora.rank > 0:
        keys = "ref.num_nodes ref.num_gpus_per_node ref.offload train.colocate_actor_ref"
        yield keys, "with ds.lora.rank: the policy without its adapters is the reference"
    if not c.uses_reward_model:
        keys = "reward.num_nodes reward.num_gpus_per_node reward.offload reward.normalize_enable "
        yield f"{keys}reward.model_weights train.colocate_critic_reward", "without a reward model"
    yield from _ignored_by_algorithm(c)
    yield from checks.optimizer_ignored(c.actor, "actor.")
    yield from checks.optimizer_ignored(c.critic, "critic.")
    critic_recomputes = c.uses_critic and c.critic.gradient_checkpointing_enable
    if not c.actor.gradient_checkpointing_enable and not critic_recomputes:
        keys = "actor.gradient_checkpointing_reentrant ds.activation_offload"
        yield keys, "without --actor.gradient_checkpointing_enable"
    if c.train.force_on_policy and c.data.pretrain_dataset is None:
        yield "train.batch_size", "with --train.force_on_policy: an optimizer step has all samples of a step"
    if c.samples_freely:
        yield "rollout.max_kept_tokens", "without --rollout.top_p or --rollout.top_k"
    if c.train.agent_func_path is not None:
        yield "reward.remote_url", "with --train.agent_func_path: the agent gives the rewards"
    if not c.agents:
        yield "train.max_turns rollout.step_timeout", "without --train.agent_func_path"
    if c.reward.overlong_buffer_len is None and not c.task_values("overlong_buffer_len"):
        yield "reward.overlong_penalty_factor", "without --reward.overlong_buffer_len"
    if c.reward_function is None and not c.reward_functions:
        keys = "reward.timeout reward.num_workers reward.memory_gb reward.batch"
        yield keys, "because reward.remote_url names no reward function"
    if not (c.reward.servers or c.task_values("reward")):
        keys = "reward.remote_timeout reward.remote_try_timeout reward.remote_batch_size "
        yield f"{keys}reward.remote_concurrency", "because reward.remote_url names no reward server"
    if c.reward.urls and c.reward.model_weights is None:
        why = "because reward.remote_url gives the rewards; --reward.model_weights adds those of models"
        yield "reward.model_name_or_path", why
    if not c.uses_critic and not c.uses_reward_model:
        yield "ds.value_head_prefix", "without a critic or a reward model"
    if not c.engines_sleep:
        why = "because engines have GPUs of their own without train.colocate_all, and with train.async_enable"
        yield "vllm.enable_sleep", why
    if c.rollout.engine == "transformers":
        keys = "vllm.gpu_memory_utilization vllm.kv_cache_gb vllm.enforce_eager vllm.enable_prefix_caching "
        yield f"{keys}vllm.keep_cache vllm.sync_backend vllm.sync_with_ray", "without --rollout.engine vllm"
    if c.vllm.kv_cache_gb is not None:
        yield "vllm.gpu_memory_utilization", "with --vllm.kv_cache_gb, which sets the size"
    yield from checks.needs(c, NEEDS)


REWARD_REMEDY = (
    "name a .py file with reward_func(queries, prompts, labels), URLs of reward servers, or set "
    "--reward.model_name_or_path"
)


def _reward_source(config: PPOConfig) -> Iterator[Problem]:
    key, reward = "reward.remote_url", config.reward
    of_tasks = {*config.task_values("reward"), *config.task_values("agent")}
    has_source = config.has_rewards or of_tasks  # reading the data finds prompts without one
    if not has_source and not config.uses_teacher:
        verified = any(is_gym(item) for item in checks.split_spec(config.data.prompt_dataset))
        why = (
            "only datasets of reasoning-gym have a verifier" if verified else "no reward source is configured"
        )
        yield Problem(key, f"{why}; {REWARD_REMEDY}", ErrorCode.MISSING_FLAG)
    elif not has_source and config.algo.dynamic_filtering_enable:
        text = f"no reward source scores the groups; {REWARD_REMEDY}"
        yield Problem("algo.dynamic_filtering_enable", text, ErrorCode.MISSING_FLAG)
    if not has_source and config.eval.dataset is not None:
        text = f"no reward source scores its answers; {REWARD_REMEDY}"
        yield Problem("eval.dataset", text, ErrorCode.MISSING_FLAG)
    yield from _reward_names(key, reward)
    agents = {"train.agent_func_path": config.train.agent_func_path}
    agents |= {f"tasks.{task}.agent": name for task, name in config.task_values("agent").items()}
    for key, name in agents.items():
        if name is not None:
            form = "must name a .py file with the class AgentExecutor, or a class as folder/file.py:NAME"
            yield from plugged(key, name, "agents", form)


def _reward_names(key: str, reward: RewardConfig) -> Iterator[Problem]:
    for url in reward.urls:
        if url in reward.servers:
            yield from _server_url(key, url)
        else:
            yield from reward_function(key, url, alone=len(reward.urls) == 1)


def reward_function(key: str, name: str, *, alone: bool) -> Iterator[Problem]:
    if not alone:
        text = f"commas separate sources, and {name} must be alone; give one .py file, or http URLs"
        yield Problem(key, text, ErrorCode.INVALID_VALUE)
    else:
        form = "is neither a .py file nor a URL that starts with http:// or https://"
        yield from plugged(key, name, "rewards", f"{form}, nor a function as folder/file.py:NAME")


def plugged(key: str, name: str, kind: str, form: str) -> Iterator[Problem]:
    """Checks the name of a user's object without importing it. `form`: the expected form of the value."""
    if file := parse_file(name):
        if not os.path.isfile(file):
            yield Problem(key, checks.missing(file, name), ErrorCode.NOT_FOUND)
    elif not is_reference(name) and name not in (names := registered(kind)):
        known = f"; installed packages register {', '.join(names)}" if names else ""
        yield Problem(key, f"{form} or package.module:NAME{known}", ErrorCode.INVALID_VALUE)


def _gym_datasets(config: PPOConfig) -> Iterator[Problem]:
    keys = {"data.prompt_dataset": config.data.prompt_dataset, "eval.dataset": config.eval.dataset or ""}
    specs: dict[str, list[GymSpec]] = {key: [] for key in keys}
    for key, text in keys.items():
        for item in filter(is_gym, checks.split_spec(text)):
            try:
                specs[key].append(parse_gym(item))
            except UsageError as error:
                yield Problem(key, error.text, error.code)
    for trained, held_out in product(*specs.values()):
        if trained.overlaps(held_out):
            yield remark(
                "eval.dataset",
                f"{held_out.name} has problems of the training set: problem i is made with seed + i; use "
                f"another seed, such as {trained.seed + trained.size}",
            )


def _server_url(key: str, url: str) -> Iterator[Problem]:
    if not _has_host(url) or any(character.isspace() for character in url):
        text = f"{url} is not a URL; write http://HOST:PORT/get_reward"
        yield Problem(key, text, ErrorCode.INVALID_VALUE)
    elif urlsplit(url).username is not None and os.environ.get(KEY_VARIABLE):
        text = f"{url} has a user, and {KEY_VARIABLE} is set: a request carries one of them. Leave one out"
        yield Problem(key, text)
    elif urlsplit(url).path in ("", "/"):
        yield remark(key, f"{url} has no path; serve_rm answers at /get_reward")


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # unclosed brackets, or an invalid port
        return False


THRESHOLD = "algo.advantage.is_correction_threshold"
BOUNDS = (
    "reward.clip_range",
    THRESHOLD,
    "algo.advantage.is_correction_sequence_threshold",
    "algo.dynamic_filtering_range",
)
"""Flags with a lower and an upper bound."""


def _bounds(config: PPOConfig) -> Iterator[Problem]:
    values = flag_values(config)
    for key in BOUNDS:
        if values[key] is not None and len(values[key]) == 2 and values[key][0] >= values[key][1]:
            yield Problem(key, "the first bound must be less than the second", ErrorCode.INVALID_VALUE)


CORRECTS = "--algo.advantage.is_correction_level token corrects for that"


def _corrects(config: PPOConfig) -> bool:
    """Returns whether the loss uses the log-probs of sampling."""
    advantage = config.algo.advantage
    return advantage.corrects or advantage.proximal.is_sampler or advantage.score_centering_top_k > 0


def sampler_readers(config: PPOConfig) -> list[str]:
    """Returns the flags by which the loss reads the log-probs of the sampled tokens in the sampler."""
    advantage, kl = config.algo.advantage, config.algo.kl
    reads = {
        "algo.advantage.is_correction_enable": advantage.is_correction_enable,
        "algo.advantage.is_correction_level": advantage.is_correction_level != "off",
        "algo.advantage.proximal_policy": not advantage.proximal.needs_forward,
        "algo.kl.ref": kl.init_coef > 0 and kl.ref == "rollout",
    }
    return [key for key, is_so in reads.items() if is_so]


def _sends_adapters(config: PPOConfig) -> bool:
    return config.vllm.lora_sync == "adapter" and config.ds.lora.rank > 0


def _sources(c: PPOConfig) -> Iterator[Problem]:
    """Checks reward models and groups."""
    reward, algo, samples = c.reward, c.algo, c.rollout.n_samples_per_prompt
    weights, estimator = reward.model_weights, algo.advantage.estimator
    if weights and not any(weights):
        text = "all weights are 0, so no reward model counts; remove the reward models"
        yield Problem("reward.model_weights", text)
    if weights is not None and reward.models and len(weights) != len(reward.models):
        text = f"has {len(weights)} weights for {len(reward.models)} reward models; give one for each"
        yield Problem("reward.model_weights", text)
    name = "overlong_buffer_len"
    buffers = {f"tasks.{task}.{name}": length for task, length in c.task_values(name).items()}
    for key, length in (buffers | {f"reward.{name}": reward.overlong_buffer_len}).items():
        if (length or 0) > c.longest_response:
            limit = "rollout.max_new_tokens" if c.rollout.max_new_tokens else "data.max_len"
            text = f"is more than {limit} {c.longest_response}; use at most {c.longest_response}"
            yield Problem(key, text)
        if length is not None and not c.rollout.max_new_tokens:
            text = f"begins at {c.data.max_len - length:g} tokens of a response, and data.max_len "
            text += f"{c.data.max_len} counts the prompt too, so that nothing is penalised behind prompts of "
            yield remark(key, f"{text}{length:g} tokens or more; set --rollout.max_new_tokens")
        if c.agents and c.rollout.max_new_tokens and length is not None:
            limit = f"rollout.max_new_tokens {c.rollout.max_new_tokens} is the limit of one answer"
            text = f"counts all answers of an episode, and {limit}: longer episodes have the whole penalty"
            yield remark(key, text)
    if algo.advantage.traits.needs_group and samples == 1:
        text = f"estimator {estimator} compares the samples of a prompt; a single one always has advantage 0"
        yield remark("rollout.n_samples_per_prompt", f"{text}. Use 2 or more, or estimator reinforce")
    if not algo.advantage.traits.discounts and algo.advantage.gamma != 1:
        text = f"has no effect because estimator {estimator} does not discount; reinforce does"
        yield remark("algo.advantage.gamma", text)
    if algo.dynamic_filtering_enable and samples == 1:
        text = "filters groups of samples; use --rollout.n_samples_per_prompt 2 or more"
        yield Problem("algo.dynamic_filtering_enable", text)
    has_scores = c.uses_reward_model and not reward.urls
    if algo.dynamic_filtering_enable and has_scores and algo.dynamic_filtering_range == (0.0, 1.0):
        text = "scores of a reward model may lie outside 0 to 1; set the range of the groups to keep"
        yield remark("algo.dynamic_filtering_range", text)
    if (c.rollout.vllm_generate_batch_size or 0) > c.rollout.batch_size and not _corrects(c):
        text = f"samples ahead, so groups that wait come from an earlier policy; {CORRECTS}"
        yield remark("rollout.vllm_generate_batch_size", text)


def _tasks(c: PPOConfig) -> Iterator[Problem]:
    """Checks what each task sets for itself."""
    for task in c.task_values("reward"):
        key, own = f"tasks.{task}.reward", c.for_source(task)
        yield from _reward_names(key, own.reward)
        if agent := own.train.agent_func_path:
            yield Problem(key, f"the agent {agent} gives the rewards of this task; remove one of the two")
        if c.reward.models and c.reward.model_weights is None:
            text = "the reward models score all tasks; --reward.model_weights adds their scores to this one"
            yield Problem(key, text)
    for task in c.task_values("overlong_penalty_factor"):
        if c.for_source(task).reward.overlong_buffer_len is None:
            text = f"has no effect without --tasks.{task}.overlong_buffer_len"
            yield remark(f"tasks.{task}.overlong_penalty_factor", text)
    no_kl = {
        "without a reference model; set --algo.kl.init_coef, that of other tasks": not c.uses_reference,
        "a KL in the loss has one weight for the whole batch; remove --algo.kl.use_loss": c.algo.kl.use_loss,
        "algo.kl.target adapts one weight for all tasks; remove one of the two": c.adapts_kl,
    }
    for text in (text for text, is_so in no_kl.items() if is_so):
        yield from (Problem(f"tasks.{task}.kl_coef", text) for task in c.task_values("kl_coef"))
    if (name := c.algo.advantage.estimator) not in GROUP_ESTIMATORS:
        text = f"the run's estimator {name} does more than compare the samples of a prompt, over all tasks; "
        text += f"use {', '.join(GROUP_ESTIMATORS)} for --algo.advantage.estimator"
        yield from (Problem(f"tasks.{task}.estimator", text) for task in c.task_values("estimator"))


def _quotas(c: PPOConfig) -> Iterator[Problem]:
    """Checks the quotas of tasks, and curricula."""
    quotas, size = c.task_values("quota"), c.rollout.batch_size
    if quotas and (total := sum(quotas.values())) != size:
        said = " + ".join(f"{task} {quota}" for task, quota in quotas.items())
        text = (
            f"the quotas {said} are {total} prompts, and a step has {size}; use --rollout.batch_size {total}"
        )
        yield Problem(f"tasks.{next(iter(quotas))}.quota", text)
    if quotas and c.data.prompt_probs is not None:
        text = "draws from datasets at random, and the quotas of tasks are exact; remove one of the two"
        yield Problem("data.prompt_probs", text)
    if c.data.curriculum and c.algo.dynamic_filtering_enable and c.max_staleness:
        text = (
            "with --train.async_enable, which prompt takes the place of a filtered one would depend on the "
            "order in which samples arrive; remove it, or --algo.dynamic_filtering_enable"
        )
        yield Problem("data.curriculum", text, ErrorCode.UNSUPPORTED)


def _policy(c: PPOConfig) -> Iterator[Problem]:
    """Checks the KL controller, the proximal policy and the log-probs before an update."""
    advantage, kl = c.algo.advantage, c.algo.kl
    if c.adapts_kl and c.samples_per_step > kl.horizon:
        yield remark(
            "algo.kl.horizon",
            f"a step has {c.samples_per_step} samples, and the KL coefficient changes by at most a fifth in "
            f"a step, as it would with {kl.horizon} samples; use {c.samples_per_step} or more",
        )
    if advantage.proximal.is_sampler and advantage.corrects:
        by_type = advantage.is_correction_enable
        yield Problem(
            f"algo.advantage.is_correction_{'enable' if by_type else 'level'}",
            f"has no effect: with algo.advantage.proximal_policy {advantage.proximal_policy} the correction "
            "ratio is 1; remove it, or use --algo.advantage.proximal_policy recomputed",
        )
    if advantage.proximal_policy == "interpolated" and c.largest_staleness <= 1:
        text = "is the same as rollout while samples are at most 1 step old; use rollout, or "
        yield remark("algo.advantage.proximal_policy", f"{text}--train.async_queue_size 2 or more")
    if c.algo.skip_old_log_probs is True:
        yield from _skipped_log_probs(c)
    if c.train.force_on_policy and c.train.max_epochs > 1:
        text = "every pass is an optimizer step, and --train.force_on_policy has one; use 1"
        yield Problem("train.max_epochs", text)
    if c.train.shuffle == "group" and c.samples_per_update < c.rollout.n_samples_per_prompt:
        yield Problem(
            "train.shuffle",
            f"group keeps all {c.rollout.n_samples_per_prompt} samples of a prompt (rollout.n_samples_per_"
            f"prompt) in one optimizer step; raise train.batch_size {c.train.batch_size}, or use sample",
        )


def _correction(c: PPOConfig) -> Iterator[Problem]:
    """Checks that level, mode, gating and threshold of the off-policy correction fit together."""
    chosen, threshold = c.algo.advantage, c.algo.advantage.is_correction_threshold
    level, gating = chosen.is_correction_level, chosen.is_correction_gating
    if len(threshold) not in (1, 2):
        text = f"has {len(threshold)} numbers; give a lower and an upper bound, or an upper bound alone"
        yield Problem(THRESHOLD, text, ErrorCode.INVALID_VALUE)
    if level == "off":
        return
    if chosen.is_correction_enable:
        text = "is a correction by its type, and algo.advantage.is_correction_level another one; remove one"
        yield Problem("algo.advantage.is_correction_enable", text)
    if chosen.is_correction_mode == "clip" and (level == "seq" or gating != "ratio"):
        what = "a sequence" if level == "seq" else f"the divergence {gating}"
        text = (
            f"clips the ratio of tokens, and {what} can only be masked; use mask, or level token and gating "
        )
        yield Problem("algo.advantage.is_correction_mode", f"{text}ratio")
    if gating != "ratio" and len(threshold) == 2:
        text = f"a divergence ({gating}) has an upper bound alone; give one number, such as 0.05"
        yield Problem(THRESHOLD, text)


def _centering(c: PPOConfig) -> Iterator[Problem]:
    """Checks that the weight of an action's score is known for every other token at its place: 1, or a
    function of the ratio of trainer to engine."""
    key, chosen, kept = "algo.advantage.score_centering_top_k", c.algo.advantage, c.rollout.max_kept_tokens
    if not chosen.score_centering_top_k:
        return
    by_type = chosen.is_correction_enable and chosen.is_correction_type not in ("tis", "icepop")
    by_level = chosen.is_correction_level == "seq" or chosen.is_correction_gating != "ratio"
    refused = {
        f"actor.policy_loss_type {c.actor.policy_loss_type} weighs scores in another way; use ppo or cispo": (
            c.actor.policy_loss_type not in ("ppo", "cispo")
        ),
        f"centers the scores of one optimizer step, and an RL step has {c.updates_per_step}; add "
        "--train.force_on_policy": c.updates_per_step > 1,
        f"algo.advantage.proximal_policy {chosen.proximal_policy} weighs scores by a clipped ratio; use "
        "recomputed": chosen.proximal_policy != "recomputed",
        f"the weight of algo.advantage.is_correction_type {chosen.is_correction_type} is known for sampled "
        "tokens only; use tis or icepop": by_type,
        "a mask of sequences, or by a divergence, is known for sampled tokens only; use "
        "--algo.advantage.is_correction_level token and is_correction_gating ratio": (
            chosen.is_correction_level != "off" and by_level
        ),
        f"top-p and top-k train over rollout.max_kept_tokens {kept} recorded tokens, and only these can be "
        "centered; use at most that many, or raise rollout.max_kept_tokens": (
            c.rollout.is_truncated and kept < chosen.score_centering_top_k
        ),
    }
    yield from (Problem(key, text, ErrorCode.UNSUPPORTED) for text, is_so in refused.items() if is_so)


def _skipped_log_probs(c: PPOConfig) -> Iterator[Problem]:
    """Checks that nothing needs the log-probs which algo.skip_old_log_probs leaves out."""
    key, advantage, steps = "algo.skip_old_log_probs", c.algo.advantage, c.updates_per_step
    if steps > 1 and advantage.proximal.needs_forward:
        text = f"needs RL steps of one optimizer step, and these have {steps};\nuse train.batch_size "
        yield Problem(key, f"{text}{c.samples_per_step} and train.max_epochs 1, or remove it")
    yield from (Problem(key, text) for text in log_prob_needs(c))
    if c.adapts_kl and (steps > 1 or c.rollout.mask_truncated):
        yield Problem(key, "algo.kl.target needs these log-probs of all samples; remove one of the two")


def log_prob_needs(c: PPOConfig) -> Iterator[str]:
    """Yields what needs the policy's log-probs before an update, with the remedy."""
    advantage = c.algo.advantage
    if c.uses_reference and not c.algo.kl.use_loss:
        text = "KL in the reward needs these log-probs; add --algo.kl.use_loss --algo.kl.estimator k2 or "
        yield f"{text}--algo.kl.init_coef 0, or remove it"
    if c.uses_teacher:
        yield "the teacher's reward (teacher.model_name_or_path) needs these log-probs; remove it"
    if advantage.traits.needs_log_probs:
        yield f"estimator {advantage.estimator} needs these log-probs; remove it"


def _sampling(c: PPOConfig) -> Iterator[Problem]:
    """Checks router replay, lengths, sampling and stop strings."""
    key = "algo.router_replay"
    if c.algo.router_replay and not c.vllm.enable_prefix_caching:
        text = "vLLM stores the experts of each token with the blocks of its prefix cache; add "
        yield Problem(key, f"{text}--vllm.enable_prefix_caching")
    if c.algo.router_replay and c.vllm.pipeline_parallel_size > 1:
        text = "a pipeline stage knows the experts of its own layers only; use "
        yield Problem(key, f"{text}--vllm.pipeline_parallel_size 1", ErrorCode.UNSUPPORTED)
    if c.algo.router_replay and c.reads_images:
        text = "does not support images (data.max_images_per_prompt); remove one of the two"
        yield Problem(key, text, ErrorCode.UNSUPPORTED)
    if (c.rollout.max_new_tokens or 0) >= c.data.max_len:
        text = f"leaves no room for a prompt in data.max_len {c.data.max_len}, which counts both; raise "
        yield Problem("rollout.max_new_tokens", f"{text}data.max_len")
    if c.rollout.top_k == 1 and c.rollout.max_kept_tokens > 0:
        text = (
            "only one token can be sampled, with probability 1, so nothing is learned; use 2 or more, or -1"
        )
        yield Problem("rollout.top_k", text)
    if "" in (c.rollout.stop or ()):
        text = "has an empty text, which would end every response; remove it"
        yield Problem("rollout.stop", text, ErrorCode.INVALID_VALUE)
    if any("\\n" in text for text in c.rollout.stop or ()):
        yield remark("rollout.stop", checks.IN_BASH)


def _asynchronous(c: PPOConfig) -> Iterator[Problem]:
    """Checks asynchronous training, and adapters in the engines."""
    if c.train.partial_rollout_enable and not c.train.async_enable:
        yield Problem("train.partial_rollout_enable", "needs --train.async_enable")
    if c.vllm.keep_cache and not c.train.partial_rollout_enable:
        text = "keeps the cache of requests that a weight sync pauses; add --train.partial_rollout_enable, "
        yield Problem("vllm.keep_cache", f"{text}or remove it")
    if c.vllm.keep_cache and c.reads_images:
        text = "new prompts would read images as the old weights encoded them; remove it"
        yield Problem("vllm.keep_cache", text, ErrorCode.UNSUPPORTED)
    if c.train.async_enable and c.train.colocate_all and c.placement == "manual":
        yield remark(
            "train.async_enable",
            "engines that sample during training need GPUs of their own, and only the models share GPUs "
            f"(train.colocate_all). The run needs {c.num_engines * c.vllm.num_gpus} more",
        )
    if c.max_staleness > 1 and not _corrects(c):
        text = f"samples may be {c.max_staleness} steps older than the weights that they train; {CORRECTS}"
        yield remark("train.async_queue_size", text)
    if not _sends_adapters(c):
        return
    if c.ds.lora.rank > (largest := VLLM_LORA_RANKS[-1]):
        text = f"vLLM supports adapters up to rank {largest} (ds.lora.rank {c.ds.lora.rank}); remove it, so "
        yield Problem("vllm.lora_sync", f"{text}that they are merged", ErrorCode.UNSUPPORTED)
    if c.reads_images:
        yield Problem(
            "vllm.lora_sync",
            "vLLM supports adapters in the language part only, and ds.lora adapts the vision part too; "
            "remove it, so that they are merged",
            ErrorCode.UNSUPPORTED,
        )


def _kl(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    kl = config.algo.kl
    if kl.init_coef > 0 and kl.ref == "rollout" and not kl.use_loss:
        text = "is a term of the loss; add --algo.kl.use_loss --algo.kl.estimator k3, or use model"
        yield Problem("algo.kl.ref", text)
    if kl.init_coef > 0 and kl.ref == "rollout" and kl.target is not None:
        text = "adapts the weight to the KL from the reference model; remove it, or use --algo.kl.ref model"
        yield Problem("algo.kl.target", text)
    if kl.init_coef == 0 or not {"algo.kl.estimator", "algo.kl.use_loss"} & set(explicit):
        return
    has_gradient = KL_ESTIMATORS[kl.estimator].has_gradient
    if kl.use_loss and not (has_gradient or kl.unbiased_gradient or kl.ref == "rollout"):
        yield remark("algo.kl.estimator", "in the loss, its gradient is zero on average; use k2 or k3")
    if has_gradient and not kl.use_loss:
        yield remark("algo.kl.estimator", "is biased in the reward; k1 is the unbiased estimate")


def _policy_loss(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    actor = config.actor
    name, loss = actor.policy_loss_type, actor.loss
    if loss.ratio == "sequence" and actor.loss_aggregation not in (None, loss.aggregation()):
        text = f"{name} has one ratio per sequence and needs {loss.aggregation()}; remove this flag"
        yield Problem("actor.loss_aggregation", text)
    clip_is_set = {"actor.eps_clip", "actor.eps_clip_low_high"} & set(explicit)
    if loss.ratio == "sequence" and not clip_is_set and not config.ratio_is_one:
        yield remark(
            "actor.policy_loss_type",
            f"the ratio of a sequence hardly ever leaves actor.eps_clip {actor.eps_clip}; the paper uses "
            "--actor.eps_clip_low_high 3e-4 4e-4",
        )
    if not loss.dual_clip and actor.dual_clip is not None:
        text = f"the loss {name} does not read it; remove it, or bound the ratio by --actor.eps_clip_low_high"
        yield Problem("actor.dual_clip", text)


def _balance(config: PPOConfig) -> Iterator[Problem]:
    actor, critic = config.actor, config.critic
    recomputes = actor.gradient_checkpointing_enable
    roles = {"actor": (actor.aux_loss_coef, recomputes)}
    if config.uses_critic:
        own = critic.gradient_checkpointing_enable
        roles["critic"] = (config.critic_aux_loss_coef, recomputes if own is None else own)
    for role, (coef, recomputes) in roles.items():
        if coef > 0 and recomputes and actor.gradient_checkpointing_reentrant:
            key = "actor.gradient_checkpointing_reentrant"
            yield Problem(key, checks.HIDDEN_ROUTERS.format(f"{role}.aux_loss_coef"), ErrorCode.UNSUPPORTED)


def _speculation(config: PPOConfig) -> Iterator[Problem]:
    """Refuses a configuration of speculative decoding that cannot be read, whose package is not installed, or
    with which another feature does not work. vLLM checks the rest when an engine starts."""
    if (text := config.vllm.speculative) is None:
        return
    key = "vllm.speculative"
    try:
        speculation = parse_speculation(text)
    except ValueError as error:
        yield Problem(key, str(error), ErrorCode.INVALID_VALUE)
        return
    if speculation.get("method") == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        text = "needs the package arctic-inference: pip install arctic-inference; or use ngram:3"
        yield Problem(key, text, ErrorCode.MISSING_PACKAGE)
    if config.algo.router_replay:
        text = (
            "with --algo.router_replay the routing of rejected tokens would be recorded; remove one of them"
        )
        yield Problem(key, text, ErrorCode.UNSUPPORTED)


def _engine(config: PPOConfig) -> Iterator[Problem]:
    """Refuses vLLM where it is not installed, and with other engines features that only vLLM's have."""
    if config.rollout.engine == "vllm":
        yield from checks.vllm("rollout.engine")
        yield from _speculation(config)
        return
    features = {
        "vllm.tensor_parallel_size": config.vllm.tensor_parallel_size > 1,
        "vllm.pipeline_parallel_size": config.vllm.pipeline_parallel_size > 1,
        "vllm.lora_sync": _sends_adapters(config),
        "vllm.speculative": config.vllm.speculative is not None,
        "vllm.engine_args": bool(config.vllm.engine_args),
        "algo.router_replay": config.algo.router_replay,
        "data.max_images_per_prompt": config.reads_images,
    }
    for key, is_used in features.items():
        if is_used:
            text = f"rollout.engine {config.rollout.engine} does not support it; remove it, or use vllm"
            yield Problem(key, text, ErrorCode.UNSUPPORTED)


SAME_ANSWER = "greedy decoding gives the same answer each time"


def _evaluation(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    if config.eval.dataset is None:
        if config.eval.eval_only:
            text = "needs the prompts to evaluate on; set --eval.dataset"
            yield Problem("eval.eval_only", text, ErrorCode.MISSING_FLAG)
        return
    if (config.eval.max_new_tokens or 0) >= config.data.max_len:
        text = f"leaves no room for a prompt in data.max_len {config.data.max_len}, which counts both; raise "
        yield Problem("eval.max_new_tokens", f"{text}data.max_len")
    samples = config.eval.n_samples_per_prompt
    if config.eval.temperature == 0 and samples > 1:
        yield Problem(
            "eval.temperature",
            f"{SAME_ANSWER}; use --eval.n_samples_per_prompt 1, not {samples}, or a temperature above 0",
            fatal=not explicit["eval.temperature"].old,
        )
    best = config.ckpt.best_metric_key
    if best not in ("", "none") and not re.search(BEST, best):
        text = (
            "the largest value counts as the best; use a metric that ends in _score_mean, _best_ofK or _passK"
        )
        yield remark("ckpt.best_metric_key", text)
    if config.eval.steps < 1 and not (config.eval.eval_only or config.eval.eval_at_start):
        yield remark("eval.dataset", "is not used, because eval.steps is -1; set --eval.steps N")


def _batches(config: PPOConfig) -> Iterator[Problem]:
    ranks, samples = config.data_parallel_size, config.samples_per_step
    if not config.train.force_on_policy:
        yield from checks.batches(config, ranks, samples, _made(config))
    elif text := checks.uneven_batch(config, samples, ranks):
        text = f"{_made(config)}, all in one optimizer step (train.force_on_policy), and {samples} {text}"
        yield Problem("rollout.batch_size", f"{text}; use another")


def _made(config: PPOConfig) -> str:
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    return f"a step has {prompts} prompts x {samples} = {prompts * samples} samples"


def _ranks(config: PPOConfig) -> dict[str, int]:
    """Returns the number of ranks of each role with GPUs of its own."""
    values = flag_values(config)
    return {
        role: values[f"{role}.num_nodes"] * values[f"{role}.num_gpus_per_node"]
        for role in config.own_placements
    }


def optimizer_sleep(config: PPOConfig) -> Iterator[Problem]:
    """Checks that DeepSpeed can offload the optimizer's states."""
    key, ds = "ds.enable_sleep", config.ds
    if not ds.enable_sleep:
        return
    if ds.zero_stage == 0:
        yield Problem(key, "needs sharded optimizer states; use --ds.zero_stage 1, 2 or 3")
    types = ds.param_dtype, ds.grad_accum_dtype
    if ds.zero_stage == 1 and types == ("bf16", "fp32") and not ds.adam_offload:  # DeepSpeed's BF16_Optimizer
        text = "cannot move the unsharded fp32 gradients (ds.grad_accum_dtype) of ds.zero_stage 1"
        yield Problem(key, f"{text}; use --ds.zero_stage 2, which shards them", ErrorCode.UNSUPPORTED)


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
            f"with train.colocate_all the engines must have the actor's {gpus} GPUs together, and "
            f"{config.num_engines} engines x {per_engine} GPUs are {config.num_engines * per_engine}; {fits}",
        )


def _placement(config: PPOConfig, explicit: Explicit) -> Iterator[Problem]:
    values = flag_values(config)
    if config.placement == "auto" and "train.colocate_all" in explicit and not config.train.colocate_all:
        text = "with --placement auto the models share their GPUs; remove one of the two"
        yield Problem("train.colocate_all", text)
    for role, (_, host) in config.placements.items():
        for name in ("num_nodes", "num_gpus_per_node"):
            key = f"{role}.{name}"
            if host and key in explicit and values[key] not in (0, values[f"{host}.{name}"]):
                own = f"{host}.{name} {values[f'{host}.{name}']}"
                yield remark(key, f"has no effect: the {role} shares the GPUs of the {host} ({own})")
            if not host and values[key] == 0:
                yield Problem(key, "0 means the actor's GPUs; add --train.colocate_all, or use 1 or more")
    yield from engines_beside_actor(config)
