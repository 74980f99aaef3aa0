import pytest

from openrlhf.config.parse import parse


@pytest.fixture
def say(tmp_path, capsys, monkeypatch):
    """Returns say(command, "--flags …") -> (config or None, lines of stderr); it adds the flags that every
    sane command line has."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("")
    supervised = "--model.model_name_or_path org/model --data.dataset org/rows "
    responses = supervised + "--data.output_key out --data.input_template None"
    base = {
        "sft": responses,
        "rm": supervised,
        "prm": supervised + "--data.placeholder_token #",
        "dpo": supervised,
        "kto": responses,
        "kd": responses + " --teacher.model_name_or_path org/teacher",
        "ppo": "--actor.model_name_or_path org/model --data.prompt_dataset org/rows "
        "--reward.remote_url reward.py --algo.advantage.estimator reinforce",
        "serve_rm": "--reward.model_name_or_path org/model",
        "batch_inference": f"{supervised} --output_path out.jsonl --task rm",
        "chat": "--model.model_name_or_path org/model",
    }

    def say(command, line):
        argv = [*base[command.name].split(), *(line.split() if isinstance(line, str) else line)]
        try:
            config = parse(command, argv).config
        except SystemExit as exit_:
            assert exit_.code == 2
            config = None
        return config, capsys.readouterr().err.splitlines()

    return say


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """The optional packages that a command finds."""
    names = {"deepspeed", "vllm"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in names or None)
    return names
