"""Reinforcement learning on a Ray cluster: `python -m openrlhf.cli.train_ppo_ray`, or under `ray job
submit`."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from openrlhf.cli.errors import catch_signals, short_errors, telling
from openrlhf.cli.publish import publish
from openrlhf.cli.start import begin, make_room, origin_of, position
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, REWARD_FLAG, TEACHER_FLAG, PPOConfig


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    config = parse(PPO, argv).config
    with short_errors():
        catch_signals()
        run(config, argv)


def run(config: PPOConfig, argv: Sequence[str] = ()) -> None:
    """Train, and write the policy to `ckpt.output_dir`."""
    check(config)
    import ray

    from openrlhf.cluster.launch import cluster_has_gpus, resource_problems, start_ray

    start_ray()
    catch_signals()  # Ray has put a handler of its own in the place of ours
    try:
        if problems := resource_problems(config, ray.cluster_resources()):
            raise ValueError("\n".join(problems))
        check_engines(config, on_cpu=not cluster_has_gpus())
        prompts, eval_prompts, tokenizer = build_prompt_datasets(config)
        check_policy_learns(config, len(prompts))
        texts = build_pretrain_texts(config, tokenizer, len(prompts))
        with ExitStack() as held:
            checkpoints = checkpoints_of(config, prompts, texts)
            tag = begin(config, checkpoints, held)
            train(config, argv, prompts, eval_prompts, texts, tokenizer, checkpoints, tag)
    finally:
        ray.shutdown()


def train(config: PPOConfig, argv, prompts, eval_prompts, texts, tokenizer, checkpoints, tag) -> None:
    """With a cluster that has room: every process of the run starts, works and ends here."""
    from openrlhf.cluster.deaths import naming_the_dead
    from openrlhf.cluster.launch import cluster_has_gpus
    from openrlhf.cluster.roles import start_roles

    with naming_the_dead():
        roles = start_roles(config, cluster_has_gpus(), len(prompts), texts)
    try:
        trainer = build_trainer(config, argv, roles, prompts, eval_prompts, tokenizer, checkpoints, tag)
        roles.rollout.on_finished = lambda group: trainer.observer.advance(len(group))
        try:
            with telling(lambda: position(trainer)), naming_the_dead(roles.members):
                trainer.fit()
                roles.policy.export(config.ckpt.output_dir).result()
                if roles.critic and config.critic.save_value_network:
                    roles.critic.export(f"{config.ckpt.output_dir}_critic").result()
        finally:
            trainer.observer.close()
    finally:
        roles.end()
    publish(config, PPO, base_model=config.actor.model_name_or_path, datasets=config.data.prompt_dataset)


def check(config: PPOConfig) -> None:
    """Everything that can be wrong with files, before anything is loaded or started."""
    check_data(config)
    from openrlhf.models.experts import check_experts
    from openrlhf.models.loading import check_model, check_room, load_config
    from openrlhf.models.scorer import check_reward_model, score_statistics
    from openrlhf.rollout.reward_function import check_reward_file

    trained = {ACTOR_FLAG: config.actor.model_name_or_path}
    if config.uses_critic:
        trained[CRITIC_FLAG] = config.critic_path
    for flag, path in trained.items():
        check_room(load_config(path, flag), config.data.max_len, flags="--data.max_len", path=path)
    check_engines(config)
    if config.actor.aux_loss_coef:
        check_experts(config.actor.model_name_or_path, ACTOR_FLAG, "--actor.aux_loss_coef")
    if config.teacher.model_name_or_path:
        check_model(config.teacher.model_name_or_path, TEACHER_FLAG)
    if config.uses_critic and config.critic_aux_loss_coef:
        check_experts(config.critic_path, CRITIC_FLAG, "--critic.aux_loss_coef")
    for path in config.reward.models:
        check_reward_model(path, REWARD_FLAG, config.ds.value_head_prefix)
        if config.reward.normalize_enable:
            score_statistics(load_config(path, REWARD_FLAG), path)
    path = config.reward.function_path  # the last, because users' imports take longest
    if path and (remark := check_reward_file(path, "--reward.remote_url")):
        print(f"note: {remark}", file=sys.stderr, flush=True)


def check_engines(config: PPOConfig, *, on_cpu: bool = False) -> None:
    """Raise ValueError where vLLM would refuse the policy; `on_cpu` once it is known that no engine has a
    GPU."""
    from openrlhf.engine.vllm_support import check_vllm_runs
    from openrlhf.models.loading import load_config

    path = config.actor.model_name_or_path
    check_vllm_runs(
        load_config(path, ACTOR_FLAG),
        flag=ACTOR_FLAG,
        path=path,
        dtype=config.ds.param_dtype,
        on_cpu=on_cpu,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
    )


def check_data(config: PPOConfig) -> None:
    """Without transformers, whose import takes longer than all of this."""
    from openrlhf.datasets.sources import check_columns

    data, evaluation = config.data, config.eval
    check = partial(check_columns, required_columns=_columns(config), bad_rows=data.broken_rows)
    check(data.prompt_dataset, flag="--data.prompt_dataset", split=data.prompt_split)
    if evaluation.dataset:
        check(evaluation.dataset, flag="--eval.dataset", split=evaluation.split)
    if data.pretrain_dataset:
        own = {"required_columns": _pretrain_column(config), "split": data.pretrain_split}
        check(data.pretrain_dataset, flag=PRETRAIN_FLAG, **own)


def build_pretrain_texts(config: PPOConfig, tokenizer, num_prompts: int):
    """As many texts as the run's optimizer steps take; None without data.pretrain_dataset."""
    from openrlhf.datasets.sft import build_sft_samples
    from openrlhf.datasets.sources import load_rows
    from openrlhf.trainer.schedule import num_updates

    data, train, column = config.data, config.train, _pretrain_column(config)
    if data.pretrain_dataset is None:
        return None
    rows = load_rows(
        data.pretrain_dataset,
        flag=PRETRAIN_FLAG,
        required_columns=column,
        probs=data.pretrain_probs,
        split=data.pretrain_split,
        max_samples=train.batch_size * num_updates(config, num_prompts, config.frozen_actor_steps),
        seed=train.seed,
        bad_rows=data.broken_rows,
    )
    (input_key,) = column.values()
    return build_sft_samples(
        rows,
        tokenizer,
        input_key=input_key,
        output_key=None,
        apply_chat_template=False,
        input_template=None,
        multiturn=False,
        pretrain=True,
        max_len=data.max_len,
        bad_rows=data.broken_rows,
    )


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
            bad_rows=data.broken_rows,
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
        num_rows += len(held_out) + held_out.dropped.total()
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


def checkpoints_of(config: PPOConfig, prompts, texts):
    """Those of the policy, and of the critic where there is one; with what this run's are of."""
    from openrlhf.trainer.checkpoints import CheckpointFolder

    ckpt = config.ckpt
    others = [f"{ckpt.folder}/_critic"] if config.uses_critic else []
    origin = _origin(config, prompts, texts) if ckpt.is_used else None
    return CheckpointFolder(f"{ckpt.folder}/_actor", ckpt, others, origin)


def _origin(config: PPOConfig, prompts, texts):
    from pathlib import Path

    from openrlhf.datasets.cache import arrays_digest, file_digest

    models: dict[str, Sequence[str]] = {ACTOR_FLAG: [config.actor.model_name_or_path]}
    if config.uses_critic:
        models[CRITIC_FLAG] = [config.critic_path]
    if path := config.teacher.model_name_or_path:
        models[TEACHER_FLAG] = [path]
    if config.uses_reward_model:
        models[REWARD_FLAG] = config.reward.models
    more = {"--data.prompt_dataset": f"{len(prompts)} prompts (checksum {prompts.digest()[:16]})"}
    if texts is not None:
        more[PRETRAIN_FLAG] = f"{len(texts)} texts (checksum {arrays_digest(texts.arrays())[:16]})"
    if path := config.reward.function_path:
        more["--reward.remote_url"] = f"checksum {file_digest(Path(path))[:16]}"
    if config.ds.zero_stage > 0:  # each rank has a part of the optimizer's state
        for role in ("actor", "critic"):
            if role in config.homes:
                more[f"the number of the {role}'s ranks"] = str(config.homes[role].num_workers)
    return origin_of(config, PPO, models, more)


def build_trainer(config, argv, roles, prompts, eval_prompts, tokenizer, checkpoints, tag):
    """The controller with everything it speaks to, at the step it resumes from."""
    from openrlhf.algos.kl import KLController
    from openrlhf.config.parse import to_yaml
    from openrlhf.datasets.sampler import PromptSampler
    from openrlhf.observe.observer import Observer
    from openrlhf.observe.run_folder import RunFolder
    from openrlhf.trainer.ppo import PPOTrainer
    from openrlhf.trainer.schedule import prompts_of_steps
    from openrlhf.utils.text import decode

    make_room(config, checkpoints, tag)
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


PRETRAIN_FLAG = "--data.pretrain_dataset"


def _pretrain_column(config: PPOConfig) -> dict[str, str]:
    """The flag of the texts' column, and the column."""
    own = config.data.pretrain_key
    return {"--data.input_key": config.data.input_key} if own is None else {"--data.pretrain_key": own}


def _columns(config: PPOConfig) -> dict[str, str | None]:
    return {"--data.input_key": config.data.input_key, "--data.label_key": config.label_key}


if __name__ == "__main__":
    main()
