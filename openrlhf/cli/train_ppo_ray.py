"""Reinforcement learning on a Ray cluster: `python -m openrlhf.cli.train_ppo_ray`, or under `ray job
submit`."""

import sys
from collections.abc import Sequence

from openrlhf.cli.publish import publish
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import PPOConfig

TEACHER_FLAG = "--teacher.model_name_or_path"


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    config = parse(PPO, argv).config
    from openrlhf.cli.errors import short_errors

    with short_errors():
        run(config, argv)


def run(config: PPOConfig, argv: Sequence[str] = ()) -> None:
    """Train, and write the policy to `ckpt.output_dir`."""
    check(config)
    import ray

    from openrlhf.cluster.group import FrozenGroup, PolicyGroup
    from openrlhf.cluster.launch import cluster_has_gpus, resource_problems, start_ray
    from openrlhf.cluster.placement import place
    from openrlhf.cluster.rollout import RolloutGroup

    start_ray()
    if problems := resource_problems(config, ray.cluster_resources()):
        raise ValueError("\n".join(problems))
    prompts, eval_prompts, tokenizer = build_prompt_datasets(config)
    on_gpu = cluster_has_gpus()
    placement = place(config, on_gpu)
    rollout = RolloutGroup(config, placement.engines, on_gpu)
    policy = PolicyGroup(config, placement.actor)
    reference = teacher = None
    if placement.reference:
        path = config.actor.model_name_or_path
        reference = FrozenGroup(
            config,
            placement.reference,
            path=path,
            flag="--actor.model_name_or_path",
            offload=config.ref.offload,
        )
    if placement.teacher and (path := config.teacher.model_name_or_path):
        teacher = FrozenGroup(
            config, placement.teacher, path=path, flag=TEACHER_FLAG, offload=config.teacher.offload
        )
    starting = [rollout.start()]
    if config.engines_sleep and on_gpu:
        starting.pop().result()  # engines size their cache by the memory that is free, so they come first
        rollout.residency.rest()
    starting.append(policy.start(num_optimizer_steps_of_run(config, len(prompts))))
    starting += [model.start() for model in (reference, teacher) if model]
    for model in starting:
        model.result()
    rollout.connect(policy)
    trainer = build_trainer(
        config, argv, rollout, policy, reference, teacher, prompts, eval_prompts, tokenizer
    )
    rollout.on_finished = lambda group: trainer.observer.advance(len(group))
    try:
        trainer.fit()
        policy.export(config.ckpt.output_dir).result()
    finally:
        trainer.observer.close()
    publish(config, PPO, base_model=config.actor.model_name_or_path, datasets=config.data.prompt_dataset)
    rollout.close()
    ray.shutdown()


def check(config: PPOConfig) -> None:
    """Everything that can be wrong with files, before anything is loaded or started."""
    from openrlhf.datasets.sources import check_columns
    from openrlhf.models.loading import check_model
    from openrlhf.rollout.reward_function import check_reward_file

    check_model(config.actor.model_name_or_path, "--actor.model_name_or_path")
    if config.teacher.model_name_or_path:
        check_model(config.teacher.model_name_or_path, TEACHER_FLAG)
    if config.reward.function_path:
        check_reward_file(config.reward.function_path, "--reward.remote_url")
    data, columns = config.data, _columns(config)
    check_columns(
        data.prompt_dataset, flag="--data.prompt_dataset", required_columns=columns, split=data.prompt_split
    )
    if config.eval.dataset:
        check_columns(
            config.eval.dataset, flag="--eval.dataset", required_columns=columns, split=config.eval.split
        )


def build_prompt_datasets(config: PPOConfig):
    """(training prompts, list of evaluation prompts, tokenizer)"""
    from openrlhf.datasets.prompts import build_prompts
    from openrlhf.datasets.sources import load_rows
    from openrlhf.models.loading import check_same_vocabulary, load_tokenizer

    data, evaluation = config.data, config.eval
    tokenizer = load_tokenizer(
        config.actor.model_name_or_path,
        flag="--actor.model_name_or_path",
        use_fast=not data.disable_fast_tokenizer,
        chat_template=data.tokenizer_chat_template,
    )

    def build(spec: str, flag: str, split: str, probs: str | None, max_samples: int | None):
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
            label_key=data.label_key,
            apply_chat_template=data.apply_chat_template,
            input_template=data.input_template,
            max_len=data.max_len,
            bad_rows=data.bad_rows,
        )

    if path := config.teacher.model_name_or_path:
        check_same_vocabulary(tokenizer, load_tokenizer(path, flag=TEACHER_FLAG), TEACHER_FLAG, path)
    prompts = build(
        data.prompt_dataset, "--data.prompt_dataset", data.prompt_split, data.prompt_probs, data.max_samples
    )
    if not evaluation.dataset:
        return prompts, [], tokenizer
    held_out = build(evaluation.dataset, "--eval.dataset", evaluation.split, None, evaluation.max_samples)
    return prompts, list(held_out), tokenizer


def num_rl_steps(config: PPOConfig, num_prompts: int) -> int:
    """An episode's last step takes the prompts that are left."""
    steps = -(-num_prompts // config.rollout.batch_size) * config.train.num_episodes
    return min(steps, config.train.max_steps or steps)


def num_optimizer_steps_of_run(config: PPOConfig, num_prompts: int) -> int:
    """What the learning rate schedule spans."""
    return num_rl_steps(config, num_prompts) * config.updates_per_step


def build_trainer(config, argv, rollout, policy, reference, teacher, prompts, eval_prompts, tokenizer):
    """The controller with everything it speaks to, at the step it resumes from."""
    from openrlhf.algos.kl import KLController
    from openrlhf.config.parse import to_yaml
    from openrlhf.datasets.sampler import PromptSampler
    from openrlhf.observe.observer import Observer
    from openrlhf.observe.run_folder import RunFolder
    from openrlhf.trainer.checkpoints import CheckpointFolder
    from openrlhf.trainer.ppo import PPOTrainer

    checkpoints = CheckpointFolder(f"{config.ckpt.path}/_actor", config.ckpt)
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
        rollout=rollout,
        policy=policy,
        reference=reference,
        teacher=teacher,
        prompts=PromptSampler(prompts, seed=config.train.seed, num_episodes=config.train.num_episodes),
        eval_prompts=eval_prompts,
        checkpoints=checkpoints,
        kl=KLController(coef=kl.init_coef, target=kl.target, horizon=kl.horizon),
        total_steps=num_rl_steps(config, len(prompts)),
    )
    if tag is not None:
        trainer.resume(tag)
    trainer.observer = Observer(
        folder, config.logger, resume_step=None if tag is None else trainer.step, decode=tokenizer.decode
    )
    trainer.observer.start(trainer.total_steps, done=trainer.step)
    trainer.observer.message(
        f"{len(prompts)} prompts, {trainer.total_steps} steps of {config.samples_per_step} samples; "
        f"run folder {folder.path}"
    )
    return trainer


def _columns(config: PPOConfig) -> dict[str, str | None]:
    return {"--data.input_key": config.data.input_key, "--data.label_key": config.data.label_key}


if __name__ == "__main__":
    main()
