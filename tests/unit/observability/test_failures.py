from records import record_of, trajectory

from openrlhf.config.sections import LoggerConfig
from openrlhf.observability.failures import commonest_failure, headline
from openrlhf.observability.hooks.base import Step
from openrlhf.observability.observer import Observer
from openrlhf.observability.run_folder import RunFolder
from openrlhf.types import Outcome, Trajectory


def sample(error: str | None, outcome: Outcome = Outcome.REWARD_ERROR) -> Trajectory:
    if error is None:
        return trajectory(text="2 + 2?")
    return trajectory(None, text="2 + 2?", error=error, outcome=outcome)


def test_errors_that_differ_in_what_they_were_about_are_one():
    words = [sample(f"ValueError: could not convert '{word}' of 17 samples") for word in ("four", "five")]
    others = [sample("took longer than 60 s"), sample("took longer than 61 s"), sample("took 7 s")]
    last = sample("ValueError: could not convert 'x' of 3 samples")
    failed = [sample("KeyError: 'a'"), *words, *others, last]
    example, count = commonest_failure(failed)
    assert (example, count) == (words[0], 3)


def test_the_headline_of_an_error():
    assert headline(sample("reward_func raised KeyError: 'a'\nTraceback\n  File")) == (
        "reward_func raised KeyError: 'a'"
    )
    assert headline(sample("", outcome=Outcome.ABORTED)) == "aborted"


def test_the_screen_shows_the_commonest_error_in_one_line(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, LoggerConfig(), decode=lambda token_ids, after: f"{token_ids}\nafter {after}")
    observer.start(10)
    failed = [sample("KeyError: 'x'\nTraceback ..."), sample("KeyError: 'y'"), sample("NaN")]
    record_of(observer).write(1, [sample(None), *failed])
    record_of(observer).write(1, failed[:2], name="eval")
    record_of(observer).write(2, [sample(None)] * 4)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        r"3 of 4 samples failed, 2 of them with: KeyError: 'x' | prompt '2 + 2?', answer '[2]\nafter [1]' | "
        "step_000001.parquet",
        r"2 of 2 samples failed: KeyError: 'x' | prompt '2 + 2?', answer '[2]\nafter [1]' | "
        "eval_000001.parquet",
    ]
    record_of(observer).journal.close()
    observer.trackers.close()
    observer.progress.close()


def test_a_run_whose_samples_were_all_filtered_ends_without_an_error(tmp_path, capsys):
    """It has no sample of a step or an evaluation to show."""
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["test"], resume=False)
    observer = Observer(folder, LoggerConfig(), decode=lambda token_ids, after: "answer")
    observer.start(10)
    observer.trained(Step(number=1, version=0, filtered=[sample(None)] * 2))
    observer.close()
    assert (folder.rollouts_path / "filtered_000001.parquet").exists()
    assert "prompt:" not in capsys.readouterr().out
