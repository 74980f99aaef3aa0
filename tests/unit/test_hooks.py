"""Hooks: which events a loop announces, in which order, with what; how their errors are told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_trainer import config_of, fit, metrics_of, trainer_of, with_critic
from refusals import refused

import openrlhf as rl
from openrlhf.config.ppo import TrainConfig
from openrlhf.errors import ErrorCode
from openrlhf.observability.hooks.base import Evaluation, Hook, Step, announce
from openrlhf.observability.hooks.load import hooks_of
from openrlhf.types import present

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "solved_groups.py"
EVENTS = [name for name in vars(Hook) if not name.startswith("_") and callable(getattr(Hook, name))]


class Diary(Hook):
    """Writes down the events, and what each finds."""

    def __post_init__(self) -> None:
        self.events: list[str] = []
        self.steps: list[Step] = []
        self.look: Callable[[str, Step], None] = lambda event, step: None


def writing(name: str) -> Callable:
    def write(self: Diary, about: Step | Evaluation | str) -> None:
        place = (
            about if isinstance(about, str) else about.step if isinstance(about, Evaluation) else about.number
        )
        self.events.append(f"{name} {place}")
        if isinstance(about, Step):
            self.look(name, about)

    return write


for event in set(EVENTS) - {"before_step", "after_step", "of", "option_names"}:
    setattr(Diary, event, writing(event))


def test_a_run_announces_its_events_in_order(tmp_path: Path) -> None:
    diary = Diary()
    config = config_of(tmp_path, save_steps=2, best_metric_key="none")
    fit(trainer_of(tmp_path, config, total_steps=2, hooks=[diary]))
    step = ("sampled", "scored", "advantages", "scheduled", "updated", "trained", "synced")
    assert diary.events == [
        *("evaluated 0", "ended 0"),
        *(f"{name} 1" for name in step),
        "ended 1",
        *(f"{name} 2" for name in step),
        *("evaluated 2", "ended 2", "saving global_step2", "saved global_step2"),
    ]


def test_an_event_finds_what_the_step_has_computed(tmp_path: Path) -> None:
    found: dict[str, set[str]] = {}
    diary = Diary()

    def look(event: str, step: Step) -> None:
        batch = step.batch
        found[event] = {
            *(("values",) if batch and batch.values is not None else ()),
            *(("advantages",) if batch and batch.advantages is not None else ()),
            *step.schedules,
            *(("updated",) if step.updated else ()),
            *(("metrics",) if "reward/mean" in step.metrics or "rollout/num_samples" in step.metrics else ()),
        }

    diary.look = look
    fit(trainer_of(tmp_path, with_critic(tmp_path), total_steps=1, eval_prompts=[], hooks=[diary]))
    assert found["sampled"] == set()
    assert found["scored"] == {"values"}
    assert found["advantages"] == {"values", "advantages", "metrics"}
    assert found["scheduled"] == found["advantages"] | {"critic", "policy"}
    assert found["updated"] == found["trained"] == found["ended"] == found["scheduled"] | {"updated"}


def test_a_metric_of_a_hook_is_one_of_the_run(tmp_path: Path) -> None:
    """In the example two samples of a prompt have the rewards 0 and 1, or both 1."""
    (solved,) = hooks_of([f"{EXAMPLE}:SolvedGroups"])
    config = replace(config_of(tmp_path), eval=replace(config_of(tmp_path).eval, steps=-1))
    reward = lambda prompt, i: float(i or prompt.prompt_id % 2)
    trainer = trainer_of(tmp_path, config, total_steps=4, hooks=[solved], reward=reward)
    fit(trainer)
    shares = [metrics["solved_groups"] for step, metrics in metrics_of(tmp_path).items() if step]
    assert sum(shares) / len(shares) == 0.5  # an epoch of eight prompts in four steps


def test_an_error_of_a_hook_ends_the_run_and_the_samples_are_kept(tmp_path: Path) -> None:
    class Strict(Hook):
        def advantages(self, step: Step) -> None:
            raise ArithmeticError("no more")

    trainer = trainer_of(tmp_path, config_of(tmp_path), hooks=[Strict()])
    with pytest.raises(ArithmeticError, match="no more") as error:
        fit(trainer)
    assert error.value.__notes__ == ["in advantages() of the hook Strict"]
    trainer.observer.close()
    assert sorted(path.name for path in (tmp_path / "run" / "rollouts").glob("step*"))


def test_hooks_are_called_in_their_order() -> None:
    called: list[int] = []

    class Numbered(Hook):
        number: int = 0

        def saved(self, tag: str) -> None:
            called.append(self.number)

    announce([Numbered(number=2), Numbered(number=1)], Hook.saved, "global_step1")
    assert called == [2, 1]


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("nothing", ErrorCode.INVALID_VALUE, "name a class as folder/file.py:NAME"),
        ("{folder}/none.py:Hook", ErrorCode.USER_CODE, "there is no file"),
        (
            "{folder}/hook.py:Other",
            ErrorCode.USER_CODE,
            "must be a subclass of openrlhf.observability.hooks",
        ),
        ("{folder}/hook.py:Missing", ErrorCode.USER_CODE, "has no Missing. It has Mine, Other"),
    ],
)
def test_what_is_no_hook_is_refused(tmp_path: Path, name: str, code: ErrorCode, text: str) -> None:
    (tmp_path / "hook.py").write_text(
        "import openrlhf as rl\nclass Mine(rl.Hook):\n    pass\nclass Other:\n    pass\n"
    )
    name = name.format(folder=tmp_path)
    with refused(code, flag="--train.hooks", value=name) as error:
        hooks_of([name])
    assert text in str(error.value)


def test_the_step_of_a_replayed_update_has_its_log_probs(tmp_path: Path) -> None:
    """Without old log-probs, the update computes them, and the batch has them afterwards."""
    seen: dict[str, bool] = {}

    class Looking(Hook):
        def advantages(self, step: Step) -> None:
            seen["before"] = present(step.batch).log_probs is not None

        def updated(self, step: Step) -> None:
            seen["after"] = present(step.batch).log_probs is not None

    base = config_of(tmp_path)
    config = replace(
        base,
        train=TrainConfig(batch_size=4, verify_steps=0),
        algo=replace(base.algo, kl=replace(base.algo.kl, init_coef=0.0)),
    )
    assert config.skips_old_log_probs
    fit(trainer_of(tmp_path, config, total_steps=1, eval_prompts=[], hooks=[Looking()]))
    assert seen == {"before": False, "after": True}
    assert issubclass(rl.Hook, Hook)
