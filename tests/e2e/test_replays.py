"""A step of a real run, computed again from checkpoint and journal, is equal to the last bit."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import run_ranks
from sft_runs import flags
from test_rl import COLOCATED, COMMON, train

import openrlhf
from openrlhf.observability.run_folder import read_jsonl, to_json
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.replay.replay import bisect_versions
from openrlhf.tools.replay.replay import run as replay

pytestmark = pytest.mark.slow


RL = (
    f"{COMMON} --algo.advantage.estimator gae --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 "
    "--critic.adam.lr 1e-3 --train.max_steps 4 --train.backend torch --rollout.engine transformers "
    f"{COLOCATED} --ckpt.save_steps 2 --ckpt.max_num 9 "
)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        pytest.param(
            "--train.backend torch --eval.dataset {sft} --eval.steps 3 --lr_scheduler linear", 1, id="torch"
        ),
        pytest.param("--ds.zero_stage 2", 2, id="two ranks of DeepSpeed"),
    ],
)
def test_a_supervised_step(task: TaskFiles, tmp_path: Path, capsys, layout: str, num_ranks: int) -> None:
    """With dropout of adapters, from a checkpoint and from the beginning, and an evaluation between the
    checkpoint and the step. Nothing in the run's folders changes. A metric that was changed afterwards is
    found."""
    command = (
        f"openrlhf.cli.train_sft {flags(task)} --ckpt.save_steps 2 --ckpt.max_num 9 --ds.param_dtype fp32 "
        f"--ds.lora.rank 4 --ds.lora.dropout 0.5 --ckpt.output_dir {tmp_path}/out "
        f"--logger.run_dir {tmp_path}/run {layout.format(sft=task.sft)}"
    )
    run_ranks(shlex.split(command), num_ranks, log=tmp_path / "log")
    before = files_of(tmp_path)
    assert replay(tmp_path / "run", 4) == 0
    assert "from the checkpoint of step 2" in (out := capsys.readouterr().out)
    assert "equal bit for bit: metrics of steps 3 to 4; " in out
    assert "; checkpoint of the model of step 4" in out
    assert ("; metrics of the evaluation of step 3;" in out) == ("--eval" in layout)
    assert replay(tmp_path / "run", 1) == 0
    assert "from the beginning" in capsys.readouterr().out
    assert files_of(tmp_path) == before
    rows = list(read_jsonl(metrics := tmp_path / "run" / "metrics.jsonl"))
    rows[3]["grad_norm"] *= 1 + 2**-40
    metrics.write_text("".join(to_json(row) + "\n" for row in rows))
    assert replay(tmp_path / "run", 4) == 1
    assert "first difference (recorded | computed): step 4, metrics, grad_norm" in capsys.readouterr().out


def committed(clone: Path, message: str) -> None:
    for words in ("add --all", f"-c user.name=test -c user.email=test@example.org commit -q -m {message}"):
        subprocess.run(["git", "-C", str(clone), *words.split()], check=True, timeout=60)


def test_two_versions_of_the_code(task: TaskFiles, tmp_path: Path, capsys) -> None:
    """A loss that is a thousandth larger is found in the first step after the checkpoint, and then in the
    weights. A changed comment changes no number."""
    command = (
        f"openrlhf.cli.train_sft {flags(task)} --ckpt.save_steps 2 --ckpt.max_num 9 --ds.param_dtype fp32 "
        f"--ckpt.output_dir {tmp_path}/out --logger.run_dir {tmp_path}/run --train.backend torch"
    )
    run_ranks(shlex.split(command), log=tmp_path / "log")
    clone = tmp_path / "clone"
    package = Path(openrlhf.__file__).parent
    shutil.copytree(package, clone / "openrlhf", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", str(clone)], check=True, timeout=60)
    committed(clone, "first")
    loss = clone / "openrlhf" / "training" / "objectives" / "sft.py"
    code = loss.read_text()
    loss.write_text(f"{code}# a comment\n")
    committed(clone, "comment")
    loss.write_text(code.replace("-scores.log_probs", "-1.001 * scores.log_probs"))
    committed(clone, "loss")
    before = files_of(tmp_path)
    assert bisect_versions(tmp_path / "run", ["HEAD~1", "HEAD"], 5, clone) == 1
    out = capsys.readouterr().out
    assert "step 5 computed by two commits, from the checkpoint of step 4" in out
    assert "first difference: step 5, metrics, sft/loss" in out
    assert "checkpoint of the model of step 5" in out and "weights.model." in out
    assert bisect_versions(tmp_path / "run", ["HEAD~2", "HEAD~1"], 5, clone) == 0
    assert "equal: metrics of step 5; checkpoint of the model of step 5" in capsys.readouterr().out
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    "ahead", ["", "--train.async_enable --train.async_queue_size 1"], ids=["sync", "async"]
)
@pytest.mark.usefixtures("running_ray")
def test_a_step_of_reinforcement_learning(task: TaskFiles, tmp_path: Path, capsys, ahead: str) -> None:
    """Policy and critic learn from the journal what they learned from the engines' samples. A log-prob, or a
    weight, that was changed afterwards is found."""
    train(task, tmp_path, f"{RL} {ahead}")
    before = files_of(tmp_path)
    assert replay(tmp_path / "run", 4) == 0
    out = capsys.readouterr().out
    assert "rollouts of steps 3 to 4; metrics of steps 3 to 4; checkpoint of the actor of step 4" in out
    assert "checkpoint of the critic of step 4" in out
    assert files_of(tmp_path) == before
    journal = tmp_path / "run" / "rollouts" / "step_000004.parquet"
    table = pq.read_table(journal)
    rows = table["log_probs"].to_pylist()
    rows[5][2] += 2**-20
    place = table.column_names.index("log_probs")
    pq.write_table(table.set_column(place, "log_probs", pa.array(rows, pa.list_(pa.float32()))), journal)
    assert replay(tmp_path / "run", 4) == 1
    assert "step 4, rollouts, log_probs: row 5, " in capsys.readouterr().out
