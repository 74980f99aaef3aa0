"""Checkpoints of a trainer of RL: what a resumed run continues, and which checkpoints are kept."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_trainer import Done, Trained, config_of, fit, metrics_of, trainer_of, with_critic
from records import record_of
from refusals import refused

from openrlhf.config.ppo import KLConfig, PPOCkptConfig
from openrlhf.errors import ErrorCode, RunError, Stopped
from openrlhf.loop.rl import check_version
from openrlhf.observability.journal import read_journal
from openrlhf.stopping import Dropped
from openrlhf.types import Prompt


def test_a_resumed_run_loads_both_models(tmp_path):
    config = with_critic(tmp_path)
    first = trainer_of(tmp_path, config, total_steps=2)
    fit(first)
    second = trainer_of(
        tmp_path, config, total_steps=3, resume="global_step2", saved=first.policy.saved, critic=first.critic
    )
    assert second.step == 2
    assert [c for c in second.policy.calls if c.startswith("resume")] == ["resume policy global_step2"]
    assert first.policy.calls[-1] == "resume critic global_step2"


def test_a_checkpoint_of_a_later_release_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path))
    with refused(ErrorCode.OTHER_RUN, flag="--ckpt.load_enable") as told:
        check_version(trainer.state() | {"version": 3})
    assert re.search(r"\b3\b.*\b2\b", told.value.text)


def test_a_resumed_run_continues(tmp_path):
    config = config_of(tmp_path, save_steps=2, best_metric_key="none")
    config = replace(config, algo=replace(config.algo, kl=KLConfig(init_coef=0.1, target=0.01)))
    whole = trainer_of(tmp_path / "whole", replace(config, ckpt=ckpt_in(tmp_path / "whole")), total_steps=5)
    fit(whole)
    first = trainer_of(tmp_path / "halves", replace(config, ckpt=ckpt_in(tmp_path / "halves")), total_steps=3)
    fit(first)
    tag = first.checkpoints.find().tag
    assert tag == "global_step2"
    second = trainer_of(
        tmp_path / "halves",
        replace(config, ckpt=ckpt_in(tmp_path / "halves")),
        total_steps=5,
        resume=tag,
        saved=first.policy.saved,
    )
    fit(second)
    generated = [c for c in whole.policy.calls if c.startswith("generate")]
    assert second.policy.calls[:2] == ["resume policy global_step2", "sync 2"]
    assert [c for c in second.policy.calls if c.startswith("generate")] == generated[2:]
    told, told_whole = ([update[1:] for update in run.policy.updates] for run in (second, whole))
    assert told == told_whole[2:]  # the order of samples, and the coefficient of the KL
    assert len({kl for _, kl in told_whole}) == 5  # the controller moves the coefficient
    assert len({repr(order) for order, _ in told_whole}) > 1  # not every step has the same order
    assert second.optimizer_steps == whole.optimizer_steps == 5  # the journal counts them
    assert list(metrics_of(tmp_path / "halves")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_written_while_training_goes_on(tmp_path, fails):
    """It is complete when all files of both models are on the disk, or when the run ends. An error of writing
    ends the run at the end of a step."""
    config = with_critic(tmp_path)
    config = replace(config, ckpt=replace(ckpt_in(tmp_path), async_save=True))
    trainer = trainer_of(tmp_path, config, total_steps=5)
    written = {"critic": 2, "policy": 3}  # the step at whose end the files are on the disk
    complete: list[str | None] = []

    def finish(model: Trained) -> Done:
        model.calls.append(f"finish {model.name}")
        if fails:
            raise RunError(ErrorCode.NOT_WRITABLE, "the disk is full")
        return Done()

    for model in (trainer.critic, trainer.policy):
        model.has_written = lambda name=model.name: Done(trainer.step >= written[name])
        model.finish_checkpoint = partial(finish, model)
    after(trainer.policy, "update", lambda: complete.append(trainer.checkpoints.find().tag))
    if fails:
        with refused(ErrorCode.NOT_WRITABLE):
            trainer.fit()
        assert trainer.step == 3 and trainer.checkpoints.find().tag is None
        return
    trainer.fit()
    assert complete == [None] * 3 + ["global_step2"] * 2
    assert trainer.checkpoints.find().tag == "global_step4"
    assert [call for call in trainer.critic.calls if call.startswith("finish")] == [
        *("finish critic", "finish policy"),
        *("finish critic", "finish policy"),
    ]


@pytest.mark.usefixtures("outlives_stops")
@pytest.mark.parametrize(
    ("place", "step"),
    [
        *((place, 2) for place in ("generate", "update", "sync", "save")),
        *(
            pytest.param(place, step, marks=pytest.mark.processes)
            for place in ("generate", "update", "sync")
            for step in (1, 3)
        ),
    ],
)
def test_a_run_that_is_asked_to_stop_continues_where_it_stopped(tmp_path, place, step):
    """A stop while `step` samples drops that work; later in the step it is finished. Nothing is sampled or
    trained on twice by both runs together, and no checkpoint is written twice."""
    whole = trainer_of(tmp_path / "whole", replace(config_of(tmp_path), ckpt=ckpt_in(tmp_path / "whole")))
    fit(whole)
    config = replace(config_of(tmp_path), ckpt=ckpt_in(tmp_path / "halves"))
    first = trainer_of(tmp_path / "halves", config)

    def ask(*arguments: Any) -> None:
        if first.step + (place not in ("save", "sync")) == step and not first.stop.is_requested:
            first.stop.number = 15
            if first.stop._may_drop:
                raise Dropped

    after(
        *{
            "generate": (first.rollout, "submit"),
            "update": (first.policy, "update"),
            "save": (record_of(first.observer).journal, "flush"),
            "sync": (first.rollout, "sync"),
        }[place],
        ask,
    )
    done = step - (place == "generate")
    with pytest.raises(Stopped) as stopped:
        first.fit()
    assert (first.step, stopped.value.code) == (done, 75 if done else 143)
    record_of(first.observer).journal.close()
    assert [tag for tag in first.policy.saved if not tag.startswith("best")] == [
        f"global_step{i}" for i in sorted({2, done} - {0}) if i <= done
    ]
    tag = f"global_step{done}" if done else None
    second = trainer_of(tmp_path / "halves", config, resume=tag, saved=first.policy.saved)
    fit(second)
    told, told_whole = ([u[1:] for u in run.policy.updates] for run in (second, whole))
    assert told == told_whole[done:]
    assert list(metrics_of(tmp_path / "halves")) == [0, 1, 2, 3]


def after(owner: Any, method: str, call: Any) -> None:
    """Makes `method` of this object call `call` before it returns."""
    original = getattr(owner, method)

    def both(*arguments: Any, **named: Any) -> Any:
        answer = original(*arguments, **named)
        call()
        return answer

    setattr(owner, method, both)


def ckpt_in(path: Path) -> PPOCkptConfig:
    return PPOCkptConfig(path=str(path / "ckpt"), save_steps=2, best_metric_key="none")


@pytest.mark.parametrize(
    "key", ["", "math_pass1", "eval/math_pass1", "eval_math_pass1", "math_score_mean", "eval_math_score_mean"]
)
def test_the_best_evaluation_is_kept(tmp_path, key):
    scores = {0: 0.1, 2: 0.7, 4: 0.4, 6: 0.7}
    config = config_of(tmp_path, save_steps=3, best_metric_key=key)
    trainer = trainer_of(tmp_path, config, total_steps=6, score=lambda prompt, version: scores[version])
    fit(trainer)
    saved = [c.removeprefix("save policy ") for c in trainer.policy.calls if c.startswith("save")]
    assert saved == ["best_global_step0", "best_global_step2", "global_step3", "global_step6"]
    kept = sorted(p.name for p in (tmp_path / "ckpt").iterdir() if p.is_dir())
    assert kept == ["best_global_step2", "global_step3", "global_step6"]
    assert trainer.policy.saved["global_step3"]["best_metric"] == 0.7


SETS = [Prompt(prompt_id=i, text="the same text", source=source) for i, source in enumerate(["math", "code"])]


@pytest.mark.parametrize(
    ("key", "best"),
    [("", 0.9), ("math_pass1", 0.6), ("eval/math_pass2", 0.6), ("math_best_of2", 0.6), ("code_pass1", 0.9)],
)
def test_the_best_of_several_sets_is_that_of_one_of_them(tmp_path, key, best):
    """An empty key means the alphabetically first set, whatever the others do; if all of its samples failed,
    there is nothing to compare."""
    scores = {"code": {0: 0.3, 2: None, 4: 0.9, 6: 0.1}, "math": {0: 0.2, 2: 0.6, 4: None, 6: 0.5}}
    config = config_of(tmp_path, save_steps=3, best_metric_key=key)
    trainer = trainer_of(
        tmp_path,
        config,
        total_steps=6,
        eval_prompts=SETS,
        score=lambda prompt, version: scores[prompt.source][version],
    )
    fit(trainer)
    assert trainer.best_metric == best
    metrics = metrics_of(tmp_path)
    assert (metrics[0]["eval/code_score_mean"], metrics[0]["eval/math_score_mean"]) == (0.3, 0.2)
    assert "eval/code_score_mean" not in metrics[2] and metrics[2]["eval/failed_ratio"] == 0.5


def test_a_best_metric_that_does_not_exist_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path, save_steps=1, best_metric_key="physics_pass1"))
    with refused(ErrorCode.INVALID_VALUE, flag="--ckpt.best_metric_key", value="physics_pass1") as error:
        fit(trainer)
    assert "eval/math_score_mean" in error.value.text


def test_nothing_is_saved_unless_asked_for(tmp_path):
    trainer = trainer_of(tmp_path, config_of(tmp_path))
    fit(trainer)
    assert not [c for c in trainer.policy.calls if re.match("save|export", c)]


def test_copies_alone(tmp_path):
    config = config_of(tmp_path, save_steps=1, save_hf=True, disable_ds=True, best_metric_key="none")
    trainer = trainer_of(tmp_path, config, total_steps=2)
    fit(trainer)
    saved = [c for c in trainer.policy.calls if re.match("save|export", c)]
    assert saved == ["export global_step1_hf", "export global_step2_hf"]
    assert trainer.checkpoints.find().tag is None


def test_groups_that_wait_are_in_the_checkpoint(tmp_path):
    """A step samples twice as many groups as it trains on: a run that resumes trains on the others first."""
    config = config_of(tmp_path, save_steps=1, best_metric_key="none")
    config = replace(config, rollout=replace(config.rollout, vllm_generate_batch_size=4))
    first = trainer_of(tmp_path, config, total_steps=1, eval_prompts=[])
    fit(first)
    waiting = [group.prompt.prompt_id for group in first.policy.saved["global_step1"]["collector"]["groups"]]
    saved = first.policy.saved
    resumed = trainer_of(tmp_path, config, total_steps=2, eval_prompts=[], resume="global_step1", saved=saved)
    fit(resumed)
    assert not [call for call in resumed.policy.calls if call.startswith("generate")]
    trained = read_journal(tmp_path / "run" / "rollouts" / "step_000002.parquet")
    assert len(waiting) == 2
    assert [t.prompt.prompt_id for t in trained] == [i for i in waiting for _ in range(2)]
