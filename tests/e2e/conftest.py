"""The real parts, with a model of a few thousand parameters."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.tasks.prepare import TaskFiles, prepare
from openrlhf.tasks.word_problem import boxed_answer

os.environ.setdefault("OMP_NUM_THREADS", "1")
WORKERS = Path(__file__).parent / "workers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """Word problems and an untrained model of their tokenizer."""
    folder = tmp_path_factory.mktemp("task")
    return prepare(folder, seed=0, num_pretrain=200, num_sft=200, num_prompts=64, num_eval=16)


@pytest.fixture
def run_worker(tmp_path: Path) -> Callable[..., list[dict]]:
    """Run `workers/{name}.py` on some ranks with arguments as JSON; returns what it wrote, one dict for each
    rank."""

    def run(name: str, num_ranks: int, **arguments) -> list[dict]:
        out = tmp_path / f"{name}-{num_ranks}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        spec = json.dumps({"out": str(out), **arguments})
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
        command = [sys.executable, *(launcher if num_ranks > 1 else []), str(WORKERS / f"{name}.py"), spec]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]

    return run


@pytest.fixture(scope="session")
def openrlhf() -> Callable[[str], str]:
    """Run `openrlhf ...` as users do; returns what it printed."""

    def run(command: str) -> str:
        program = Path(sys.executable).with_name("openrlhf")
        done = subprocess.run([program, *shlex.split(command)], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return done.stdout

    return run


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowing:
    """Models that know something of word problems."""

    files: TaskFiles
    base: Path
    """Writes worked problems as plain text."""
    chat: Path
    """Answers in a chat, carefully or hastily."""


@pytest.fixture(scope="session")
def knowing(openrlhf, tmp_path_factory: pytest.TempPathFactory) -> Knowing:
    folder = tmp_path_factory.mktemp("knowing")
    files, base, chat = prepare(folder / "task", seed=0), folder / "base", folder / "chat"
    common = (
        "--data.max_len 256 --train.batch_size 8 --train.max_epochs 1 --ds.zero_stage 0 --ds.param_dtype fp32"
    )
    openrlhf(
        f"sft --model.model_name_or_path {files.model} --model.pretrain_mode_enable "
        f"--data.dataset {files.pretrain} --ckpt.output_dir {base} --adam.lr 3e-3 {common}"
    )
    openrlhf(
        f"sft --model.model_name_or_path {base} --data.dataset {files.sft} --data.output_key output "
        f"--data.apply_chat_template --ckpt.output_dir {chat} --adam.lr 1e-3 {common}"
    )
    return Knowing(files=files, base=base, chat=chat)


@pytest.fixture(scope="session")
def accuracy(knowing: Knowing) -> Callable[..., float]:
    """Share of the held-out problems that a model solves, greedily."""
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
