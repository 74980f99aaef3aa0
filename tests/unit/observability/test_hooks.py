"""Hooks: which events a loop announces, in which order, with what; how their errors are told."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_trainer import config_of, fit, metrics_of, trainer_of, with_critic
from refusals import refused

from openrlhf.config.ppo import TrainConfig
from openrlhf.config.sections import AdamConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.config.supervised import TrainConfig as SupervisedTrainConfig
from openrlhf.errors import ErrorCode, RunError, notify_once
from openrlhf.observability.hooks import load
from openrlhf.observability.hooks.base import Evaluation, Hook, Step, announce
from openrlhf.observability.hooks.load import attached, build_hooks, check_hooks
from openrlhf.tools.selftest import verify
from openrlhf.types import not_none

EXAMPLE = Path(__file__).parents[3] / "examples" / "python" / "solved_groups.py"
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


for event in set(EVENTS) - {"before_step", "after_step", "before_update", "first_pass", "of", "option_names"}:
    setattr(Diary, event, writing(event))


def test_a_run_announces_its_events_in_order(tmp_path: Path) -> None:
    diary = Diary()
    config = config_of(tmp_path, save_steps=2, best_metric_key="none")
    fit(trainer_of(tmp_path, config, total_steps=2, hooks=[diary]))
    step = ("sampled", "scoring", "scored", "advantages", "scheduled", "updated", "trained", "synced")
    assert diary.events == [
        *("evaluated 0", "ended 0"),
        *(f"{name} 1" for name in step),
        "ended 1",
        *(f"{name} 2" for name in step),
        *("evaluated 2", "ended 2", "saving global_step2", "saved global_step2"),
    ]


def test_checks_that_are_not_installed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that is older than its code attaches no checks; hooks of others are none."""
    others = [EntryPoint("mine", "house.hooks:Mine", "openrlhf.attached.rl")]
    others += [EntryPoint("own", "openrlhf.tools:record", f"openrlhf.attached.{p}") for p in load.RECORDED]
    monkeypatch.setattr(load, "entry_points", lambda group: [p for p in others if p.group == group])
    without = config_of(tmp_path)
    config = replace(without, train=replace(without.train, verify_steps=1))
    for place in ("rl", "supervised", "rank"):
        with refused(ErrorCode.MISSING_PACKAGE, flag="--train.verify_steps", value=1):
            attached(place, config)
    with refused(ErrorCode.MISSING_PACKAGE, flag="--train.verify_steps", value=1):
        check_hooks((), 1)
    check_hooks((), 0)
    assert attached("supervised", without) == []
    for place in load.RECORDED:  # without rollouts, warnings or card a run does not begin, checked or not
        missing = next(point for point in others if point.group.endswith(place))
        others.remove(missing)
        with refused(ErrorCode.MISSING_PACKAGE, value=f"entry point {missing.group}"):
            check_hooks((), 0)
        others.append(missing)


def test_a_package_attaches_a_hook_beside_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that cannot be built is told with its entry point."""
    (tmp_path / "house_hooks.py").write_text(
        "import openrlhf as rl\n"
        "class Mine(rl.Hook):\n    config: object\n    prompts: object\n"
        "class Wrong(Mine):\n    more: int\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = load.entry_points(group="openrlhf.attached.rl")
    group, found = "openrlhf.attached.rl", []
    monkeypatch.setattr(load, "entry_points", lambda group: [*own, *found])
    found.append(EntryPoint("mine", "house_hooks:Mine", group))
    names = [type(hook).__name__ for hook in attached("rl", config_of(tmp_path), prompts=None)]
    assert names == ["StepChecks", "Mine"]
    found.append(EntryPoint("wrong", "house_hooks:Wrong", group))
    with refused(ErrorCode.USER_CODE, value=f"entry point {group}: house_hooks:Wrong"):
        attached("rl", config_of(tmp_path), prompts=None)


def test_a_variable_leaves_out_the_checks_and_keeps_the_hooks_of_others(tmp_path, monkeypatch, capsys):
    places = {place: load.entry_points(group=f"openrlhf.attached.{place}") for place in load.CHECKED}
    assert all(places.values())
    other = EntryPoint("mine", "types:SimpleNamespace", "openrlhf.attached.rl")
    found = lambda group: [*places[group.rpartition(".")[2]], other]
    monkeypatch.setattr(load, "entry_points", found)
    monkeypatch.setenv("OPENRLHF_SELFTEST", "0")
    notify_once.cache_clear()
    for place in load.CHECKED:
        (hook,) = attached(place, config_of(tmp_path), prompts=None)
        assert type(hook) is SimpleNamespace
    assert capsys.readouterr().err == "note: OPENRLHF_SELFTEST=0: this run does not check itself\n"


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
            *(("lengths",) if "rollout/response_length_mean" in step.metrics else ()),
            *(("metrics",) if "reward/mean" in step.metrics else ()),
        }

    diary.look = look
    fit(trainer_of(tmp_path, with_critic(tmp_path), total_steps=1, eval_prompts=[], hooks=[diary]))
    assert found["sampled"] == set()
    assert found["scored"] == {"lengths", "values"}
    assert found["advantages"] == {"lengths", "values", "advantages", "metrics"}
    assert found["scheduled"] == found["advantages"] | {"critic", "policy"}
    assert found["updated"] == found["trained"] == found["ended"] == found["scheduled"] | {"updated"}


def test_a_metric_of_a_hook_is_one_of_the_run(tmp_path: Path) -> None:
    """In the example two samples of a prompt have the rewards 0 and 1, or both 1."""
    (solved,) = build_hooks([f"{EXAMPLE}:SolvedGroups"])
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
    with refused(ErrorCode.USER_CODE, flag="--train.hooks", value=__file__) as error:
        fit(trainer)
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if 'ArithmeticError("no more")' in text)
    assert f"line {line}: ArithmeticError: no more\nThe hook Strict raised it in advantages()" in str(
        error.value
    )
    trainer.observer.close()
    assert sorted(path.name for path in (tmp_path / "run" / "rollouts").glob("step*"))


def test_the_first_error_of_a_step_is_the_one_that_is_told(tmp_path: Path) -> None:
    """A hook that cannot read a step that failed hides neither the failure nor the samples."""

    class Greedy(Hook):
        def trained(self, step: Step) -> None:
            print(len(not_none(step.batch)), not_none(step.updated).metrics)

    trainer = trainer_of(tmp_path, config_of(tmp_path), hooks=[Greedy()], reward=lambda prompt, i: None)
    with pytest.raises(RunError, match="samples failed") as error:
        fit(trainer)
    (note,) = error.value.__notes__
    assert "The hook Greedy raised it in trained()" in note
    trainer.observer.close()
    assert sorted(path.name for path in (tmp_path / "run" / "rollouts").glob("step*"))


def test_a_hook_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    """Checks import it only, and build none."""
    (tmp_path / "hook.py").write_text(
        "import openrlhf as rl\nclass Mine(rl.Hook):\n  def __post_init__(self):\n    raise OSError(7)\n"
    )
    check_hooks([f"{tmp_path}/hook.py:Mine"], 0)
    with refused(ErrorCode.USER_CODE, flag="--train.hooks", value=tmp_path / "hook.py") as error:
        build_hooks([f"{tmp_path}/hook.py:Mine"])
    assert "line 4: OSError: 7" in str(error.value) and "__init__" in str(error.value)


@pytest.mark.parametrize("verify_steps", [0, 1, 2])
def test_the_first_steps_of_supervised_training_are_checked(monkeypatch, verify_steps):
    """Counted from where this process begins: a resumed run checks its own first ones."""
    checked: list[int] = []
    monkeypatch.setattr(
        verify, "verify_step", lambda engine, rows, objective, step, **_: checked.append(step)
    )
    config = SupervisedConfig(train=SupervisedTrainConfig(verify_steps=verify_steps, max_epochs=2))
    mini_batches = SimpleNamespace(shuffle=False)
    hook = verify.FirstSteps(config=config, engine=None, mesh=None, windows=mini_batches)
    for step in (5, 6, 7):
        hook.before_step(step, [], None)
    assert checked == [5, 6][:verify_steps]


def test_the_learning_rate_of_every_supervised_step_is_checked() -> None:
    config = SupervisedConfig(adam=AdamConfig(lr=1e-3), lr_scheduler="constant", lr_warmup_ratio=0.0)
    hook = verify.FirstSteps(config=config, engine=None, mesh=None, windows=[None] * 10)
    hook.after_step(3, {"lr": 1e-3})
    with refused(ErrorCode.BROKEN_INVARIANT, told="the learning rate is 0.002, and must be 0.001"):
        hook.after_step(4, {"lr": 2e-3})


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
        ("{folder}/hook.py:Other", ErrorCode.USER_CODE, "must be a subclass of openrlhf.observability.hooks"),
        ("{folder}/hook.py:Missing", ErrorCode.USER_CODE, "has no Missing. It has Mine, Other"),
    ],
)
def test_what_is_no_hook_is_refused(tmp_path: Path, name: str, code: ErrorCode, text: str) -> None:
    (tmp_path / "hook.py").write_text(
        "import openrlhf as rl\nclass Mine(rl.Hook):\n    pass\nclass Other:\n    pass\n"
    )
    name = name.format(folder=tmp_path)
    with refused(code, flag="--train.hooks", value=name, told=text):
        build_hooks([name])


def test_the_batch_has_the_log_probs_that_its_update_computed(tmp_path: Path) -> None:
    """Without old log-probs, the update computes them, and the batch has them afterwards."""
    seen: dict[str, bool] = {}

    class Looking(Hook):
        def advantages(self, step: Step) -> None:
            seen["before"] = not_none(step.batch).log_probs is not None

        def updated(self, step: Step) -> None:
            seen["after"] = not_none(step.batch).log_probs is not None

    base = config_of(tmp_path)
    config = replace(
        base,
        train=TrainConfig(batch_size=4, verify_steps=0),
        algo=replace(base.algo, kl=replace(base.algo.kl, init_coef=0.0)),
    )
    assert config.skips_old_log_probs
    fit(trainer_of(tmp_path, config, total_steps=1, eval_prompts=[], hooks=[Looking()]))
    assert seen == {"before": False, "after": True}
