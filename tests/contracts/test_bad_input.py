"""What people get wrong, through the commands as they are run: every mistake ends at once with code 2 and
names the flag or file, the value and what to do, before any model is loaded."""

import json
from pathlib import Path

import pytest
import ray
import torch.distributed as dist

from openrlhf.cli import train_ppo_ray, train_sft
from openrlhf.tasks.tiny_model import tiny_chat_model

SFT = ("--ds.zero_stage", "0", "--ds.param_dtype", "fp32", "--data.apply_chat_template")
PPO = (
    *("--algo.advantage.estimator", "rloo", "--algo.kl.init_coef", "0", "--data.apply_chat_template"),
    *("--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "2", "--train.batch_size", "16"),
    *("--actor.num_gpus_per_node", "1", "--ds.param_dtype", "fp32"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(40)]
    made = {
        "model": tiny_chat_model(folder / "model"),
        "data": folder / "train.jsonl",
        "reward": folder / "reward.py",
        "no_reward": folder / "no_reward.py",
        "broken_reward": folder / "broken_reward.py",
        "empty": folder / "empty",
        "broken": folder / "broken.jsonl",
        "nothing": folder / "nothing.jsonl",
    }
    made["data"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    made["reward"].write_text("def reward_func(queries, prompts, labels): return [1.0]\n")
    made["no_reward"].write_text("def judge(queries, prompts, labels): return [1.0]\n")
    made["broken_reward"].write_text("x = 1\ndef reward_func(queries, prompts, labels) return [1.0]\n")
    made["broken"].write_text('{"question": "1 + 1?"}\n{"question": 1 +\n')
    made["nothing"].write_text("")
    made["empty"].mkdir()
    return {name: str(path) for name, path in made.items()}


@pytest.fixture
def refused(files, tmp_path, capsys):
    """Run a command with good flags and these changes; returns what it printed, after the checks that hold
    for every refusal."""

    def run(command: str, *changes: str, problems: int = 1) -> str:
        output = ["--ckpt.output_dir", str(tmp_path / "out"), "--ckpt.path", str(tmp_path / "ckpt")]
        sft = ["--model.model_name_or_path", files["model"], "--data.dataset", files["data"]]
        sft += ["--data.input_key", "question", "--data.output_key", "answer", *SFT]
        ppo = ["--actor.model_name_or_path", files["model"], "--data.prompt_dataset", files["data"]]
        ppo += ["--data.input_key", "question", "--reward.remote_url", files["reward"], *PPO]
        main, flags = {"sft": (train_sft.main, sft), "ppo": (train_ppo_ray.main, ppo)}[command]
        with pytest.raises(SystemExit) as stop:
            main([*flags, *output, *changes])
        printed = capsys.readouterr()
        assert stop.value.code == 2
        assert "Traceback" not in printed.err and printed.out == ""
        lines = printed.err.strip().splitlines()
        assert sum(line.startswith("error: ") for line in lines) == problems
        assert lines[0].startswith("error: ")
        closing = lines[-1].endswith("explains flags.")  # after what was wrong between flags
        assert len(lines) - closing <= 3 * problems, printed.err
        assert not dist.is_initialized() and not ray.is_initialized()
        assert list(tmp_path.iterdir()) == []
        return printed.err

    return run


MODEL = {"sft": "--model.model_name_or_path", "ppo": "--actor.model_name_or_path"}
DATASET = {"sft": "--data.dataset", "ppo": "--data.prompt_dataset"}
COMMANDS = ("sft", "ppo")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there(refused, files, command):
    wrong = files["model"] + "s"
    text = refused(command, MODEL[command], wrong)
    assert f"error: {MODEL[command]} {wrong}: does not exist; near it: model" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_model(refused, files, command):
    text = refused(command, MODEL[command], files["empty"])
    assert f"error: {MODEL[command]} {files['empty']}: no model configuration could be loaded" in text
    assert "Give a folder that holds config.json and weights, or the name of a model on the hub." in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dataset_that_is_not_there(refused, files, command):
    wrong = files["data"].replace("train", "trian")
    text = refused(command, DATASET[command], wrong)
    assert f"error: {DATASET[command]} {wrong}: does not exist; near it: train.jsonl" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_line_that_is_not_json(refused, files, command):
    text = refused(command, DATASET[command], files["broken"])
    assert f"{DATASET[command]} {files['broken']}:2: not JSON" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dataset_without_rows(refused, files, command):
    text = refused(command, DATASET[command], files["nothing"])
    assert f"error: {DATASET[command]} {files['nothing']}: it is empty." in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_data(refused, files, command):
    text = refused(command, DATASET[command], files["empty"])
    assert f"error: {DATASET[command]} {files['empty']}: no .jsonl, " in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_column_that_the_dataset_does_not_have(refused, files, command):
    text = refused(command, "--data.input_key", "questions")
    assert f"error: --data.input_key questions: {files['data']} has no such column." in text
    assert "Its columns: question, answer" in text
    assert "Did you mean question?" in text


@pytest.mark.parametrize(("command", "flag"), [("sft", "--data.output_key"), ("ppo", "--data.label_key")])
def test_other_columns(refused, files, command, flag):
    text = refused(command, flag, "solution")
    assert (
        f"error: {flag} solution: {files['data']} has no such column.\nIts columns: question, answer" in text
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_columns_of_the_evaluation_set(refused, files, tmp_path_factory, command):
    other = tmp_path_factory.mktemp("other") / "eval.jsonl"
    other.write_text('{"prompt": "1 + 1?"}\n')
    text = refused(command, "--eval.dataset", str(other), "--eval.steps", "1")
    assert f"error: --data.input_key question: {other} has no such column.\nIts columns: prompt" in text


def test_a_reward_file_without_the_function(refused, files):
    text = refused("ppo", "--reward.remote_url", files["no_reward"])
    assert f"error: --reward.remote_url {files['no_reward']}: the file has no reward_func" in text
    assert "(it defines judge)" in text
    assert "Define `def reward_func(queries, prompts, labels)` that returns {'rewards': [...]}" in text


def test_a_reward_file_with_an_error_of_syntax(refused, files):
    text = refused("ppo", "--reward.remote_url", files["broken_reward"])
    assert f"error: --reward.remote_url {files['broken_reward']}: line 2: expected ':'" in text


def test_a_reward_file_that_is_not_there(refused, files):
    wrong = files["reward"].replace("reward.py", "rewards.py")
    text = refused("ppo", "--reward.remote_url", wrong)
    assert f"error: --reward.remote_url {wrong}: does not exist; near it: reward.py" in text


def test_no_source_of_rewards(refused):
    text = refused("ppo", "--reward.remote_url", "None")
    assert "--reward.remote_url: nothing gives a reward; name a .py file with reward_func" in text


def test_a_group_of_one(refused):
    text = refused("ppo", "--rollout.n_samples_per_prompt", "1", "--train.batch_size", "8")
    assert (
        "error: --rollout.n_samples_per_prompt 1: estimator rloo compares the samples of one prompt" in text
    )
    assert "use 2 or more" in text


def test_a_batch_that_does_not_divide_the_samples(refused):
    text = refused("ppo", "--train.batch_size", "10")
    assert "error: --train.batch_size 10: a step makes 8 prompts x 2 = 16 samples" in text
    assert "use 8 or 16" in text


def test_a_batch_that_does_not_divide_among_ranks(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = refused("sft", "--train.batch_size", "16", "--train.micro_batch_size", "1")
    assert "error: --train.batch_size 16: does not divide among 3 ranks; use 15 or 18" in text


def test_a_batch_that_does_not_fill_rows(refused):
    text = refused("sft", "--train.batch_size", "10", "--train.micro_batch_size", "4")
    assert "error: --train.batch_size 10: is not a multiple of 1 ranks x train.micro_batch_size 4 = 4" in text
    assert "use 8 or 12" in text


def test_no_room_for_a_prompt(refused):
    text = refused("ppo", "--rollout.max_new_tokens", "2048")
    assert "error: --rollout.max_new_tokens 2048: leaves no room for a prompt in data.max_len 2048" in text


def test_a_flag_that_does_not_exist(refused):
    text = refused("ppo", "--actor.adam.learning_rate", "1e-3")
    assert "--actor.adam.learning_rate" in text and "--actor.adam.lr" in text


def test_everything_at_once(refused, files):
    """A user mends a command in one round, not in five."""
    text = refused(
        "ppo",
        *("--actor.model_name_or_path", "./no/such/model", "--data.prompt_dataset", "./no/such.jsonl"),
        *("--reward.remote_url", "./no_reward.py", "--rollout.n_samples_per_prompt", "1"),
        *("--train.batch_size", "3", "--actor.adam.lr", "fast"),
        problems=6,
    )
    for flag in ("--actor.model_name_or_path", "--data.prompt_dataset", "--reward.remote_url"):
        assert f"error: {flag} ./no" in text
    assert "6 problems; nothing was started." in text


def test_more_ranks_than_the_cluster_has():
    from openrlhf.cluster.launch import resource_problems
    from openrlhf.config.commands import PPO as COMMAND
    from openrlhf.config.parse import parse

    here = str(Path(__file__).parent)
    flags = [
        "--actor.model_name_or_path",
        here,
        "--data.prompt_dataset",
        here,
        "--reward.remote_url",
        __file__,
    ]
    config = parse(COMMAND, [*flags, *PPO, "--actor.num_gpus_per_node", "8"]).config
    (problem,) = resource_problems(config, {"CPU": 2.0})
    assert "--actor.num_gpus_per_node asks for 8 ranks" in problem and "2 CPU cores" in problem
    assert "Ask for at most 2." in problem and len(problem.splitlines()) <= 3
    (problem,) = resource_problems(config, {"CPU": 64.0, "GPU": 4.0})
    assert "needs 9 GPUs" in problem and "the cluster has 4" in problem
    assert "Ask for fewer, or share them with --train.colocate_all" in problem
    assert len(problem.splitlines()) <= 3
