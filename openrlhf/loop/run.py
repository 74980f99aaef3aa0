"""A run whose loop is the user's program: its verbs sample, score, train, sync, save and log.

    with rl.Run(actor="model", lr=1e-6) as run:
        for prompts in run.prompts("problems.jsonl", batch_size=16):
            groups = run.reward(run.sample(prompts, n=8), reward)
            run.forward_backward(run.batch(groups))
            metrics = run.optim_step()
            run.sync()
            run.log(metrics, groups)

Each verb returns a `Result` at once, and takes results in the place of values. Sampling, rewards and
evaluation work on one lane, the models on another, each in the order of submission; `sync` waits for both.
"""

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.advantages import ESTIMATORS, AdvantageEstimator
from openrlhf.algorithms.kl import KLController
from openrlhf.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from openrlhf.backends.distributed import leave_distributed
from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.start import check_export, check_places, find_grace
from openrlhf.config.checks import folder_problem
from openrlhf.config.fields import flag_values, with_values
from openrlhf.config.ppo_checks import SAME_ANSWER, log_prob_needs, sampler_readers
from openrlhf.config.sections import is_due
from openrlhf.data.prompt_sampler import PromptSampler
from openrlhf.errors import ErrorCode, UsageError, notify, notify_once
from openrlhf.hub import choose_hub
from openrlhf.loop.known_prompts import KnownPrompts
from openrlhf.loop.lanes import Lanes, Result, wait_for_value
from openrlhf.loop.local import start_local_roles, start_local_rollout
from openrlhf.loop.origins import Origins
from openrlhf.loop.restarts import own_program, restart_after
from openrlhf.loop.scoring import scored
from openrlhf.loop.settings import Placement, read_settings
from openrlhf.loop.verb_arguments import (
    as_advantages,
    as_batch,
    check_choice,
    check_function,
    compute_loss,
    flag_value,
    groups_of,
    list_of,
    read_metrics,
    whole,
)
from openrlhf.models.tokenizers import load_run_tokenizer
from openrlhf.observability.hooks.base import Evaluation, Hook, Step, announce
from openrlhf.observability.hooks.load import build_hooks, check_hooks
from openrlhf.observability.lock import locked
from openrlhf.observability.observer import Observer
from openrlhf.observability.rollout_metrics import RolloutMetrics
from openrlhf.rewards.process import TAKES, RewardFunc
from openrlhf.rollout.given import given_answer
from openrlhf.stopping import EXIT_STOPPED, Stop
from openrlhf.text import decode
from openrlhf.training.advantages import advantage_arguments, compute_advantages
from openrlhf.training.collect import check_failures, check_stops, num_samples, sample_all
from openrlhf.training.evaluate import evaluation_metrics
from openrlhf.training.objectives.policy import GivenGradient
from openrlhf.training.outputs import begin_forward, with_outputs
from openrlhf.training.rl_data import TEMPLATE, USE_TEMPLATE, missing_template, read_prompts
from openrlhf.training.saving import SavedRanks, Saver, restore
from openrlhf.training.schedule import build_schedule, mean_metrics, trained_on
from openrlhf.types import Batch, Metrics, Prompt, PromptGroup, Purpose, Trajectory
from openrlhf.user_file import is_importing

# bounded .result(): each call in this process ends.

Prompts = Sequence[Prompt | str]
Groups = Sequence[PromptGroup] | Result[list[PromptGroup]]
LossFunction = Callable[[Tensor, Batch], Tensor | tuple[Tensor, Mapping[str, Any]]]
"""A function (log_probs, batch) -> (loss, metrics) of a whole batch, or -> loss. `log_probs` (A,): those of
the policy for each action, through which gradients flow."""
STEPS = 1 << 30
"""Length of the schedule of a loop of unknown length, whose learning rate is constant."""
UNSYNCED = 3
"""Steps after the last sync from which on a loop that trains and samples is told."""
_local: set[int] = set()
"""Ids of the runs in this process, which share its process group."""


class Run:
    """Models and engines, in this process or on a cluster, and the verbs that work with them."""

    def __init__(
        self,
        config: str | os.PathLike | Mapping[str, Any] | None = None,
        *,
        steps: int | None = None,
        placement: Placement = "local",
        **flags: Any,
    ) -> None:
        """Loads the models and starts the engine.

        config: a YAML file, or a dict, with flags of `openrlhf ppo`, dotted or nested. `flags` override it,
            such as `**{"rollout.temperature": 0.7}`; `actor` is the policy's model, `lr` its learning rate.
        steps: number of optimizer steps of the whole loop, for the schedule of the learning rate; later steps
            keep the last rate. None: the learning rate is constant.
        placement: `local`: everything is in this process. Unless flags say otherwise, the engine is that of
            transformers and the training backend that of torch: both start in seconds. `ray`: engines and
            models are processes of a Ray cluster, with the defaults of `openrlhf ppo`.

        Raises UsageError that lists all problems of the flags.
        """
        if is_importing():  # this run would import the program again, without an end
            text = 'a run begins when the file is imported; put it under `if __name__ == "__main__":`'
            raise UsageError(ErrorCode.USER_CODE, text)
        steps = steps if steps is None else whole("steps", steps)
        invocation = read_settings(config, flags, steps=steps, placement=placement)
        self.config, self._explicit = invocation.config, invocation.explicit
        choose_hub(self.config.use_ms)
        check_places(self.config)
        self.tokenizer = load_run_tokenizer(self.config)
        check_hooks(self.config.train.hooks, verify_steps=0)
        self._hooks = build_hooks(self.config.train.hooks)
        with ExitStack() as held:
            self._start(placement, STEPS if steps is None else steps, held)
            self._held = held.pop_all()
        """Engines and models, locks of the folders in which the run writes, and the handlers of signals."""
        kl = self.config.algo.kl
        self.kl = KLController(coef=kl.init_coef, target=kl.target, horizon=kl.horizon)
        self.version = 0
        """Version of the engine's weights: the number of syncs."""
        self.step = 0
        """Number of logged steps."""
        self.state: dict[str, Any] = {}
        """The loop's own numbers and texts, which each checkpoint has and `load_state` restores."""
        self._stop = Stop()
        self._is_closed = False
        self._known = KnownPrompts(self.config, self.tokenizer)
        self._num_epochs = 0
        """Number of epochs of the calls of `prompts`."""
        self._num_changes = 0
        """Number of changes of the policy."""
        self._origins = Origins()
        self._trained_version: int | None = None
        """Version of the weights that the last batch of the step trains; None without one."""
        self._is_scored = self.config.has_rewards or bool(self.config.tasks)
        """True if a function of the flags or of the loop scores samples."""
        self._has_gradient = False
        """True if `forward_backward` was called since the last `optim_step`."""
        self._synced_at, self._is_synced = 0, True
        """The step of the last sync, and whether the policy has not changed since."""
        self._owned: set[str] = set()
        """Folders with models that this run has exported."""
        self._continues = False
        """True if a checkpoint was loaded."""
        self._may_continue = False
        """True if the loop has asked for a checkpoint."""
        self._measured: deque[tuple[int, Metrics]] = deque()
        """Metrics since the last `log`, with their weights: the numbers of samples of batches."""
        self._began = time.monotonic()
        """When the first step began: `log` creates the observer only at its end."""
        atexit.register(self._close_late)

    def _start(self, placement: Placement, steps: int, held: ExitStack) -> None:
        """Starts engines and models, which end with `held`."""
        if placement == "ray":
            from openrlhf.loop.placed import PlacedRoles  # imports Ray

            placed = PlacedRoles(self.config, steps)
            held.callback(placed.close)
            self._roles: Any = placed.roles
            self._rollout: Any = placed.roles.rollout
            self._lanes = Lanes(share=self.config.engines_colocated, around=placed.explaining)
            with placed.explaining():
                self._rollout.sync(self._roles.policy, 0).result()  # engines start without weights
        else:
            _local.add(id(self))
            held.callback(self._leave)
            self._roles = start_local_roles(self.config, steps, steps)
            self._rollout = start_local_rollout(self.config)  # vLLM takes of the GPU what the models leave
            held.callback(self._rollout.close)
            self._lanes = Lanes()

    def _leave(self) -> None:
        _local.discard(id(self))
        if not _local:
            leave_distributed()

    def __enter__(self) -> Self:
        self._lanes.check()
        if threading.current_thread() is threading.main_thread():  # others cannot hear signals
            self._held.enter_context(self._stop.deferred(find_grace(self.config)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel=kind is not None)
        if isinstance(error, Exception):
            most = self.config.train.max_restarts
            restart_after(error, most, own_program(), resumes=self._may_continue)

    def close(self, *, cancel: bool = False) -> None:
        """Finishes the submitted work, writes the report and frees models and engine. `cancel`: leave out
        work that has not begun. Raises the first error of work whose result nobody has read. A second call
        does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_late)
        with self._held:
            self._lanes.close(cancel=cancel)
            if "_saver" in vars(self) and not cancel:
                self._saver.finish()
            if "_observer" in vars(self):
                self._observer.close()
        if not cancel:
            self._lanes.raise_unread()

    def _close_late(self) -> None:
        """Closes a run at the end of a program that did not: work in threads can no longer begin."""
        notify("note: run.close() was never called: unfinished work is lost; use `with rl.Run(...)`")
        self.close()

    # Prompts and samples

    def prompts(
        self, source: Any, *, batch_size: int | None = None, epochs: int = 1
    ) -> Iterator[list[Prompt]]:
        """Yields the prompts of a file, folder or hub dataset, of a `datasets.Dataset` or `pandas.DataFrame`,
        or of a list of rows (dicts, texts or lists of messages), in batches, shuffled anew in each epoch.
        `batch_size`: None: all prompts of an epoch. The flags `data.*` name the columns and the template.
        After `load_state`, `itertools.islice(run.prompts(...), run.step, None)` leaves out those of the steps
        that are done."""
        epochs = whole("epochs", epochs)
        size = None if batch_size is None else whole("batch_size", batch_size)
        prompts = read_prompts(self.config, source, self.tokenizer)
        if missing := missing_template(self.config, self.tokenizer, prompts):
            notify(f"note: {TEMPLATE}: {missing}; {USE_TEMPLATE}")
        sampler = PromptSampler(prompts, seed=self.config.train.seed, num_epochs=epochs)
        before, self._num_epochs = self._num_epochs, self._num_epochs + epochs
        while batch := sampler.next_batch(size or len(prompts)):
            yield [replace(prompt, epoch=before + prompt.epoch) for prompt in batch]

    def sample(
        self, prompts: Prompts | Result, *, n: int | None = None, max_new_tokens: int | None = None
    ) -> Result[list[PromptGroup]]:
        """Samples `n` answers of at most `max_new_tokens` to each prompt (None: those of the flags
        `rollout.*`) at the flags' temperature. A text is a prompt as the policy reads it. Groups come in the
        order of the prompts, with the rewards of the flags if there are any. The seeds of a prompt follow
        from its number and epoch, so that the same weights give it the same answers again."""
        flags = self._sampling("rollout", n, max_new_tokens=max_new_tokens)
        return self._lanes.on("engines", self._sample, prompts, "train", flags)

    def given(self, prompts: Prompts, answers: Sequence[str]) -> list[PromptGroup]:
        """Returns groups whose only sample is the given answer, with the token that ends it, in place of one
        of the policy: for supervised losses. Nothing sampled it, so its `rollout_log_probs` are NaN, and its
        reward is 0."""
        data = self.config.data
        about = {"is_chat": data.apply_chat_template, "max_len": data.max_len, "version": self.version}
        known, answers = self._known.of(prompts), list_of(str, answers, "texts, one for each prompt")
        if len(known) != len(answers):
            raise UsageError(ErrorCode.INVALID_VALUE, f"{len(known)} prompts and {len(answers)} answers")
        given = [
            given_answer(self.tokenizer, prompt, answer, **about)
            for prompt, answer in zip(known, answers, strict=True)
        ]
        return [PromptGroup(prompt=t.prompt, trajectories=[t]) for t in given]

    def reward(self, groups: Groups, reward: RewardFunc) -> Result[list[PromptGroup]]:
        """Sets the rewards of all samples by one call `reward(queries, prompts, labels)`, in the order of the
        groups, in a thread of this process. It returns what a reward file returns: a number for each sample,
        or a dict with more. If it is `async`, each call has an event loop of its own. Errors of the function
        are raised: a loop that goes on without rewards would train on nothing."""
        check_function(reward, "reward", *TAKES)
        self._is_scored = True
        return self._lanes.on("engines", self._reward, groups, reward)

    def evaluate(
        self,
        prompts: Prompts | Result,
        reward: RewardFunc | None = None,
        *,
        n: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        max_new_tokens: int | None = None,
    ) -> Result[Metrics]:
        """Samples `n` answers to each prompt, and returns the metrics `eval/...` of their scores. `reward`:
        None: the rewards of the flags. `n` to `max_new_tokens`: None: those of the flags `eval.*`."""
        flags = self._sampling("eval", n, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens)
        if flags["eval.n_samples_per_prompt"] > 1 and flags["eval.temperature"] == 0:
            text = f"{SAME_ANSWER}; evaluate with n=1, or with a temperature above 0"
            raise UsageError(ErrorCode.CONFLICT, text, flag="--eval.temperature", value=0.0)
        if reward is not None:
            check_function(reward, "reward", *TAKES)
        elif not (self.config.has_rewards or self.config.tasks):
            text = "nothing scores the samples; pass a reward function, or set the flag"
            raise UsageError(ErrorCode.MISSING_FLAG, text, flag="--reward.remote_url")

        def work(prompts: Prompts, step: int) -> Metrics:
            groups = self._sample(prompts, "eval", flags)
            samples = _some(groups if reward is None else self._reward(groups, reward))
            metrics, about = evaluation_metrics(samples), {"step": step, "version": self.version}
            announce(self._hooks, Hook.evaluated, Evaluation(**about, samples=samples, metrics=metrics))
            return metrics

        return self._lanes.on("engines", work, prompts, self.step)

    def sync(self) -> Result[int]:
        """Sends the policy's weights to the engine, and checks that it computes with them. Returns the
        version of the weights."""
        return self._lanes.on_both(self._sync, self.step + 1)

    # Training

    def batch(
        self,
        groups: Groups,
        *,
        advantages: str | type[AdvantageEstimator] | np.ndarray | float | None = None,
        log_probs: bool = True,
    ) -> Result[Batch]:
        """Joins the samples to a batch: their tokens, the log-probs and values of the flags' models, and
        advantages. Failed samples are left out, and truncated ones with `rollout.mask_truncated`.

        advantages: an estimator by its name or class, numbers (A,), or one number for all actions. None:
            `algo.advantage.estimator`.
        log_probs: compute the policy's log-probs, from which losses take their ratio. False saves this
            forward pass: then `algo.kl.target` adapts nothing, and with the proximal policy `recomputed` only
            one optimizer step can be taken on the batch, whose ratio is 1. Raises UsageError if the
            advantages need them.
        """
        if isinstance(advantages, str | type):
            check_choice(ESTIMATORS, advantages, "estimator")
            if ESTIMATORS[advantages].needs_critic and not self.config.uses_critic:
                text = "needs a critic, which --algo.advantage.estimator loads; set it to this estimator"
                raise UsageError(ErrorCode.CONFLICT, text, flag="estimator", value=advantages)
        if not log_probs and isinstance(advantages, str | type | None):
            for text in log_prob_needs(self.config):
                raise UsageError(ErrorCode.CONFLICT, text, flag="log_probs", value=False)
        return self._lanes.on("models", self._batch, self.step + 1, groups, advantages, log_probs)

    def log_probs(self, batch: Batch | Result[Batch]) -> Result[np.ndarray]:
        """Returns the policy's log-probs of the actions, (A,), at the flags' temperature."""
        return self.forward(batch, "policy")

    def forward(self, batch: Batch | Result[Batch], model: str = "reference") -> Result[np.ndarray]:
        """Returns a number for each action, (A,): log-probs of the models `policy`, `reference`, `teacher`,
        values of the `critic`."""
        return self._lanes.on(
            "models", lambda batch: self._model(model).forward(as_batch(batch)).result(), batch
        )

    def forward_backward(
        self,
        batch: Batch | Result[Batch],
        loss: str | type[PolicyLoss] | LossFunction | None = None,
        *more: tuple[Batch | Result[Batch], str | type[PolicyLoss] | LossFunction | None],
    ) -> Result[Metrics]:
        """Adds the gradient of a loss to the policy's gradients since the last `optim_step`.

        loss: a policy loss by its name or class, with the KL and entropy terms of the flags; or a function
            of the policy's log-probs (A,) and the batch, whose gradient is that of a forward pass more. None:
            `actor.policy_loss_type`.
        more: further pairs (batch, loss). Each loss is divided by the totals of its own batch.

        Several calls add up with the backend torch; DeepSpeed takes one call a step. A critic is trained by
        `update` alone.
        """
        pairs = [(batch, loss), *list_of(tuple, more, "further pairs (batch, loss)")]
        for _, own in pairs:
            if callable(own) and not isinstance(own, type | PolicyLoss):
                check_function(own, "loss", "log_probs", "batch")
            elif own is not None:
                check_choice(POLICY_LOSSES, own, "policy loss")
        return self._lanes.on(
            "models",
            lambda *batches: self._backward(batches, [loss for _, loss in pairs]),
            *(b for b, _ in pairs),
        )

    def optim_step(self) -> Result[Metrics]:
        """Takes one optimizer step of the policy with the gradients since the last one. Returns `lr` and
        `grad_norm`, the norm before clipping. Raises NotFiniteError for a gradient that is not finite, which
        changes no weights, and UsageError where `forward_backward` was not called before."""
        return self._lanes.on("models", self._optim_step)

    def update(self, batch: Batch | Result[Batch]) -> Result[Metrics]:
        """Takes all optimizer steps that the flags say for a batch (`train.max_epochs`, `train.batch_size`),
        of the critic and the policy, as a step of `openrlhf ppo` does."""
        return self._lanes.on("models", self._update, batch)

    # State

    def save_state(self, state: Mapping[str, Any] | None = None) -> Result[str]:
        """Saves a checkpoint `global_step{N}` of models, optimizers, schedules and `run.state`, which becomes
        `state` if that is given, to `ckpt.path`. Returns its name. With `ckpt.save_steps` N, `log` saves one
        after every N steps."""
        own = self.state if state is None else state
        if not isinstance(own, Mapping):
            raise UsageError(ErrorCode.INVALID_VALUE, "expects a dict", flag="run.state", value=own)
        saved = pickles.copy_loadable(dict(own), "run.state")  # the loop may change its own meanwhile
        self.state = own if isinstance(own, dict) else dict(own)
        return self._lanes.on("models", self._save, self.step, saved)

    def load_state(self) -> dict[str, Any] | None:
        """Loads the newest undamaged checkpoint of `ckpt.path`, syncs, and returns `run.state`; None if there
        is no checkpoint. With `train.max_restarts`, the loss of a process then starts the program again."""
        self._may_continue = True
        found = self._lanes.on("models", self._load).result()
        if found is not None:
            self.state = found
            self.sync().result()
        return found

    def export(self, folder: str | os.PathLike) -> Result[None]:
        """Writes the policy in the format of Hugging Face; of a policy with adapters, the adapters. Raises
        UsageError for a folder with a model of another run, unless `ckpt.overwrite` is set."""
        place = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
        if problem := folder_problem(place):
            raise UsageError(ErrorCode.NOT_WRITABLE, problem, flag="folder", value=folder)
        resumes, remedy = self._continues or place in self._owned, "Name another one, or set ckpt.overwrite."
        check_export(self.config, place, "folder", resumes=resumes, remedy=remedy)
        self._owned.add(place)
        return self._lanes.on("models", lambda: self._roles.policy.export(place).result())

    def log(self, metrics: Mapping[str, Any] | Result[Metrics], groups: Groups = ()) -> None:
        """Ends a step: prints its line, and writes `metrics` (numbers, or tensors with one), what the verbs
        measured since the last call and the samples of `groups` to the run folder and the trackers. Saves a
        checkpoint if `ckpt.save_steps` says so, and after SIGTERM or Ctrl-C, which then ends the program with
        status 75."""
        self._lanes.check()
        own, samples = read_metrics(wait_for_value(metrics)), _all(wait_for_value(groups))
        self.step += 1
        trained, self._trained_version = self._trained_version, None  # a sync may be under way
        step = Step(number=self.step, version=self.version if trained is None else trained, samples=samples)
        step.metrics |= _joined([self._measured.popleft() for _ in range(len(self._measured))])
        if samples:
            announce([RolloutMetrics()], Hook.scoring, step)
            if self._lacks_rewards(samples):  # else warnings would blame a reward function
                step.metrics = {k: v for k, v in step.metrics.items() if not k.startswith("rollout/reward_")}
            announce([self._observer], Hook.trained, step)
        step.metrics |= own
        announce([self._observer, *self._hooks], Hook.ended, step)
        if self._stop.is_requested or is_due(self.step, self.config.ckpt.save_steps):
            self.save_state().result()
        if self._stop.is_requested:
            self._saver.finish()
            notify(f"stopped after step {self.step}; {self._checkpoints.resume_hint()}")
            sys.exit(EXIT_STOPPED)

    # The work of the verbs, on their lanes

    def _sampling(self, section: str, n: int | None, **own: Any) -> dict[str, Any]:
        """Returns the flags with which a call samples: those of the run, and its own of a section (None: not
        given). Raises UsageError for a value that its flag does not take."""
        own["n_samples_per_prompt"] = n if n is None else whole("n", n)
        given = {f"{section}.{name}": value for name, value in own.items() if value is not None}
        flags = flag_values(self.config) | {key: flag_value(key, value) for key, value in given.items()}
        return {key: value for key, value in flags.items() if key.startswith(("rollout.", "eval."))}

    def _sample(self, prompts: Prompts, purpose: Purpose, flags: Mapping[str, Any]) -> list[PromptGroup]:
        known = self._known.of(prompts)
        if purpose == "train" and not self._is_synced and self.step - self._synced_at >= UNSYNCED:
            text = f"note: the engine samples with the weights of step {self._synced_at}"
            notify_once(f"{text}; run.sync() sends it new ones", id(self))
        if len({(p.epoch, p.prompt_id) for p in known}) < len(known):
            text = "prompts of one call must differ in epoch or prompt_id, from which their seeds follow"
            raise UsageError(ErrorCode.CONFLICT, text)
        self._rollout.set_sampling(flags)
        return sample_all(self._rollout, known, purpose, self.config.rollout.timeout)

    def _reward(self, groups: Sequence[PromptGroup], reward: RewardFunc) -> list[PromptGroup]:
        return scored(groups_of(groups), reward, self._decode)

    def _sync(self, number: int) -> int:
        self._measured.append((1, self._rollout.sync(self._roles.policy, self.version + 1).result()))
        step = Step(number=number, version=self.version)
        self.version += 1
        self._synced_at, self._is_synced = self.step, True
        announce(self._hooks, Hook.synced, step)
        self._measured.append((1, step.metrics))
        return self.version

    def _lacks_rewards(self, samples: Sequence[Trajectory]) -> bool:
        """Tells whether nothing has scored the samples, neither the flags nor the loop."""
        return not (self._is_scored or any(t.reward for t in samples))

    def _change(self) -> None:
        """Notes that the policy is about to change."""
        self._num_changes, self._is_synced = self._num_changes + 1, False

    def _optim_step(self) -> Metrics:
        if not self._has_gradient:
            text = "there is no gradient; call forward_backward before each optim_step"
            raise UsageError(ErrorCode.CONFLICT, text)
        if self._roles.critic or self.config.adapts_kl:
            text = "note: optim_step trains the policy alone; run.update trains the critic too"
            notify_once(f"{text}, and adapts the KL coefficient", id(self))
        self._has_gradient = False
        self._change()
        return self._roles.policy.optim_step().result()

    def _batch(self, number: int, groups: Sequence[PromptGroup], advantages: Any, log_probs: bool) -> Batch:
        samples, config, roles = _some(groups), self.config, self._roles
        version = self._trained_version = self.version + (not self._is_synced)
        step = Step(number=number, version=version, samples=samples, kl=self.kl)
        check_stops(samples, config.rollout.stop_on or (), step.number)
        check_failures(samples, config.reward.max_failed_ratio, step.number)
        announce(self._hooks, Hook.sampled, step)
        models = (roles.policy if log_probs else None, roles.critic, roles.teacher, roles.reference)
        batch = Batch.of(step.finished, version, **config.batch_columns | {"by_prompt": True})
        passes = begin_forward(batch, models)
        announce(self._hooks, Hook.scoring, step)
        step.batch = with_outputs(batch, passes, step.number)
        announce(self._hooks, Hook.scored, step)
        step.batch, metrics = self._assign(step.batch, step.finished, advantages)
        step.metrics |= metrics
        announce(self._hooks, Hook.advantages, step)
        self._measured.append((num_samples(step.finished), step.metrics))
        batch = step.batch
        if config.rollout.mask_truncated:
            batch = batch.select(trained_on(step, with_truncated=False))
        self._origins.add(
            batch,
            num_changes=self._num_changes,
            num_sampled=step.num_samples,
            num_finished=num_samples(step.finished),
            kl_mean=step.metrics.get("kl/mean"),
        )
        return batch

    def _assign(self, batch: Batch, finished: Sequence[Trajectory], advantages: Any) -> tuple[Batch, Metrics]:
        if not isinstance(advantages, str | type | None):
            given = as_advantages(advantages, len(batch.rollout_log_probs))
            return replace(batch, advantages=given, returns=given), {}
        if self._lacks_rewards(finished) and not self.config.uses_teacher:
            text = "note: nothing has scored these samples, whose rewards are 0"
            notify_once(f"{text}; run.reward scores them, or pass advantages", id(self))
        algo = self.config.algo
        estimator, arguments = self._estimator, advantage_arguments(self.config, self.kl.coef)
        if advantages is not None:
            estimator = ESTIMATORS[advantages].of(algo.options)
            arguments["tasks"] = arguments["tasks"] | {"estimator": {}}
        return compute_advantages(batch, finished, estimator=estimator, **arguments)

    def _backward(self, batches: Sequence[Batch], losses: Sequence[Any]) -> Metrics:
        metrics: Metrics = {}
        pairs, total = [], 0.0
        for batch, loss in zip(map(as_batch, batches), losses, strict=True):
            if callable(loss) and not isinstance(loss, type):
                log_probs = torch.from_numpy(self._roles.policy.forward(batch).result()).requires_grad_()
                gradient, own = compute_loss(loss, log_probs, batch)
                batch, metrics = replace(batch, advantages=gradient, returns=gradient), metrics | own
                total += own["policy/loss"]
                loss = GivenGradient(temperature=self.config.rollout.temperature)
            else:
                self._check_log_probs(batch)
            pairs.append((batch, loss))
        self._has_gradient = True
        found = self._roles.policy.forward_backward(*pairs, kl_coef=self.kl.coef).result()
        named = sum(not isinstance(loss, GivenGradient) for _, loss in pairs)
        means = {k: v / named for k, v in found.items() if not k.endswith(("loss", "num_tokens"))}
        return found | means | metrics | {"policy/loss": found.get("policy/loss", 0.0) + total}

    def _check_log_probs(self, batch: Batch, num_updates: int = 1) -> None:
        """Raises UsageError if the first or a later one of these optimizer steps has no ratio, or if the loss
        reads log-probs of a sampler, which given answers have not."""
        if (flags := sampler_readers(self.config)) and np.isnan(batch.rollout_log_probs).any():
            text = (
                "reads the log-probs of the sampler, and nothing sampled the given answers of this batch.\n"
                "Leave it out, or set them: replace(batch, rollout_log_probs=batch.log_probs)."
            )
            raise UsageError(ErrorCode.CONFLICT, text, flag=f"--{flags[0]}")
        is_read = batch.log_probs is None and self.config.algo.advantage.proximal.needs_forward
        made_after = self._origins.of(batch, self._num_changes).num_changes
        if is_read and made_after + 1 < self._num_changes + num_updates:
            text = (
                "the batch has no log-probs of the policy before its updates: the ratio of the loss is known "
                "in one\noptimizer step only, before any other change of the policy. Make it without "
                "log_probs=False."
            )
            raise UsageError(ErrorCode.CONFLICT, text)

    def _update(self, batch: Batch) -> Metrics:
        policy, origin, metrics = self._roles.policy, self._origins.of(as_batch(batch), self._num_changes), {}
        arguments = batch, range(len(batch)), origin.num_sampled
        schedules = {
            model: build_schedule(self.config, model, *arguments, routed=model is policy)
            for model in filter(None, (self._roles.critic, policy))
        }
        self._check_log_probs(batch, len(schedules[policy]))
        is_fresh = origin.has_log_probs_of(batch) and origin.num_changes == self._num_changes
        self._change()
        for model, schedule in schedules.items():
            metrics |= model.update(batch, schedule, self.kl.coef, is_fresh).result().metrics
        if origin.kl_mean is not None:
            self.kl = self.kl.update(origin.kl_mean, origin.num_finished)
        return metrics

    def _save(self, step: int, state: dict[str, Any]) -> str:
        own = {
            "step": step,
            "num_texts": self._known.num_texts,
            "kl_coef": self.kl.coef,
            "estimator": self._estimator.state_dict(),
            "run_name": self.config.logger.wandb.run_name,
            "loop": state,
        }
        if "_observer" in vars(self):
            self._observer.saving(f"global_step{step}")
        self._saver.save(step, own)
        return f"global_step{step}"

    def _load(self) -> dict[str, Any] | None:
        tag, skipped = self._checkpoints.find()
        if tag is None and skipped:
            raise UsageError(ErrorCode.DAMAGED_CHECKPOINT, "; ".join(skipped), value=self._checkpoints.path)
        if tag is None:
            return None
        state = restore(tag, self._roles.policy, self._roles.critic)
        self._continues = True
        self._change()
        self.step, self.kl = state["step"], replace(self.kl, coef=state["kl_coef"])
        self._known.num_texts = state.get("num_texts", 0)  # older checkpoints have none
        if estimator := state["estimator"]:
            self._estimator.load_state_dict(estimator)
        if (flag := "logger.wandb.run_name") not in self._explicit:  # its run folder goes on
            self.config = with_values(self.config, {flag: state["run_name"]})
        return state["loop"]

    def _model(self, name: str) -> Any:
        known = [r for r in ("policy", "reference", "teacher", "critic") if getattr(self._roles, r)]
        if name not in known:
            text = f"this run has the models {', '.join(known)}"
            raise UsageError(ErrorCode.INVALID_VALUE, text, value=name)
        return getattr(self._roles, name)

    @cached_property
    def _estimator(self) -> AdvantageEstimator:
        return self.config.algo.build_estimator()

    @cached_property
    def _checkpoints(self) -> CheckpointFolder:
        found = CheckpointFolder.of(self.config)
        self._held.enter_context(locked(self.config.ckpt.folder, flag="--ckpt.path"))
        for line in found.remove_unfinished():
            notify(line)
        return found

    @cached_property
    def _saver(self) -> Saver:
        models = SavedRanks(self._roles.critic, self._roles.policy)
        phase = lambda name: nullcontext()
        return Saver(checkpoints=self._checkpoints, models=models, phase=phase, hooks=self._hooks)

    @cached_property
    def _decode(self) -> Callable:
        return partial(decode, self.tokenizer)

    @cached_property
    def _observer(self) -> Observer:
        config, done = self.config, self.step - 1
        self._held.enter_context(locked(config.run_dir, flag="--logger.run_dir"))
        about = {"decode": self._decode, "dtype": config.ds.param_dtype}
        observer = Observer.opened(config, sys.argv, resume_step=done if done > 0 else None, **about)
        observer.progress.start(None, done=self.step - 1, since=self._began)
        return observer


def _all(groups: Sequence[PromptGroup]) -> list[Trajectory]:
    return [t for group in groups_of(groups) for t in group.trajectories]


def _joined(measured: Sequence[tuple[int, Metrics]]) -> Metrics:
    """Returns the metrics of a step from its batches and syncs: means over samples, and sums of counts."""
    weights, several = [weight for weight, _ in measured], [metrics for _, metrics in measured]
    joined = mean_metrics(several, weights)
    for end, join in {"_min": min, "_max": max, "without_peers": sum}.items():
        ending = [name for name in joined if name.endswith(end)]
        joined |= {name: join(metrics[name] for metrics in several if name in metrics) for name in ending}
    return joined


def _some(groups: Sequence[PromptGroup]) -> list[Trajectory]:
    if samples := _all(groups):
        return samples
    raise UsageError(ErrorCode.INVALID_VALUE, "there are no samples: the list of groups is empty")
