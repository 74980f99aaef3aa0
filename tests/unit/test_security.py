"""Access from outside to code, secrets and ports."""

import ast
import io
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from refusals import printed, refused
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from transformers import AutoTokenizer

from openrlhf.backends.deepspeed.moving_average import MovingAverage
from openrlhf.backends.distributed import ProcessMesh, _store_at_its_address, free_port
from openrlhf.checkpoint import pickles
from openrlhf.checkpoint.dcp import forged, load_tensors
from openrlhf.checkpoint.random_state import load_random_state
from openrlhf.checkpoint.run_fingerprint import RunFingerprint, compare
from openrlhf.checkpoint.zero import Checkpoint, _load
from openrlhf.config.commands import PPO, SFT
from openrlhf.config.lora_combiner import LoraCombinerConfig
from openrlhf.config.parse import parse, to_yaml
from openrlhf.config.sections import KEY_VARIABLE
from openrlhf.data.cache import cached
from openrlhf.data.store import SampleStore
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.files import check_owner
from openrlhf.models.configurations import load_config
from openrlhf.models.loading import check_model, load_causal_lm
from openrlhf.models.scorer import check_reward_model
from openrlhf.models.tokenizers import load_tokenizer, processor_around
from openrlhf.observability.run_folder import RunFolder
from openrlhf.observability.trackers.wandb import read_key
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.record.model_card import write_model_card
from openrlhf.tools.serve.lora_combiner import run as combine_run
from openrlhf.training.precompute import cached_array

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


@pytest.mark.processes
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
def test_a_launchers_store_is_used(monkeypatch, address, launcher):
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


def model_with(name: str, content: bytes, *, without: str = "") -> str:
    """Writes a model with a file of this content, and returns its folder."""
    folder = tiny_chat_model(Path("model"), seed=0)
    (folder / name).write_bytes(content)
    if without:
        (folder / without).unlink()
    return str(folder)


def saved(thing: object, **options) -> bytes:
    torch.save(thing, content := io.BytesIO(), **options)
    return content.getvalue()


def of_torch(name: str, content: bytes | None) -> None:
    """Loads a checkpoint of the torch backend with a file of this content. Without content the list of
    contents declares a tensor as bytes, and names the file."""
    folder = Path("checkpoint")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    if content is None:
        content = saved(Evil())
        contents = pickle.loads((folder / ".metadata").read_bytes())
        contents.state_dict_metadata["a"] = BytesStorageMetadata()
        contents.storage_data = {MetadataIndex("a"): _StorageInfo(name, 0, len(content))}
        (folder / ".metadata").write_bytes(pickle.dumps(contents))
    (folder / name).write_bytes(content)
    told = forged(folder)
    assert (told is not None) == (name != "__0_0.distcp")
    load_tensors(folder, {"a": torch.zeros(3)}, no_dist=True)


def written(name: str, content: bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)
    return name


def of_adapter(name: str, content: bytes) -> None:
    model = tiny_chat_model(Path("model"), seed=0)
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    written("adapter/adapter_config.json", json.dumps(about).encode())
    written(f"adapter/{name}", content)
    combine_run(LoraCombinerConfig(model_path=str(model), lora_path="adapter", output_path="out"))


def of_average(content: bytes) -> None:
    average = MovingAverage([("w", nn.Parameter(torch.ones(2)))], beta=0.5, mesh=ProcessMesh())
    written("c/moving_average_0.safetensors", content)
    average.load("c")


class Numbers(SampleStore):
    """Samples with an array of labels."""

    LABELS = ("x",)
    x = np.arange(3)


def numbers() -> Numbers:
    made = Numbers()
    made.append([1], [True])
    return made


def saved_array(thing: object) -> bytes:
    np.save(content := io.BytesIO(), np.array([thing], dtype=object), allow_pickle=True)
    return content.getvalue()


def of_cache(content: bytes) -> None:
    """Reads tokenised data of this content, which must be built again."""
    cached(Numbers, {"a": 1}, numbers, cache_dir="kept")
    (file,) = Path("kept").glob("*/x.npy")
    file.write_bytes(content)
    cached(Numbers, {"a": 1}, numbers, cache_dir="kept")
    assert np.load(file).tolist() == [0, 1, 2]


CODE = b"import os; os.system('touch owned')\n"
CLASSES = json.dumps({"AutoTokenizer": ["evil.T", None], "AutoProcessor": "evil.P", "AutoConfig": "evil.C"})
FLAG = "--model"
PICKLES = {
    "pickle of code": lambda: saved(Evil()),
    "code in a dictionary": lambda: saved({"steps": 1, "num_ranks": 1, "w": Evil()}),
    "old format": lambda: saved({"w": Evil()}, _use_new_zipfile_serialization=False),
    "plain pickle": lambda: pickle.dumps(Evil()),
    "cut": lambda: saved({"w": torch.ones(9)})[:-40],
    "empty": lambda: b"",
    "text": lambda: b"<html>not found</html>",
}
LOADERS: dict[str, Callable[[bytes], object]] = {
    "trainer's state": lambda content: pickles.load(written("progress.pt", content)),
    "random state": lambda content: load_random_state(
        Path(written("c/random_state_0.pt", content)).parent, 0, 1
    ),
    "contents of a checkpoint of torch": lambda content: of_torch(".metadata", content),
    "tensors of a checkpoint of torch": lambda content: of_torch("__0_0.distcp", content),
    "checkpoint of DeepSpeed": lambda content: Checkpoint(
        Path(written("c/mp_rank_00_model_states.pt", content)).parent
    ).model_states(),
    "optimizer states of DeepSpeed": lambda content: _load(
        Path(written("c/zero_pp_rank_0_mp_rank_00_optim_states.pt", content))
    ),
    "universal checkpoint": lambda content: Checkpoint(
        Path(written("c/zero/optimizer_state.pt", content)).parents[1]
    )._universal([]),
    "moving average": of_average,
    "weights of a model": lambda content: check_model(
        model_with("pytorch_model.bin", content, without="model.safetensors"), FLAG
    ),
    "weights of a reward model": lambda content: check_reward_model(
        model_with("pytorch_model.bin", content, without="model.safetensors"), FLAG, "score"
    ),
    "adapter": lambda content: of_adapter("adapter_model.bin", content),
}


@pytest.mark.parametrize("make", PICKLES.values(), ids=PICKLES)
@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_hostile_file_runs_no_code_and_is_refused_in_words(tmp_path, monkeypatch, load, make):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as told:
        load(make())
    assert not (tmp_path / "owned").exists()
    assert told.value.code in (ErrorCode.DAMAGED_CHECKPOINT, ErrorCode.INVALID_MODEL, ErrorCode.UNREADABLE)
    assert len(told.value.text) < 600 and told.value.text.count("\n") < 3


def test_a_checkpoint_that_declares_a_tensor_as_bytes_is_damaged(tmp_path, monkeypatch):
    """torch.distributed.checkpoint unpickles bytes without limits."""
    monkeypatch.chdir(tmp_path)
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.path", value="checkpoint/.metadata"):
        of_torch("evil.bin", None)
    assert not (tmp_path / "owned").exists()


OTHERS: dict[str, Callable[[], object]] = {
    "weights of a language model": lambda: load_causal_lm(
        model_with("pytorch_model.bin", saved(Evil()), without="model.safetensors"),
        flag=FLAG,
        dtype="fp32",
        attention="auto",
    ),
    "code of a configuration": lambda: load_config(
        model_with("config.json", f'{{"model_type": "evil", "auto_map": {CLASSES}}}'.encode()), FLAG
    ),
    "code of a tokenizer": lambda: load_tokenizer(
        model_with("tokenizer_config.json", f'{{"tokenizer_class": "T", "auto_map": {CLASSES}}}'.encode()),
        flag=FLAG,
    ),
    "code of a processor": lambda: processor_around(
        AutoTokenizer.from_pretrained(tiny_chat_model(Path("other"), seed=0)),
        model_with("processor_config.json", f'{{"processor_class": "P", "auto_map": {CLASSES}}}'.encode()),
    ),
    "recorded flags": lambda: yaml.safe_load("!!python/object/apply:os.system ['touch owned']"),
    "flags": lambda: parse(SFT, ["--config", written("c.yaml", b"a: !!python/object/apply:os.system [a]")]),
    "arguments beside an adapter": lambda: of_adapter("training_args.bin", saved(Evil())),
    "arguments beside a model": lambda: check_model(model_with("training_args.bin", saved(Evil())), FLAG),
    "tokenised data": lambda: of_cache(saved_array(Evil())),
}


@pytest.mark.parametrize("load", OTHERS.values(), ids=OTHERS)
def test_code_beside_a_model_or_in_text_is_not_run(tmp_path, monkeypatch, load):
    monkeypatch.chdir(tmp_path)
    written("model/evil.py", CODE)
    with suppress(UsageError, SystemExit, yaml.YAMLError):
        load()
    assert not (tmp_path / "owned").exists()


def test_log_probs_of_a_reference_run_no_code(tmp_path, monkeypatch, threads):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    written("a.npy", saved_array(Evil()))
    for _ in range(2):
        (found,) = threads(1, lambda: cached_array(Path("a.npy"), lambda: np.ones(2)))
        assert found.tolist() == np.load("a.npy").tolist() == [1, 1]
    assert not (tmp_path / "owned").exists()


def test_a_new_run_folder_is_of_its_owner_alone(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a" / "run", config_yaml="adam: 1\n", argv=["openrlhf"], resume=False)
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    RunFolder.create(tmp_path / "shared", config_yaml="adam: 1\n", argv=["openrlhf"], resume=False)
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755, "the user's own folder stays as it is"


def test_the_key_of_a_tracker_can_stay_out_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("MARKER\n")
    assert read_key(f"@{tmp_path}/key") == "MARKER"
    assert read_key("MARKER") == "MARKER"
    with refused(ErrorCode.NOT_FOUND, flag="--logger.wandb.key", value="@nothing"):
        read_key("@nothing")


def test_a_users_url_and_a_key_are_refused_together(monkeypatch, capsys):
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
    card = write_model_card(tmp_path, run.path, **shown).read_text()
    origin = RunFingerprint.of("ppo", config, {})
    files = [file.read_text() for file in run.path.iterdir() if file.is_file()]
    assert "MARKER" not in "".join([card, json.dumps(origin.as_dict()), *files])
    assert "host/get_reward?token=<redacted>&model=a" in card
    assert compare(origin, RunFingerprint.of("ppo", parse(PPO, argv).config, {})) == ([], [])
    with pytest.raises(SystemExit):
        parse(PPO, ["--config", str(run.path / "config.yaml")])
    again = parse(PPO, ["--config", str(run.path / "config.yaml"), "--reward.remote_url", url])
    assert again.config.reward.servers == (url,)
