import json
import os
import shlex
import subprocess
import sys
from functools import partial

import pytest
import yaml
from damages import IN_ITS_PLACE, put_in_place
from refusals import refused

from openrlhf.errors import ErrorCode
from openrlhf.observability import run_folder
from openrlhf.observability.run_folder import REDACTED, RunFolder, find_secrets, read_jsonl, redact, to_json
from openrlhf.observability.trackers.metrics_file import JsonlTracker, read_metrics

SECRET = "0123456789abcdefMARKER"
CONFIG = "actor:\n  adam:\n    lr: 1.0e-06\n"


def create(path, config=CONFIG, argv=("openrlhf", "train"), resume=False):
    return RunFolder.create(path, config_yaml=config, argv=argv, resume=resume)


def all_text(path):
    return "".join(file.read_text() for file in path.rglob("*") if file.is_file())


def test_what_a_new_folder_holds(tmp_path):
    argv = ["openrlhf", "train", "ppo", "--data.prompt", "my data; rm -rf.jsonl"]
    folder = create(tmp_path / "a b;c", argv=argv)
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == {"actor": {"adam": {"lr": 1e-6}}}
    comment, command = (folder.path / "argv.txt").read_text().splitlines()
    assert comment.startswith("# ") and shlex.split(command) == argv
    env = json.loads((folder.path / "env.json").read_text())
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["cpu_count"] == os.cpu_count()
    assert {"torch", "ray", "deepspeed", "transformers"} <= set(env["versions"])
    assert folder.rollouts_path.is_dir()


def test_versions_are_read_without_importing_the_packages(tmp_path):
    code = (
        "import sys; from openrlhf.observability.run_folder import RunFolder\n"
        f"RunFolder.create({str(tmp_path)!r}, config_yaml='a: 1', argv=['x'], resume=False)\n"
        "assert not {'torch', 'ray', 'vllm', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "argv",
    [
        ["openrlhf", "--logger.wandb.key", SECRET],
        ["openrlhf", f"--logger.wandb.key={SECRET}"],
        ["openrlhf", "--use_wandb", SECRET],
        ["openrlhf", "--reward.api-key", SECRET],
        ["openrlhf", "--reward.url", f"https://user:{SECRET}@example.org/score"],
        ["openrlhf", "--reward.url", f"http://h/a?token={SECRET},http://u:p@{SECRET}@h/b"],
        ["openrlhf", f"--data.dataset=https://h/a.jsonl?X-Amz-Signature={SECRET}&X-Amz-Date=1"],
    ],
)
def test_no_secret_of_the_command_line_is_written(tmp_path, argv):
    create(tmp_path, argv=argv)
    assert "MARKER" not in all_text(tmp_path)


def test_no_secret_of_configuration_or_environment_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET + "1")
    monkeypatch.setenv("HF_TOKEN", SECRET + "2")
    monkeypatch.setenv("RAY_REDIS_PASSWORD", SECRET + "3")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    config = f"logger: {{wandb: {{key: {SECRET}, org: team}}}}\nreward: [http://u:{SECRET}4@h/x, {SECRET}2]\n"
    config += f"remote: http://h/x?api_key={SECRET}5\n"
    create(tmp_path, config=config)
    text = all_text(tmp_path)
    assert "MARKER" not in text and "VLLM_LOGGING_LEVEL" in text
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["logger"]["wandb"] == {
        "key": REDACTED,
        "org": "team",
    }


def test_innocent_words_stay():
    config = "data: {input_key: question, label_key: answer, max_tokens: 5}\nlogger: {wandb: {key: true}}\n"
    argv = ["--logger.wandb.key", "True", "--data.input_key", "question", "--use_wandb", "--eval.steps", "5"]
    assert find_secrets(config, argv, {"RAY_TOKEN": "1", "TOKENIZERS_PARALLELISM": "false1234"}) == set()
    assert redact("key keys my-key", {"key"}) == f"{REDACTED} keys my-key"


def test_an_earlier_run_is_moved_aside_whole(tmp_path):
    first = create(tmp_path, config="a: 1\n")
    first.metrics_path.write_text('{"step": 1}\n')
    (first.rollouts_path / "step_000001.jsonl").write_text("{}\n")
    for name in ("checkpoints", "tensorboard"):
        (tmp_path / name).mkdir()
    second = create(tmp_path, config="a: 2\n")
    assert not second.metrics_path.exists() and list(second.rollouts_path.iterdir()) == []
    create(tmp_path, config="a: 3\n")
    previous = tmp_path / "previous"
    assert (previous / "001/config.yaml").read_text() == "a: 1\n"
    assert (previous / "001/metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (previous / "001/rollouts/step_000001.jsonl").exists() and (previous / "001/tensorboard").exists()
    assert (previous / "002/config.yaml").read_text() == "a: 2\n"
    assert (tmp_path / "config.yaml").read_text() == "a: 3\n"
    assert (tmp_path / "checkpoints").is_dir()


def test_a_resumed_run_keeps_every_configuration_it_had(tmp_path):
    for config in ("a: 1\n", "a: 1\n", "a: 2\n", "a: 3\n"):
        create(tmp_path, config=config, resume=True)
    assert (tmp_path / "config.1.yaml").read_text() == "a: 1\n"
    assert (tmp_path / "config.2.yaml").read_text() == "a: 2\n"
    assert (tmp_path / "config.yaml").read_text() == "a: 3\n"
    assert len(list(tmp_path.glob("config*"))) == 3
    assert (tmp_path / "argv.txt").read_text().count("resuming") == 4


def test_each_step_is_there_once_after_100_restarts(tmp_path):
    """Each run is killed somewhere, with a checkpoint every 7 steps and often half a line at the end."""
    restored = 0
    for restart in range(100):
        folder = RunFolder(tmp_path) if restart % 10 else create(tmp_path, resume=True)
        folder.rewind(restored)
        tracker = JsonlTracker(folder.metrics_path)
        reached = restored + restart % 11
        for step in range(restored + 1, reached + 1):
            tracker.log(step, {"attempt": restart})
            suffix = "parquet" if restart > 50 else "jsonl"
            (folder.rollouts_path / f"step_{step:06d}.{suffix}").write_text(str(restart))
        tracker.close()
        if restart % 3:
            with open(folder.metrics_path, "a") as file:
                file.write(f'{{"step": {reached + 1}, "attem')
            (folder.rollouts_path / f".step_{reached + 1:06d}.parquet.tmp").write_text("PAR1")
        restored = reached // 7 * 7
    steps = [row["step"] for row in read_jsonl(folder.metrics_path)]
    assert steps == list(range(1, reached + 1)) and reached > 100
    attempts = read_metrics(folder.metrics_path)
    for path in folder.rollouts_path.iterdir():
        assert float(path.read_text()) == attempts[int(path.stem[5:])]["attempt"]
    assert len(list(folder.rollouts_path.iterdir())) == reached


def test_metrics_of_earlier_versions_are_read_by_the_names_of_today(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "timing/score": 2.5, "memory/score_gb": 1, "timing/update": 3}\n')
    assert read_metrics(path) == {1: {"timing/logprobs": 2.5, "memory/logprobs_gb": 1, "timing/update": 3}}


def test_rewind_when_there_is_nothing(tmp_path):
    folder = create(tmp_path, resume=True)
    folder.rewind(10)
    assert not folder.metrics_path.exists()


def test_json_is_strict_and_numbers_come_back():
    line = to_json({"a": [float("nan"), 1.5], "b": float("-inf"), "c": {"d": float("inf")}, "e": {1}})
    row = json.loads(line, parse_constant=pytest.fail)
    assert row == {"a": ["NaN", 1.5], "b": "-Infinity", "c": {"d": "Infinity"}, "e": "{1}"}
    assert float(row["b"]) == float("-inf") and float(row["a"][0]) != float(row["a"][0])


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with refused(ErrorCode.UNREADABLE, value=path, row=2):
        list(read_jsonl(path))
    path.write_bytes(b'{"step": 1}\n{"step": 2, "text": "\xc3')
    assert list(read_jsonl(path)) == [{"step": 1}]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
@pytest.mark.parametrize("name", ["config.yaml", "env.json"])
def test_a_damaged_record_of_an_earlier_start_is_kept_beside_the_new_one(tmp_path, kind, name) -> None:
    start = partial(RunFolder.create, tmp_path, config_yaml="seed: 1", argv=["run"])
    start(resume=False)
    put_in_place(kind, tmp_path / name)
    start(resume=True)
    assert RunFolder(tmp_path).read_config() == {"seed": 1}
    stem, _, ending = name.partition(".")
    assert os.path.lexists(tmp_path / f"{stem}.1.{ending}") and (tmp_path / name).is_file()


@pytest.mark.parametrize("line", ["7", "[1, 2]", "[" * 100_000, '"text"'])
def test_a_line_that_is_no_row_is_told_by_its_number(tmp_path, line) -> None:
    folder = RunFolder.create(tmp_path, config_yaml="{}", argv=["run"], resume=False)
    folder.health_path.write_text('{"text": "of no step"}\n{"step": 3, "text": "later"}\n')
    folder.rewind(2)
    assert folder.health_path.read_text() == '{"text": "of no step"}\n'
    folder.health_path.write_text(f'{{"step": 1}}\n{line}\n')
    with refused(ErrorCode.UNREADABLE, value=folder.health_path, row=2):
        folder.rewind(2)


def test_a_commit_is_named_by_its_hash_although_it_has_a_tag(tmp_path):
    """With changes of files it is dirty; a folder without a repository has none."""
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]

    def git(*words):
        command = ["git", "-C", str(tmp_path), *own, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    assert run_folder._git_commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("init", "--quiet")
    git("add", "file")
    git("commit", "--quiet", "--message", "first")
    git("tag", "--annotate", "v1", "--message", "a release")
    sha = git("rev-parse", "HEAD")
    assert run_folder._git_commit(tmp_path) == sha
    (tmp_path / "file").write_text("2")
    assert run_folder._git_commit(tmp_path) == f"{sha}-dirty"
