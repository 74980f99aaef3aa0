"""Access from outside to code, secrets and ports."""

import ast
import json
import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from refusals import printed, refused

from openrlhf.backends.distributed import _store_at_its_address, free_port
from openrlhf.backends.random_state import load_random_state
from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.serve_rm import KEY_VARIABLE
from openrlhf.errors import ErrorCode
from openrlhf.files import check_owner
from openrlhf.observability.model_card import write_model_card
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.trackers.wandb import key_of
from openrlhf.training.origin import Origin, compare

PACKAGE = Path(__file__).parents[2] / "openrlhf"
WITHOUT_CODE = {"GenerationConfig", "PeftConfig", "PeftModel"}
"""Classes that never load code of a model."""


def loading_calls() -> list[tuple[str, ast.Call]]:
    """Returns (place, call) of each call that may load code of a model."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                name = owner.id if isinstance(owner, ast.Name) else ""
                is_loading = node.func.attr in ("from_pretrained", "from_config") and (
                    name.startswith("Auto") or name == "auto_class"
                )
                if is_loading and name not in WITHOUT_CODE:
                    found.append((f"{file.name}:{node.lineno}", node))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AsyncEngineArgs":
                found.append((f"{file.name}:{node.lineno}", node))
    return found


def test_code_of_models_is_refused_without_a_question() -> None:
    calls = loading_calls()
    assert len(calls) > 10
    for place, call in calls:
        options = {option.arg: option.value for option in call.keywords}
        asked = options.get("trust_remote_code")
        assert isinstance(asked, ast.Constant) and asked.value is False, place


def test_ranks_meet_at_one_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = _store_at_its_address(0, 2, timedelta(seconds=10))
    assert store is not None
    listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]
    other = _store_at_its_address(1, 2, timedelta(seconds=10))
    store.set("name", "value")
    assert other is not None and other.get("name") == b"value"


@pytest.mark.parametrize(
    ("address", "launcher"), [("some-host", None), ("127.0.0.1", "torchrun")], ids=["host name", "torchrun"]
)
def test_a_launchers_store_is_used(
    monkeypatch: pytest.MonkeyPatch, address: str, launcher: str | None
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    assert _store_at_its_address(0, 2, timedelta(seconds=1)) is None


def test_a_checkpoint_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.stat(tmp_path).st_uid
    check_owner(tmp_path, "--ckpt.path")
    stat = os.stat
    theirs = os.stat_result((*stat(tmp_path)[:4], owner + 1000, *stat(tmp_path)[5:]))
    monkeypatch.setattr(os, "stat", lambda path, **options: theirs)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with refused(ErrorCode.UNREADABLE, flag="--ckpt.path", value=tmp_path):
        check_owner(tmp_path, "--ckpt.path")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    check_owner(tmp_path, "--ckpt.path")


class Evil:
    def __reduce__(self):
        return os.system, ("touch owned",)


def test_random_states_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"num_ranks": 1, "python": Evil()}, tmp_path / "random_state_0.pt")
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.path", value=tmp_path / "random_state_0.pt"):
        load_random_state(tmp_path, 0, 1)
    assert not (tmp_path / "owned").exists()


def test_a_new_run_folder_is_of_its_owner_alone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a" / "run", config_yaml="adam: 1\n", argv=["openrlhf"], resume=False)
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    RunFolder.create(tmp_path / "shared", config_yaml="adam: 1\n", argv=["openrlhf"], resume=False)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755, "the user's own folder stays as it is"


def test_the_key_of_a_tracker_can_stay_out_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("MARKER\n")
    assert key_of(f"@{tmp_path}/key") == "MARKER"
    assert key_of("MARKER") == "MARKER"
    with refused(ErrorCode.NOT_FOUND, flag="--logger.wandb.key", value="@nothing"):
        key_of("@nothing")


def test_a_users_url_and_a_key_are_refused_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request carries one of them. Neither is in the message."""
    flags = "--actor.model_name_or_path org/model --data.prompt_dataset org/rows"
    argv = [*flags.split(), "--reward.remote_url", "http://user:MARKER@host/get_reward"]
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert parse(PPO, argv).config.reward.servers == ("http://user:MARKER@host/get_reward",)
    monkeypatch.setenv(KEY_VARIABLE, "a-MARKER-of-another-kind")
    with pytest.raises(SystemExit):
        parse(PPO, argv)
    (refusal,) = printed(said := capsys.readouterr().err)
    assert refusal.code == "conflict" and KEY_VARIABLE in refusal.text and "MARKER" not in said


def test_what_a_url_holds_is_in_no_file_of_a_run(tmp_path: Path) -> None:
    """The same run resumes, and its configuration alone is refused, since it would call another server."""
    flags = "--actor.model_name_or_path org/model --data.prompt_dataset org/rows --logger.run_dir"
    url = "http://user:MARKER@host/get_reward?token=MARKER&model=a"
    argv = [*flags.split(), str(tmp_path / "run"), "--reward.remote_url", url]
    config = parse(PPO, argv).config
    run = RunFolder.create(tmp_path / "run", config_yaml=to_yaml(config), argv=argv, resume=False)
    run.metrics_path.write_text('{"step": 1, "loss": 0.5}\n')
    shown = {"command": "train_ppo", "method": "", "base_model": "org/model", "datasets": ()}
    card = write_model_card(tmp_path, run, **shown).read_text()
    origin = Origin.of("ppo", config, {})
    files = [file.read_text() for file in run.path.iterdir() if file.is_file()]
    assert "MARKER" not in "".join([card, json.dumps(origin.as_dict()), *files])
    assert "host/get_reward?token=<redacted>&model=a" in card
    assert compare(origin, Origin.of("ppo", parse(PPO, argv).config, {})) == ([], [])
    with pytest.raises(SystemExit):
        parse(PPO, ["--config", str(run.path / "config.yaml")])
    again = parse(PPO, ["--config", str(run.path / "config.yaml"), "--reward.remote_url", url])
    assert again.config.reward.servers == (url,)
