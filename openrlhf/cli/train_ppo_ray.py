"""Reinforcement learning on a Ray cluster: `python -m openrlhf.cli.train_ppo_ray`, or under `ray job
submit`."""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import cast

from openrlhf.cli.publish import publish
from openrlhf.config.commands import PPO
from openrlhf.config.fields import values_of
from openrlhf.config.parse import Explicit, parse
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, REWARD_FLAG, TEACHER_FLAG, PPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    from openrlhf.cli.errors import short_errors

    with short_errors():
        config = parse(PPO, argv, settle=rank_counts, inspect=problems_outside).config
        run(config, argv)


def run(config: PPOConfig, argv: Sequence[str] = ()) -> None:
    """Train, and write the policy to `ckpt.output_dir`."""
    from openrlhf.cluster.launch import check_resources, cluster_has_gpus, naming_logs, start_ray, stop_ray
    from openrlhf.cluster.placement import place
    from openrlhf.cluster.roles import start_roles

    start_ray()
    check_resources(config)
    on_gpu = cluster_has_gpus()
    with naming_logs():
        places = place(config, on_gpu)
        prompts, eval_prompts, tokenizer = build_prompt_datasets(config)
        check_policy_learns(config, len(prompts))
        roles = start_roles(config, places, on_gpu, len(prompts))
        trainer = build_trainer(config, argv, roles, prompts, eval_prompts, tokenizer)
        roles.rollout.on_finished = lambda group: trainer.observer.advance(len(group))
        try:
            trainer.fit()
            roles.policy.export(config.ckpt.output_dir).result()
            if roles.critic and config.critic.save_value_network:
                roles.critic.export(f"{config.ckpt.output_dir}_critic").result()
        finally:
            trainer.observer.close()
    publish(config, PPO, base_model=config.actor.model_name_or_path, datasets=config.data.prompt_dataset)
    roles.rollout.close()
    stop_ray()


def rank_counts(config: PPOConfig, explicit: Explicit) -> dict[str, int]:
    """`num_gpus_per_node` where nobody chose it and the default is more than a node has. Without GPUs one
    rank."""
    keys = [f"{role}.num_gpus_per_node" for role, home in config.homes.items() if home.host is None]
    if all(key in explicit for key in keys):
        return {}
    from openrlhf.cluster.launch import available_nodes

    most = max(1, min((int(n["GPU"]) for n in available_nodes() if n.get("GPU", 0) >= 1), default=1))
    values = values_of(config)
    return {key: most for key in keys if key not in explicit and cast(int, values[key]) > most}


def problems_outside(config: PPOConfig, refused: Collection[str]) -> list[str]:
    """What is wrong with the cluster and with files, before anything is loaded or started; nothing more about
    flags that are `refused`."""
    from openrlhf.cluster.launch import check_resources

    problems, wrong = [], set(refused)

    def ask(flag: str, check: Callable[..., object], /, *args, **options) -> None:
        if flag in wrong:
            return
        try:
            check(*args, **options)
        except ValueError as error:
            problems.append(str(error))
            wrong.add(flag)

    ask("--vllm.num_engines", check_resources, config)
    check_files(config, ask)
    return problems


def check_files(config: PPOConfig, ask: Callable[..., None]) -> None:
    """Everything that can be wrong with them, by `ask(flag, check, ...)`, which calls `check(...)` where
    nothing is known to be wrong with the flag."""
    from openrlhf.datasets.sources import check_columns
    from openrlhf.models.experts import check_experts
    from openrlhf.models.loading import check_model
    from openrlhf.models.scorer import check_reward_model
    from openrlhf.rollout.reward_function import check_reward_file

    actor, critic = config.actor.model_name_or_path, config.critic_path
    ask(ACTOR_FLAG, _check_trained, actor, ACTOR_FLAG, config.data.max_len)
    if config.actor.aux_loss_coef:
        ask(ACTOR_FLAG, check_experts, actor, ACTOR_FLAG, "--actor.aux_loss_coef")
    if path := config.teacher.model_name_or_path:
        ask(TEACHER_FLAG, check_model, path, TEACHER_FLAG)
    if config.uses_critic and critic != actor:
        ask(CRITIC_FLAG, _check_trained, critic, CRITIC_FLAG, config.data.max_len)
    if config.uses_critic and config.critic_aux_loss_coef:
        ask(CRITIC_FLAG, check_experts, critic, CRITIC_FLAG, "--critic.aux_loss_coef")
    for path in config.reward.models:
        ask(REWARD_FLAG, check_reward_model, path, REWARD_FLAG, config.ds.value_head_prefix)
        if config.reward.normalize_enable:
            ask(REWARD_FLAG, _check_statistics, path)
    if path := config.reward.function_path:
        ask("--reward.remote_url", check_reward_file, path, "--reward.remote_url")
    sets = {
        "--data.prompt_dataset": (config.data.prompt_dataset, config.data.prompt_split),
        "--eval.dataset": (config.eval.dataset, config.eval.split),
    }
    for flag, (spec, split) in sets.items():
        if spec:
            ask(flag, check_columns, spec, flag=flag, required_columns=_columns(config), split=split)


def _check_trained(path: str, flag: str, max_len: int) -> None:
    from openrlhf.models.loading import check_room, load_config

    check_room(load_config(path, flag), max_len, flags="--data.max_len", path=path)


def _check_statistics(path: str) -> None:
    from openrlhf.models.loading import load_config
    from openrlhf.models.scorer import score_statistics

    score_statistics(load_config(path, REWARD_FLAG), path)


def build_prompt_datasets(config: PPOConfig):
    """(training prompts, list of evaluation prompts, tokenizer)"""
    from openrlhf.config.checks import split_spec
    from openrlhf.datasets.prompts import build_prompts, source_names
    from openrlhf.datasets.sources import load_rows
    from openrlhf.models.loading import policy_tokenizer

    data, evaluation = config.data, config.eval
    tokenizer = policy_tokenizer(config)
    check_vocabularies(config, tokenizer)

    def build(
        spec: str,
        flag: str,
        split: str,
        max_samples: int | None,
        *,
        probs: str | None = None,
        source: str = "default",
        first_id: int = 0,
    ):
        rows = load_rows(
            spec,
            flag=flag,
            required_columns=_columns(config),
            probs=probs,
            split=split,
            max_samples=max_samples,
            seed=config.train.seed,
        )
        return build_prompts(
            rows,
            tokenizer,
            input_key=data.input_key,
            label_key=config.label_key,
            apply_chat_template=data.apply_chat_template,
            input_template=data.input_template,
            max_len=data.max_len,
            bad_rows=data.bad_rows,
            source=source,
            first_id=first_id,
        )

    prompts = build(
        data.prompt_dataset,
        "--data.prompt_dataset",
        data.prompt_split,
        data.max_samples,
        probs=data.prompt_probs,
    )
    eval_prompts, num_rows = [], 0
    sets = split_spec(evaluation.dataset or "")
    for item, source in zip(sets, source_names(sets), strict=True):
        held_out = build(
            item,
            "--eval.dataset",
            evaluation.split,
            evaluation.max_samples,
            source=source,
            first_id=num_rows,
        )
        eval_prompts += held_out
        num_rows += len(held_out) + held_out.skipped
    check_reward_templates(config, tokenizer, [*prompts, *eval_prompts])
    return prompts, eval_prompts, tokenizer


def check_reward_templates(config: PPOConfig, tokenizer, prompts) -> None:
    """Raise ValueError where a reward model's own chat template cannot show the prompts."""
    from openrlhf.models.loading import load_tokenizer
    from openrlhf.rollout.reward_model import check_conversations, has_own_template

    for path in config.reward.models:
        own = load_tokenizer(path, flag=REWARD_FLAG)
        if has_own_template(own, tokenizer):
            check_conversations(prompts, own, path)


def check_vocabularies(config: PPOConfig, tokenizer) -> None:
    """Raise ValueError where a model cannot read what the policy writes, or not as long a text."""
    from openrlhf.models.loading import (
        check_room,
        check_same_vocabulary,
        load_config,
        load_tokenizer,
        reads_the_tokens_of,
    )

    if path := config.teacher.model_name_or_path:
        check_same_vocabulary(tokenizer, load_tokenizer(path, flag=TEACHER_FLAG), TEACHER_FLAG, path)
    if config.uses_critic:
        path = config.critic_path
        if not reads_the_tokens_of(load_tokenizer(path, flag=CRITIC_FLAG), tokenizer):
            raise ValueError(
                f"{CRITIC_FLAG}: the critic would start from {path}, to which the policy's tokens mean "
                f"something else.\nName one of the policy's family, as {config.actor.model_name_or_path}."
            )
    for path in config.reward.models:
        own = load_tokenizer(path, flag=REWARD_FLAG)
        if reads_the_tokens_of(own, tokenizer):  # another one reads another number of tokens
            model = load_config(path, REWARD_FLAG)
            check_room(model, config.data.max_len, flags="--data.max_len", path=path)


def check_policy_learns(config: PPOConfig, num_prompts: int) -> None:
    """Raise ValueError where the critic's warm-up is as long as the run."""
    from openrlhf.trainer.schedule import prompts_of_steps

    steps = len(prompts_of_steps(config, num_prompts))
    if steps <= config.frozen_actor_steps:
        raise ValueError(
            f"--critic.freezing_steps {config.critic.freezing_steps}: the run has {steps} steps, so the "
            "policy would never learn. Use less."
        )


def build_trainer(config, argv, roles, prompts, eval_prompts, tokenizer):
    """The controller with everything it speaks to, at the step it resumes from."""
    from openrlhf.algos.kl import KLController
    from openrlhf.config.parse import to_yaml
    from openrlhf.datasets.sampler import PromptSampler
    from openrlhf.observe.observer import Observer
    from openrlhf.observe.run_folder import RunFolder
    from openrlhf.trainer.checkpoints import CheckpointFolder
    from openrlhf.trainer.ppo import PPOTrainer
    from openrlhf.trainer.schedule import prompts_of_steps
    from openrlhf.utils.text import decode

    others = [f"{config.ckpt.path}/_critic"] if config.uses_critic else []
    checkpoints = CheckpointFolder(f"{config.ckpt.path}/_actor", config.ckpt, others)
    tag = checkpoints.latest() if config.ckpt.load_enable else None
    folder = RunFolder.create(
        config.run_dir,
        config_yaml=to_yaml(config),
        argv=["python", "-m", "openrlhf.cli.train_ppo_ray", *argv],
        resume=tag is not None,
    )
    kl = config.algo.kl
    trainer = PPOTrainer(
        config=config,
        rollout=roles.rollout,
        policy=roles.policy,
        reference=roles.reference,
        teacher=roles.teacher,
        critic=roles.critic,
        prompts=PromptSampler(prompts, seed=config.train.seed, num_episodes=config.train.num_episodes),
        eval_prompts=eval_prompts,
        checkpoints=checkpoints,
        kl=KLController(coef=kl.init_coef, target=kl.target, horizon=kl.horizon),
        total_steps=len(prompts_of_steps(config, len(prompts))),
    )
    if tag is not None:
        trainer.resume(tag)
    trainer.observer = Observer(
        folder,
        config.logger,
        resume_step=None if tag is None else trainer.step,
        decode=partial(decode, tokenizer),
    )
    trainer.observer.start(trainer.total_steps, done=trainer.step)
    trainer.observer.message(
        f"{len(prompts)} prompts, {trainer.total_steps} steps of {config.samples_per_step} samples; "
        f"run folder {folder.path}"
    )
    return trainer


def _columns(config: PPOConfig) -> dict[str, str | None]:
    return {"--data.input_key": config.data.input_key, "--data.label_key": config.label_key}


if __name__ == "__main__":
    main()
