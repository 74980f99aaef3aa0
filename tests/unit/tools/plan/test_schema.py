"""The JSON Schema of YAML files: it accepts all that ship, and refuses what the parser refuses."""

import json
import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from openrlhf.config import commands
from openrlhf.config.command import Command
from openrlhf.config.parse import parse, to_yaml
from openrlhf.tools.command_line.run_files import TRAINING
from openrlhf.tools.plan.init import RECIPES, render
from openrlhf.tools.plan.schema import main, schema

DOCS = Path(__file__).parents[4] / "docs"
COMMANDS = {command.name: command for command in commands.COMMANDS}


class Loader(yaml.SafeLoader):
    """Reads `5e-7` as a number, as YAML 1.2 and editors do."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def problems(command: Command, text: str) -> list[str]:
    validator = Draft202012Validator(schema(command))
    return [error.message for error in validator.iter_errors(yaml.load(text, Loader))]


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: command.name)
def test_the_defaults_of_a_command(command: Command, capsys: pytest.CaptureFixture) -> None:
    Draft202012Validator.check_schema(schema(command))
    assert problems(command, to_yaml(command.config_type())) == []
    main([command.name])
    assert json.loads(capsys.readouterr().out)["properties"]["train"]["properties"]["seed"] == {
        "type": "integer",
        "minimum": 0,
        "default": 42,
        "description": "Seed of all random numbers: order of the data, new weights, dropout and sampling.",
    }


@pytest.mark.parametrize("what", RECIPES)
@pytest.mark.parametrize("gpus", [0, 1, 16])
def test_the_recipes(what: str, gpus: int) -> None:
    text = render(what=what, model="m", data="d", reward="r.py", gpus=gpus, output="o", row={})
    name = "ppo" if RECIPES[what].settings or what.startswith("rl") else what
    assert problems(COMMANDS[name], text) == []


def test_the_files_on_the_pages() -> None:
    """Their first line names the file, as `# sft.yaml`; other files are of `openrlhf ppo`."""
    blocks = [
        block
        for page in DOCS.glob("*.md")
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        if not yaml.safe_load(block).keys() & {"policy_model"}  # of NeMo Gym
    ]
    assert len(blocks) >= 2
    named = [re.match(r"# (\w+)\.yaml\n", block) for block in blocks]
    commands = [COMMANDS.get(found[1] if found else "ppo", COMMANDS["ppo"]) for found in named]
    assert list(map(problems, commands, blocks)) == [[]] * len(blocks)


WRONG = {
    "an unknown key": "actor: {max_nrom: 1}",
    "an unknown section": "actr: {max_norm: 1}",
    "a text for a number": "actor: {max_norm: large}",
    "a fraction for a whole number": "rollout: {batch_size: 1.5}",
    "a number out of its range": "rollout: {top_p: 1.5}",
    "a number at an open bound": "actor: {eps_clip: 0}",
    "a name that is no choice": "algo: {kl: {estimator: k9}}",
    "a word for a switch": "ds: {overlap_comm: maybe}",
    "a value for a section": "actor: 5",
    "too many items": "reward: {clip_range: [1, 2, 3]}",
    "a list for a word": "actor: {model_name_or_path: [[a]]}",
    "a dotted number out of its range": "rollout.top_p: 1.5",
    "an unknown dotted key": "actor: {adam.rl: 1}",
    "a list of options": "vllm: {engine_args: [1]}",
}
RIGHT = {
    "short forms": "reward: {clip_range: '-1,1'}\nds: {lora: {target_modules: q_proj}}",
    "numbers": "actor: {adam: {lr: 5e-7, betas: [0.9, 0.99]}, max_norm: 1}\ntrain: {seed: 7}",
    "dotted keys": "actor.adam: {lr: 1}\nalgo: {kl.estimator: k3}\nrollout.top_p: 0.5",
    "nothing": "actor:\nreward: {model_name_or_path: null}",
    "users' classes": "algo: {advantage: {estimator: mine.py:Mine}}",
    "options": "vllm: {engine_args: {quantization: fp8}}\nds: {config: ds.json}",
    "booleans among names": "ds: {share_prefixes: true}\nalgo: {skip_old_log_probs: auto}",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_schema_and_parser_refuse(text: str, tmp_path: Path) -> None:
    assert problems(COMMANDS["ppo"], text)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError):
        parse(COMMANDS["ppo"], ["--config", str(tmp_path / "run.yaml"), *RUN], raises=True)


RUN = [
    "--actor.model_name_or_path",
    "x/y",
    "--data.prompt_dataset",
    "a/b",
    "--reward.remote_url",
    "http://h:1/get_reward",
]


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_schema_and_parser_accept(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(COMMANDS["ppo"], text) == []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from openrlhf.algorithms.advantages.reinforce import Reinforce\n\nclass Mine(Reinforce): ..."
    )
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "run.yaml").write_text(text)
    parse(COMMANDS["ppo"], ["--config", "run.yaml", *RUN], raises=True)
