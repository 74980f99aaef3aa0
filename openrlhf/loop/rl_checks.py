"""Checks the things that the flags of an RL run refer to: cluster, files, models and users' code."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from openrlhf.algorithms.trial import try_out
from openrlhf.backends.deepspeed.support import check_options
from openrlhf.backends.vllm.support import check_vllm_adapts, check_vllm_runs, engine_arguments
from openrlhf.checkpoint.start import check_output
from openrlhf.cluster.launch import check_resources, cluster_has_gpus
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, REWARD_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.data.sources import check_columns
from openrlhf.errors import ErrorCode, UsageError, counted
from openrlhf.models.configurations import check_room, load_config
from openrlhf.models.experts import check_experts, check_routers
from openrlhf.models.loading import check_model
from openrlhf.models.router_replay import check_replay
from openrlhf.models.saving import check_saving
from openrlhf.models.scorer import check_reward_model, score_statistics
from openrlhf.models.tensor_parallel import check_tensor_parallel
from openrlhf.models.tokenizers import load_run_tokenizer, policy_processor
from openrlhf.observability.hooks.load import check_hooks
from openrlhf.observability.trackers.load import build_trackers
from openrlhf.rewards.function import check_reward_file
from openrlhf.rollout.executors import check_agent_file
from openrlhf.training.models import check_loadable
from openrlhf.training.rl_data import PRETRAIN_FLAG, pretrain_column, prompt_columns
from openrlhf.training.schedule import prompts_of_steps
from openrlhf.user_file import line_and_error


def problems_outside(config: PPOConfig) -> list[ValueError]:
    """Returns the first problem of each flag with the cluster, files or users' code. Loads no weights and
    starts no processes."""
    problems: list[ValueError] = []
    wrong: set[str] = set()

    def ask(flag: str, check: Callable[..., object], /, *args: Any, **options: Any) -> None:
        if flag in wrong:
            return
        try:
            check(*args, **options)
        except ValueError as error:
            problems.append(error)
            wrong.add(flag)

    ask("--ckpt.output_dir", check_output, config, resumes=config.ckpt.load_enable)
    ask("--logger.trackers", build_trackers, config.logger)
    ask("--train.hooks", check_hooks, config.train.hooks, config.train.verify_steps)
    ask("--vllm.num_engines", check_resources, config)
    on_cpu = "--vllm.num_engines" not in wrong and not cluster_has_gpus()
    check_files(config, ask, on_cpu=on_cpu)
    if on_cpu:
        _note_offloading(config)
    return problems


def _note_offloading(config: PPOConfig) -> None:
    asked = {"--vllm.enable_sleep": config.engines_sleep, "--ds.enable_sleep": config.ds.enable_sleep}
    if flags := " and ".join(flag for flag, is_asked in asked.items() if is_asked):
        print(
            f"note: {flags}: has no effect, because nothing is offloaded without a GPU",
            file=sys.stderr,
            flush=True,
        )


def check_files(config: PPOConfig, ask: Callable[..., None], *, on_cpu: bool) -> None:
    """Checks datasets, models and users' files by `ask(flag, check, ...)`, which calls `check(...)` unless
    the flag already has a problem. `on_cpu`: True if the engines are known to have no GPU."""
    _check_columns(config, ask)
    actor, critic = config.actor.model_name_or_path, config.critic_path
    ask(ACTOR_FLAG, _check_trained, config, actor, ACTOR_FLAG)
    ask(ACTOR_FLAG, check_engines, config, on_cpu=on_cpu)
    if config.rollout.engine == "vllm":
        ask("--vllm.engine_args", engine_arguments, config.vllm.engine_args)
    if config.train.backend == "deepspeed":
        ask("--ds.config", check_options, config.ds)
    ask(ACTOR_FLAG, lambda: check_saving(actor, ACTOR_FLAG, policy_processor(config)))
    if config.actor.aux_loss_coef:
        ask(ACTOR_FLAG, check_experts, actor, ACTOR_FLAG, "--actor.aux_loss_coef")
    if config.actor.freeze_moe_router:
        ask(ACTOR_FLAG, check_routers, actor, ACTOR_FLAG, "--actor.freeze_moe_router")
    if config.algo.router_replay:
        ask(ACTOR_FLAG, lambda: check_replay(load_config(actor, ACTOR_FLAG), ACTOR_FLAG, actor))
    if path := config.teacher.model_name_or_path:
        ask(TEACHER_FLAG, check_model, path, TEACHER_FLAG)
    if config.uses_critic and critic != actor:
        ask(CRITIC_FLAG, _check_trained, config, critic, CRITIC_FLAG)
        ask(CRITIC_FLAG, lambda: check_saving(critic, CRITIC_FLAG, policy_processor(config)))
    if config.uses_critic and config.critic_aux_loss_coef:
        ask(CRITIC_FLAG, check_experts, critic, CRITIC_FLAG, "--critic.aux_loss_coef")
    if config.uses_critic and config.critic.freeze_moe_router:
        ask(CRITIC_FLAG, check_routers, critic, CRITIC_FLAG, "--critic.freeze_moe_router")
    for path in config.reward.models:
        ask(REWARD_FLAG, check_reward_model, path, REWARD_FLAG, config.ds.value_head_prefix)
        if config.reward.normalize_enable:
            ask(REWARD_FLAG, lambda path: score_statistics(load_config(path, REWARD_FLAG), path), path)
    models = {ACTOR_FLAG: [actor], TEACHER_FLAG: [config.teacher.model_name_or_path]}
    models |= {CRITIC_FLAG: [critic] if config.uses_critic else [], REWARD_FLAG: config.reward.models}
    for flag, path in ((flag, path) for flag, paths in models.items() for path in paths if path):
        ask(flag, check_loadable, config, path, flag)
        if (size := config.ds.tensor_parallel_size) > 1:
            ask(flag, check_tensor_parallel, path, flag, size)
    check_users_files(config, ask)  # last, because users' imports take longest


def _check_columns(config: PPOConfig, ask: Callable[..., None]) -> None:
    data, columns = config.data, prompt_columns(config)
    sets = {
        "--data.prompt_dataset": (data.prompt_dataset, data.prompt_split, columns),
        "--eval.dataset": (config.eval.dataset, config.eval.split, columns),
        PRETRAIN_FLAG: (data.pretrain_dataset, data.pretrain_split, pretrain_column(config)),
    }
    for flag, (spec, split, required) in sets.items():
        if spec:
            options = {"required_columns": required, "split": split, "bad_rows": data.broken_rows}
            row_func = None if flag == PRETRAIN_FLAG else data.row_func
            ask(flag, check_columns, spec, flag=flag, row_func=row_func, **options)


def _check_trained(config: PPOConfig, path: str, flag: str) -> None:
    check_model(path, flag)
    check_room(load_config(path, flag), config, "data.max_len", path=path)


def check_users_files(config: PPOConfig, ask: Callable[..., None]) -> None:
    """Imports and checks the user's agent or reward function, and runs users' algorithms on a few samples.
    `ask`: as in `check_files`."""
    limits = {
        "max_turns": config.train.max_turns,
        "step_timeout": config.rollout.step_timeout,
        "images": config.reads_images,
    }
    check = partial(
        check_agent_file,
        limits=[name for name, value in limits.items() if value],
        tokenizer=partial(load_run_tokenizer, config),
        is_chat=config.data.apply_chat_template,
    )
    for key, agent in config.agents.items():
        ask(f"--{key}", _check_file, check, agent, f"--{key}")
    for key, function in config.reward_functions.items():
        if not (key == "reward.remote_url" and config.train.agent_func_path):
            ask(f"--{key}", _check_file, check_reward_file, function, f"--{key}")
    for key, reference in config.references.items():
        ask(f"--{key}", check_algorithm, config, f"--{key}", reference)


def check_algorithm(config: PPOConfig, flag: str, reference: str) -> None:
    """Raises UsageError if a user's class fails on four test samples."""
    kind = config.selected[flag.removeprefix("--")]
    try:
        try_out(lambda: kind.of(config.algo.options))
    except Exception as error:
        text = line_and_error(error, reference)
        raise UsageError(ErrorCode.USER_CODE, text, flag=flag, value=reference) from error


def _check_file(check: Callable[[str, str], str], path: str, flag: str) -> None:
    if remark := check(path, flag):
        print(f"note: {remark}", file=sys.stderr, flush=True)


def check_engines(config: PPOConfig, *, on_cpu: bool) -> None:
    """Raises UsageError if vLLM does not support the policy. Checks no other engine."""
    if config.rollout.engine != "vllm":
        return
    path = config.actor.model_name_or_path
    model_config = load_config(path, ACTOR_FLAG)
    check_vllm_runs(
        model_config,
        flag=ACTOR_FLAG,
        path=path,
        dtype=config.ds.param_dtype,
        max_len=config.data.max_len,
        on_cpu=on_cpu,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
    )
    if config.ds.lora.rank > 0 and config.vllm.lora_sync == "adapter":
        check_vllm_adapts(model_config, flag=ACTOR_FLAG, path=path)


def check_policy_learns(config: PPOConfig, num_prompts: int) -> None:
    """Raises UsageError if the policy would never learn, because the critic's warm-up takes the whole run."""
    steps = len(prompts_of_steps(config, num_prompts))
    if steps <= config.frozen_actor_steps:
        text = f"the run has only {counted(steps, 'step')}, and the policy would never learn; use fewer"
        raise UsageError(
            ErrorCode.CONFLICT, text, flag="--critic.freezing_steps", value=config.critic.freezing_steps
        )
