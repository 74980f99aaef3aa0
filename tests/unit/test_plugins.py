"""Rewards and agents by reference: in a file, in a module, registered by an installed package."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import printed, refused

from openrlhf import plugins
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.errors import ErrorCode
from openrlhf.rewards.function import RewardFunction, check_reward_file
from openrlhf.rollout.executors import UserExecutor, check_agent_file
from openrlhf.user_file import UserFiles

REWARD, AGENT = "--reward.remote_url", "--train.agent_func_path"
FLAGS = "--actor.model_name_or_path org/model --data.prompt_dataset org/rows --rollout.n_samples_per_prompt 2"
JUDGE = "def judge(queries, prompts, labels):\n    return [7.0] * len(queries)\n"
EXECUTORS = """
from openrlhf.agents.base import AgentExecutorBase

class Mine(AgentExecutorBase):
    async def execute(self, prompt):
        return {"reward": float(len(prompt))}

class Bare(AgentExecutorBase):
    pass

def run(): pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Installs a package `house` with a reward and an agent that it registers."""
    folder = tmp_path / "site" / "house"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "rewards.py").write_text(JUDGE)
    (folder / "agents.py").write_text(EXECUTORS)
    (folder / "broken.py").write_text("x = 1\nimport no_such_package\n")
    info = folder.with_name("house-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[openrlhf.rewards]\njudge = house.rewards:judge\n\n[openrlhf.agents]\nmine = house.agents:Mine\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def value_of(reference: str) -> float:
    function = RewardFunction(reference, timeout=60)
    reward = asyncio.run(function("", "", None)).reward
    function.close()
    return reward


@pytest.mark.processes
def test_a_reward_function_has_any_name_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(JUDGE)
    config = parse(PPO, f"{FLAGS} {REWARD} score.py:judge".split()).config
    assert config.reward_function == "score.py:judge"
    assert check_reward_file(config.reward_function, REWARD) == ""
    assert value_of(config.reward_function) == 7


def test_a_registered_name_stands_for_its_function(package: Path) -> None:
    for name in ("house.rewards:judge", "judge"):
        config = parse(PPO, [*FLAGS.split(), REWARD, name]).config
        assert config.reward_function == "house.rewards:judge"


@pytest.mark.processes
def test_the_processes_that_call_a_function_import_its_module(package: Path) -> None:
    assert check_reward_file("house.rewards:judge", REWARD) == ""
    assert value_of("house.rewards:judge") == 7


@pytest.mark.processes
@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("house.rewards:mark", "the module has no mark (its functions: judge).\nDefine `def mark(queries"),
        (
            "house.broken:judge",
            "line 2: ModuleNotFoundError: No module named 'no_such_package'\nFix that line",
        ),
        (
            "huose.rewards:judge",
            "ModuleNotFoundError: No module named 'huose'.\nInstall the package on every machine, or add its "
            "folder to PYTHONPATH, or name a file: folder/file.py:judge.",
        ),
        ("house.marks:judge", "ModuleNotFoundError: No module named 'house.marks'.\nInstall the package"),
    ],
)
def test_modules_that_have_no_reward(package: Path, reference: str, text: str) -> None:
    with pytest.raises(ValueError) as error:
        check_reward_file(reference, REWARD)
    assert str(error.value).startswith(f"{REWARD} {reference}: {text}")


def test_a_name_that_nobody_registers(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(PPO, [*FLAGS.split(), REWARD, "juge", AGENT, "mien"])
    errors = printed(capsys.readouterr().err)
    for place, registered in ((f"{REWARD} juge", "judge"), (f"{AGENT} mien", "mine")):
        (error,) = (error for error in errors if error.place == place)
        assert error.code is ErrorCode.INVALID_VALUE and f" {registered}" in error.text


@pytest.mark.processes
def test_an_agent_of_any_name_is_accepted(package: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(EXECUTORS)
    for reference in (f"{tmp_path}/agent.py:Mine", "house.agents:Mine"):
        assert check_agent_file(reference, AGENT) == ""


def test_an_agent_of_any_name(package: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(EXECUTORS)
    assert parse(PPO, [*FLAGS.split(), AGENT, "mine"]).config.train.agent == "house.agents:Mine"
    for reference in (f"{tmp_path}/agent.py:Mine", "house.agents:Mine"):
        executor = asyncio.run(UserExecutor.load(reference))
        assert asyncio.run(executor.execute("four", None, None, 9, None, None)) == {"reward": 4.0}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Other", "the {} has no class Other (its classes: Mine, Bare)"),
        ("run", "the {} has no class run (its classes: Mine, Bare)"),
        ("Bare", "Bare does not define execute.\nDefine `class Bare(AgentExecutorBase)`"),
    ],
)
def test_classes_that_are_no_agents(package: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "agent.py").write_text(EXECUTORS)
    for place, kind in ((f"{tmp_path}/agent.py", "file"), ("house.agents", "module")):
        with pytest.raises(ValueError) as error:
            check_agent_file(f"{place}:{name}", AGENT)
        assert str(error.value).startswith(f"{AGENT} {place}:{name}: {text.format(kind)}")


@pytest.mark.processes
def test_environments_of_ours_by_their_names() -> None:
    environments = "openrlhf.environments"
    assert check_agent_file(f"{environments}.reasoning_gym:ReasoningGymExecutor", AGENT) == ""
    assert check_agent_file(f"{environments}.textarena:TextArenaExecutor", AGENT) == ""
    with pytest.raises(ValueError, match=r"GymExecutor .* make"):
        check_agent_file(f"{environments}.gym:GymExecutor", AGENT)


def test_every_machine_has_the_file_and_must_have_the_module(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(JUDGE)
    file, module = f"{path}:judge", "house.rewards:judge"
    files = UserFiles.of(file, module, None)
    assert (files.here(file), files.here(module)) == (file, module)
    path.unlink()
    copy, _, name = files.here(file).rpartition(":")
    assert (Path(copy).read_text(), name) == (JUDGE, "judge")
    (package / "rewards.py").write_text(JUDGE.replace("7.0", "0.0"))
    with refused(ErrorCode.USER_CODE, value=module, told=str(package / "rewards.py")):
        files.here(module)
    (package / "rewards.py").unlink()
    with refused(ErrorCode.USER_CODE, value=module) as told:
        files.here(module)
    assert "rewards.py" not in told.value.text and "folder/file.py:judge" in told.value.text


def test_a_fingerprint_follows_the_source(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "score.py"
    path.write_text(JUDGE)
    same = plugins.digest("house.rewards:judge")
    assert plugins.digest(f"{path}:judge") == plugins.digest(str(path)) == same
    (package / "rewards.py").write_text(JUDGE.replace("7.0", "0.0"))
    assert plugins.digest("house.rewards:judge") != same


def test_what_a_file_lacks_is_told_with_what_it_has(tmp_path: Path) -> None:
    """The flag and the reference are not in the message: who reads the flag names both."""
    path = tmp_path / "score.py"
    path.write_text(JUDGE)
    assert plugins.load(f"{path}:judge")([1], [1], [1]) == [7.0]
    with refused(ErrorCode.USER_CODE, flag="", value="", told=(str(path), "no mark", "judge")):
        plugins.load(f"{path}:mark")
    path.write_text("x = 1\nopen('/no/such/file')\n")
    with refused(ErrorCode.USER_CODE, flag="", value="") as told:
        plugins.load(f"{path}:judge")
    assert told.value.text.startswith("line 2: FileNotFoundError")
    path.unlink()
    with refused(ErrorCode.USER_CODE, flag="", value="", told=str(path)):
        plugins.load(f"{path}:judge")


# ---- what lies beside a file


BESIDE = {
    "mine.py": "from shared_judge import judge\ndef reward_func(*lists):\n    return judge(*lists)\n",
    "shared_judge.py": "def judge(*lists):\n    from parts import seven\n    return seven.SEVEN\n",
    "parts/__init__.py": "",
    "parts/seven.py": "from .numbers import SEVEN\n",
    "parts/numbers.py": "SEVEN = [7.0]\n",
    "unused.py": "raise OSError\n",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def own_modules() -> Iterator[None]:
    """Takes back what imports of files add to this process."""
    paths, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith("/tmp"):
            del sys.modules[name]


@pytest.mark.processes
def test_modules_beside_a_file_are_imported_from_any_folder(tmp_path, monkeypatch, own_modules):
    folder = written(tmp_path / "beside", BESIDE)
    written(folder, {"agent.py": "import parts.seven\n" + EXECUTORS})
    monkeypatch.chdir(tmp_path)
    assert check_reward_file("beside/mine.py", REWARD) == ""
    assert value_of("beside/mine.py") == 7
    assert plugins.load("beside/mine.py:reward_func")([], [], []) == [7.0]  # algorithms and trackers
    assert check_agent_file("beside/agent.py:Mine", AGENT) == ""
    executor = asyncio.run(UserExecutor.load("beside/agent.py:Mine"))
    assert type(executor.executor).__name__ == "Mine"


@pytest.mark.processes
@pytest.mark.parametrize("is_package", [True, False])
def test_modules_beside_a_file_go_with_it_to_other_machines(tmp_path, monkeypatch, is_package):
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path / "here", BESIDE) / "mine.py"
    if not is_package:
        (path.parent / "parts" / "__init__.py").unlink()
    files, before = UserFiles.of(str(path)), plugins.digest(str(path))
    assert files.here(str(path)) == str(path)
    (path.parent / "unused.py").unlink()
    assert files.here(str(path)) == str(path)
    (path.parent / "parts" / "numbers.py").write_text("SEVEN = [8.0]\n")
    assert plugins.digest(str(path)) != before
    copy = files.here(str(path))
    assert copy != str(path) and value_of(str(path)) == 8 and value_of(copy) == 7
    assert not (Path(copy).parent / "unused.py").exists()


def test_a_module_beside_a_file_is_never_taken_for_another(tmp_path: Path, own_modules: None) -> None:
    """Files of equal names have their own modules, or are refused; a package is replaced by no file."""
    source = "import {} as other\ndef value(): return other.__file__\n"
    first, second = (
        written(tmp_path / name, {"a_file.py": source.format("its_own"), "its_own.py": f"NAME = {name!r}"})
        for name in ("first", "second")
    )
    assert plugins.load(f"{first}/a_file.py:value")() == str(first / "its_own.py")
    with refused(ErrorCode.USER_CODE, flag="", value="") as told:
        plugins.load(f"{second}/a_file.py:value")
    assert all(str(folder / "its_own.py") in told.value.text for folder in (first, second))
    (second / "its_own.py").rename(second / "own_name.py")
    (second / "a_file.py").write_text(source.format("own_name"))
    assert plugins.load(f"{second}/a_file.py:value")() == str(second / "own_name.py")
    assert sys.modules["a_file"].__file__ == str(first / "a_file.py")
    shadows = written(tmp_path / "shadows", {"random.py": source.format("yaml"), "numpy/data.txt": ""})
    assert "site-packages/yaml" in plugins.load(f"{shadows}/random.py:value")()
    assert "shadows" not in str(sys.modules["random"].__file__)
    written(shadows, {"yaml.py": "x = 1\n"})
    with refused(ErrorCode.USER_CODE, flag="", value="", told=(str(shadows / "yaml.py"), "Rename")):
        plugins.load(f"{shadows}/random.py:value")


@pytest.mark.processes
def test_a_module_that_is_nowhere_is_told_with_the_places(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1\nimport nowhere_at_all\n")
    with refused(ErrorCode.USER_CODE, flag=REWARD, value=str(path)) as told:
        check_reward_file(str(path), REWARD)
    assert "line 2: ModuleNotFoundError" in told.value.text
    assert "beside it" in told.value.text and "PYTHONPATH" in told.value.text
