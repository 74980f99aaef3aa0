"""A run of `openrlhf ppo`: its set-up on a Ray cluster, training, and its end."""

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from openrlhf import heap
from openrlhf.algorithms.kl import KLController
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.fork import find_or_fork
from openrlhf.checkpoint.of_models import build_run_fingerprint, check_space
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.checkpoint.start import (
    check_places,
    choose_checkpoint,
    find_grace,
    find_start_day,
    lock_folders,
    move_old_checkpoints,
    position,
)
from openrlhf.cluster.disks import check_disks
from openrlhf.cluster.launch import check_resources, naming_logs, start_ray, stop_ray
from openrlhf.cluster.layout import Layout
from openrlhf.cluster.placement import Bundles, place, placement_table
from openrlhf.cluster.process_exits import explaining_exits, is_lost_process, logs_folder
from openrlhf.cluster.rank_groups import PolicyRanks
from openrlhf.cluster.roles import Roles, start_roles
from openrlhf.cluster.watchdog import guard
from openrlhf.config.ppo import ACTOR_FLAG, CRITIC_FLAG, REWARD_FLAG, TEACHER_FLAG, PPOConfig
from openrlhf.config.ppo_command import PPO
from openrlhf.data.sources import rows_digest
from openrlhf.errors import (
    EXIT_FAILURE,
    ErrorCode,
    RunError,
    catch_signals,
    counted,
    describe,
    notify,
    noting_position,
)
from openrlhf.loop.rl import PPOTrainer
from openrlhf.loop.rl_checks import check_policy_learns
from openrlhf.observability.hooks.load import attached, build_hooks
from openrlhf.observability.hooks.memory import PhaseMemory
from openrlhf.observability.observer import Observer
from openrlhf.observability.rollout_metrics import RolloutMetrics
from openrlhf.observability.startup import StartClock
from openrlhf.observability.waits import waiting
from openrlhf.plugins import digest
from openrlhf.text import Calendar, decode
from openrlhf.training.publish import publish
from openrlhf.training.rl_data import (
    PRETRAIN_FLAG,
    RLData,
    build_data,
    build_sampler,
    data_notes,
    missing_template,
)
from openrlhf.training.saving import restore
from openrlhf.training.schedule import num_updates, prompts_of_steps
from openrlhf.user_file import split


def run(config: PPOConfig, argv: Sequence[str] = (), clock: StartClock | None = None) -> None:
    """Trains, and writes the policy to `ckpt.output_dir`. `clock`: clock that started with the run."""
    RLRun(config, argv, clock or StartClock()).run()


class RLRun:
    """A run on a Ray cluster: its places there, its data, checkpoints and processes."""

    layout: Layout
    places: Mapping[str, Bundles]
    """The GPUs of each role, which are reserved."""
    data: RLData
    checkpoints: CheckpointFolder
    tag: str | None
    """The checkpoint to resume from; None: the run begins."""

    def __init__(self, config: PPOConfig, argv: Sequence[str], clock: StartClock) -> None:
        self.config, self.argv, self.clock = config, argv, clock

    def run(self) -> None:
        """Joins or starts the cluster, and leaves it when the run has ended."""
        config = self.config
        check_places(config)
        with waiting("starting Ray"), self.clock.stage("Ray"):
            start_ray([config.train.backend, config.rollout.engine])
        catch_signals()  # again: Ray has replaced the handlers
        try:
            self.layout = check_resources(config)
            with naming_logs(), ExitStack() as held:
                self.prepare(held)
                self.train()
        finally:
            stop_ray()
        if config.exports:
            policy, prompts = config.actor.model_name_or_path, config.data.prompt_dataset
            publish(config, PPO, base_model=policy, datasets=prompts)

    def prepare(self, held: ExitStack) -> None:
        """Reserves GPUs, reads the data and selects the checkpoint to resume from. Locks the run's folders
        until `held` is closed."""
        config = self.config
        self.places = place(config, self.layout)
        check_disks(config, self.places)
        with self.clock.stage("data"):
            Calendar.today = find_start_day(config)
            self.data = build_data(config)
        num_prompts = len(self.data.prompts)
        check_policy_learns(config, num_prompts)
        fingerprint = _run_fingerprint(config, self.data) if config.ckpt.is_used else None
        self.checkpoints = CheckpointFolder.of(config, fingerprint)
        lock_folders(self.checkpoints, config.run_dir, held)
        total_steps = len(prompts_of_steps(config, num_prompts))
        check_space(config, self.checkpoints, total_steps)
        found = find_or_fork(config, self.checkpoints, total_steps)
        self.tag = choose_checkpoint(config, self.checkpoints, found)

    def train(self) -> None:
        """Starts the run's processes on the reserved resources, trains, exports the models and ends the
        processes."""
        heap.freeze()
        heap.keep()
        config, prompts = self.config, len(self.data.prompts)
        texts = self.data.texts if config.learns else None
        updates = num_updates(config, prompts, config.frozen_actor_steps), num_updates(config, prompts)
        roles = start_roles(config, self.places, self.layout.on_gpu, *updates, texts, self.clock)
        ended = threading.Event()
        try:
            if table := placement_table(roles.processes, self.places):
                print(table, file=sys.stderr, flush=True)
            trainer = build_trainer(config, self.argv, roles, self.data, self.checkpoints, self.tag)
            if config.learns:
                groups = {"actor": roles.policy, "critic": roles.critic}
                needs = [f"{role} {group.memory_of_rows()}" for role, group in groups.items() if group]
                trainer.observer.message(f"estimated memory of a rank: {'; '.join(needs)}")
            trainer.observer.started(self.clock)
            watchdog = roles.watchdog(config)
            watchdog.start()
            guard(partial(end_without_head, trainer), ended)
            try:
                with (
                    noting_position(partial(position, trainer)),
                    trainer.stop.deferred(find_grace(config), is_lost_process),
                    explaining_exits(lambda: roles.members),
                ):
                    trainer.fit()
                    if config.exports:
                        self.export(trainer, roles)
            finally:
                watchdog.close()
                trainer.observer.close()
        finally:
            try:
                roles.end()  # without a head, it would wait for a minute
            finally:
                ended.set()

    def export(self, trainer: PPOTrainer[PolicyRanks], roles: Roles) -> None:
        with trainer.observer.phase("save the model"):
            roles.policy.export(self.config.ckpt.output_dir).result()  # bounded: by watchdog.py
            if roles.critic and self.config.critic.save_value_network:
                roles.critic.export(self.config.critic_output_dir).result()  # bounded: likewise


def end_without_head(trainer: PPOTrainer[PolicyRanks], address: str) -> None:
    """Ends this process with a message, because Ray's head at this address is gone and calls to Ray would
    never return. Does nothing after a signal to the process group, by which the run ends."""
    if trainer.stop.is_requested:
        return
    text = (
        f"Ray's process gcs_server at {address} was killed (out of memory?) or crashed.\n"
        f"Its log is {logs_folder()}/gcs_server.out. Start a cluster of `ray start` again."
    )
    notify(f"error: {describe(RunError(ErrorCode.CLUSTER, text))}\n{position(trainer, False)}")
    os._exit(EXIT_FAILURE)


def _run_fingerprint(config: PPOConfig, data: RLData) -> RunFingerprint:
    models: dict[str, Sequence[str]] = {ACTOR_FLAG: [config.actor.model_name_or_path]}
    if config.uses_critic:
        models[CRITIC_FLAG] = [config.critic_path]
    if path := config.teacher.model_name_or_path:
        models[TEACHER_FLAG] = [path]
    if config.uses_reward_model:
        models[REWARD_FLAG] = config.reward.models
    more = {"--data.prompt_dataset": f"{len(data.prompts)} prompts (checksum {data.prompts.digest()[:16]})"}
    if texts := config.data.pretrain_dataset:
        checksum = rows_digest(texts, flag=PRETRAIN_FLAG, split=config.data.pretrain_split)
        more[PRETRAIN_FLAG] = f"checksum {checksum[:16]}"
    more["--tasks"] = ", ".join(sorted(config.tasks)) or "none"
    users = config.reward_functions | config.agents
    more |= {f"--{key}": f"checksum {digest(name)}" for key, name in users.items()}
    more |= {
        f"--{key}": f"checksum {digest(name)} of {split(name)[1]}" for key, name in config.references.items()
    }
    return build_run_fingerprint(config, PPO, models, more)


def build_trainer(
    config: PPOConfig,
    argv: Sequence[str],
    roles: Roles,
    data: RLData,
    checkpoints: CheckpointFolder,
    tag: str | None,
) -> PPOTrainer[PolicyRanks]:
    """Builds the trainer with its roles, data and observer. Loads the checkpoint `tag` if it is given."""
    move_old_checkpoints(checkpoints, tag)
    restored = None
    if tag is not None:
        with waiting("loading the checkpoint", key=config.actor.model_name_or_path):
            restored = restore(tag, roles.policy, roles.critic)
    done = 0 if restored is None else restored["step"]
    observer = Observer.opened(
        config,
        ["-m", "openrlhf.cli.train_ppo_ray", *argv],
        resume_step=None if restored is None else done,
        forks=checkpoints.changed is not None,
        fork=checkpoints.fork,
        decode=partial(decode, data.tokenizer),
        dtype=config.ds.param_dtype,
        missing_template=missing_template(config, data.tokenizer, data.prompts),
    )
    prompts = build_sampler(config, data.prompts)
    kl, steps = config.algo.kl, prompts_of_steps(config, len(data.prompts))
    total_steps, samples = len(steps), max(steps) * config.rollout.n_samples_per_prompt
    trainer = PPOTrainer(
        config=config,
        rollout=roles.rollout,
        policy=roles.policy,
        reference=roles.reference,
        teacher=roles.teacher,
        critic=roles.critic,
        prompts=prompts,
        eval_prompts=data.eval_prompts,
        checkpoints=checkpoints,
        kl=KLController(coef=kl.init_coef, target=kl.target, horizon=kl.horizon),
        total_steps=total_steps,
        observer=observer,
        hooks=[
            *attached("rl", config, prompts=prompts),
            PhaseMemory(take=roles.peak_memory),
            RolloutMetrics(),
            observer,
            *build_hooks(config.train.hooks),
        ],
        restored=restored,
    )
    observer.start(total_steps, done=done)
    repeated = f" ({count} repeat an earlier one)" if (count := data.prompts.num_repeated()) else ""
    observer.message(
        f"{counted(len(data.prompts), 'prompt')}{repeated}, {counted(total_steps, 'step')} of "
        f"{counted(samples, 'sample')}; run folder {config.run_dir}"
    )
    for note in data_notes(config, len(data.prompts), data.prompts, data.eval_prompts):
        observer.message(f"note: {note}")
    return trainer
