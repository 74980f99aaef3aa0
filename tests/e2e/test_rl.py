"""The whole loop on Ray and vLLM, with DeepSpeed or PyTorch alone, in every arrangement of ranks and
engines."""

import json
import runpy
import shlex
import shutil
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from families import tiny_family
from records import sequence
from refusals import changes
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf.config.commands import PPO
from openrlhf.config.parse import parse
from openrlhf.data.order import epoch_order
from openrlhf.loop.machines import resolve
from openrlhf.loop.rl_command import run
from openrlhf.observability.journal import read_journal
from openrlhf.observability.trackers.metrics_file import read_metrics
from openrlhf.tasks.prepare import TaskFiles
from openrlhf.tools.reference.outputs import plain_log_probs, plain_logits
from openrlhf.types import Trajectory, not_none

REWARD = Path(__file__).with_name("digits_reward.py")
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
COMMON = (
    "--data.apply_chat_template --data.label_key label --data.max_len 96 --rollout.max_new_tokens 12 "
    "--rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --train.batch_size 16 "
    "--algo.advantage.estimator group_norm --ds.param_dtype fp32 --actor.lr_scheduler constant "
    "--eval.n_samples_per_prompt 1 --eval.temperature 0 --train.max_steps 2 --eval.steps 2 "
)
COLOCATED = "--actor.num_gpus_per_node 1 --train.colocate_all --vllm.enable_sleep --ds.enable_sleep"
TWO_ENGINES = (
    "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 1 --critic.num_gpus_per_node 1 "
    "--vllm.num_engines 2 --train.dynamic_batch_enable --train.max_tokens_per_gpu 256"
)
ARRANGEMENTS = {
    "zero 2, one rank, one engine, colocated": f"--ds.zero_stage 2 {COLOCATED}",
    "zero 3, two ranks, two engines": f"{TWO_ENGINES} --vllm.enable_prefix_caching",
    "torch, one rank, one engine of transformers, colocated": (
        f"--train.backend torch --rollout.engine transformers {COLOCATED}"
    ),
    "zero 3, two ranks, two engines of transformers": f"{TWO_ENGINES} --rollout.engine transformers",
    "torch, one rank, one engine, colocated": f"--train.backend torch {COLOCATED}",
    "zero 3, two ranks, one engine": (
        "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --critic.num_gpus_per_node 2"
    ),
    "zero 2, two ranks, two engines, colocated": (
        "--ds.zero_stage 2 --actor.num_gpus_per_node 2 --vllm.num_engines 2 --train.colocate_all "
        "--ds.enable_sleep --train.dynamic_batch_enable --train.max_tokens_per_gpu 256"
    ),
    "torch, two ranks, one engine": (
        "--train.backend torch --ds.zero_stage 3 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 "
        "--critic.num_gpus_per_node 1"
    ),
    "zero 2, one rank, an engine of two stages": (
        "--ds.zero_stage 2 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 "
        "--critic.num_gpus_per_node 1 --vllm.pipeline_parallel_size 2"
    ),
    "zero 3, two ranks, an engine of two shards": (
        "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 1 "
        "--critic.num_gpus_per_node 1 --vllm.tensor_parallel_size 2"
    ),
    "zero 3, one rank, two engines": (
        "--ds.zero_stage 3 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 "
        "--critic.num_gpus_per_node 1 --vllm.num_engines 2 --vllm.enable_prefix_caching "
        "--train.micro_batch_size 4"
    ),
    "zero 2, two ranks that share rows, two engines, colocated": (
        "--ds.zero_stage 2 --actor.num_gpus_per_node 2 --vllm.num_engines 2 --train.colocate_all "
        "--ds.enable_sleep --train.dynamic_batch_enable --train.max_tokens_per_gpu 256 --ds.ring_attn_size 2"
    ),
    "zero 2, two ranks that share matrices, one engine": (
        "--ds.zero_stage 2 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 2 "
        "--critic.num_gpus_per_node 2 --ds.tensor_parallel_size 2"
    ),
    "zero 3, two ranks, an engine of two shards, by Ray's object store": (
        "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --ref.num_gpus_per_node 1 "
        "--critic.num_gpus_per_node 1 --vllm.tensor_parallel_size 2 "
        "--vllm.sync_with_ray --vllm.sync_bucket_mb 1"
    ),
}
IN_EVERY_RUN = 3
"""Number of first arrangements that differ in everything and run in `make test`; `make test-all` runs all."""

pytestmark = pytest.mark.usefixtures("running_ray")


def train(
    task: TaskFiles, folder: Path, flags: str, *, reward: str = f"--reward.remote_url {REWARD}"
) -> dict[int, dict[str, float]]:
    """Trains and returns the metrics of each step."""
    argv = shlex.split(
        f"--actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} "
        f"{reward} --eval.dataset {task.eval} "
        f"--ckpt.output_dir {folder / 'policy'} --ckpt.path {folder / 'ckpt'} "
        f"--logger.run_dir {folder / 'run'} {flags}"
    )
    run(parse(PPO, argv, resolve=resolve).config, argv)
    return read_metrics(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def first_run() -> dict:
    """Keeps samples and metrics of each engine's first arrangement, which all others must reproduce."""
    return {}


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(name, marks=pytest.mark.slow if i >= IN_EVERY_RUN else ())
        for i, name in enumerate(ARRANGEMENTS)
    ],
)
def test_two_steps(task: TaskFiles, tmp_path: Path, first_run: dict, arrangement: str) -> None:
    flags = (
        f"{COMMON.replace('group_norm', 'gae')} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 "
        f"--critic.adam.lr 1e-3 {ARRANGEMENTS[arrangement]} "
        f"--train.hooks {EXAMPLES / 'solved_groups.py'}:SolvedGroups"
    )
    metrics = train(task, tmp_path, flags)
    assert all(0 <= metrics[step]["solved_groups"] <= 1 for step in (1, 2))
    rollouts = tmp_path / "run" / "rollouts"
    sampled = read_journal(rollouts / "step_000001.parquet"), read_journal(rollouts / "step_000002.parquet")

    # Sampler and trainer agree, before the first update and after an update and a sync.
    assert metrics[1]["mismatch/abs_diff_max"] < 1e-4
    assert metrics[2]["mismatch/abs_diff_max"] < 1e-4
    assert metrics[1]["kl/mean"] == pytest.approx(0, abs=1e-6)  # the policy still is the reference
    assert metrics[2]["kl/mean"] != pytest.approx(0, abs=1e-6)
    assert [{int(v) for t in step for v, _ in t.weight_versions} for step in sampled] == [{0}, {1}]
    assert all(t.ok and t.num_actions <= 12 for step in sampled for t in step)

    # The memory of a process with torch and a small model.
    engine = "transformers" if "of transformers" in arrangement else "vllm"
    phases = ("logprobs", "update", "sync", *(["generate"] if engine == "vllm" else []))
    for step, phase in product((1, 2), phases):
        assert 0.05 < metrics[step][f"memory/{phase}_gb"] < 8, (step, phase)

    # Seeds depend on addresses: every arrangement samples the same tokens, and learns the same from them.
    reference, expected = first_run.setdefault(engine, (sampled, metrics))
    assert tokens_of(sampled[0]) == tokens_of(reference[0])
    assert [t.reward for t in sampled[0]] == [t.reward for t in reference[0]]
    assert tokens_of(sampled[1]) == tokens_of(reference[1])
    for step in (1, 2):
        for name in ("grad_norm", "policy/loss", "rollout/reward_mean", "kl/mean", "lr"):
            ours, theirs = metrics[step][name], expected[step][name]
            # Adam turns the rounding of a gradient near zero into a whole step.
            assert ours == pytest.approx(theirs, abs=2e-5, rel=1e-4), (name, step)
        for name in ("loss", "grad_norm", "value_mean", "explained_variance"):
            ours, theirs = metrics[step][f"critic/{name}"], expected[step][f"critic/{name}"]
            assert ours == pytest.approx(theirs, rel=1e-3), (name, step)

    check_samplers_hold_the_trained_weights(tmp_path)


def tokens_of(trajectories: list[Trajectory]) -> list[list[int]]:
    return [t.token_ids.tolist() for t in trajectories]


def check_samplers_hold_the_trained_weights(folder: Path, step: int = 2) -> None:
    """Greedy answers and their log-probs after the sync of the last `step` are those of the exported
    model."""
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(folder / "policy").chat_template
    for t in read_journal(folder / "run" / "rollouts" / f"eval_{step:06d}.parquet"):
        sampled, answer = sequence(t.token_ids, t.prompt_length), t.token_ids[t.prompt_length :]
        with torch.no_grad():
            assert plain_logits(model, sampled).argmax(-1).tolist() == answer.tolist()
            log_probs = plain_log_probs(model, sampled)
        # at temperature 0 the sampler reports the untempered distribution
        torch.testing.assert_close(log_probs, torch.tensor(t.rollout_log_probs), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "flags", "metric", "most"),
    [
        ("agent_two_calls.py", "--data.apply_chat_template", "corrected", 1),
        ("agent_retry.py", "--data.apply_chat_template --train.max_turns 3", "tries", 3),
        ("agent_openai.py", "", "tries", 3),
    ],
)
def test_agents(task: TaskFiles, tmp_path: Path, file: str, flags: str, metric: str, most: int) -> None:
    """Sampler and trainer agree on the actions of every turn, and on nothing between them."""
    common = COMMON.removeprefix("--data.apply_chat_template ")
    metrics = train(
        task,
        tmp_path,
        f"{common} {flags} --train.agent_func_path {EXAMPLES / file} --algo.kl.init_coef 0 "
        "--rollout.top_p 0.9 --train.batch_size 32 --actor.num_gpus_per_node 1 --train.colocate_all "
        "--actor.adam.lr 1e-3",
    )
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_max"] < 1e-4
        assert metrics[step]["rollout/failed_ratio"] == 0
        assert 0 <= metrics[step][f"rollout/{metric}"] <= most


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "--ds.zero_stage 2 --actor.num_gpus_per_node 1 --train.colocate_all --ds.enable_sleep",
        ARRANGEMENTS["zero 3, two ranks, one engine"],
    ],
)
def test_muon_trains_policy_and_critic(task: TaskFiles, tmp_path: Path, place: str) -> None:
    """Each model takes one update, whose matrices have the size that Newton-Schulz gives them."""
    lr = 0.02
    optimizers = " ".join(
        f"--{role}.optim muon --{role}.max_norm 0 --{role}.muon.lr {lr} --{role}.lr_scheduler constant"
        for role in ("actor", "critic")
    )
    common = COMMON.replace("group_norm", "gae").replace("--actor.lr_scheduler constant", "")
    once = common.replace("max_steps 2", "max_steps 1").replace("eval.steps 2", "eval.steps 1")
    train(task, tmp_path, f"{once} --train.batch_size 32 --critic.save_value_network {optimizers} {place}")
    start = load_file(task.model / "model.safetensors")
    for folder in ("policy", "policy_critic"):
        trained = load_file(tmp_path / folder / "model.safetensors")
        for name in [name for name in start if "proj" in name]:
            update = (trained[name] - start[name]).double()
            largest = torch.linalg.matrix_norm(update, 2) / max(1, len(update) / update.shape[1]) ** 0.5
            assert 0.7 * lr < largest < 1.4 * lr, (folder, name)
    check_samplers_hold_the_trained_weights(tmp_path, step=1)


@pytest.mark.parametrize(
    "backend",
    [
        "--rollout.engine transformers --train.enable_ema",
        pytest.param("--train.enable_ema", marks=pytest.mark.slow),
        pytest.param("--train.backend torch", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_continues(task: TaskFiles, tmp_path: Path, backend: str) -> None:
    """The run has everything with state: two models and optimizers, a moving average, an adaptive
    coefficient, waiting samples, the order of prompts and that of pretraining texts. Engines have no state
    that a checkpoint keeps, so the one that starts soonest takes part in every run of the tests."""
    flags = (
        f"{COMMON.replace('group_norm', 'gae')} --algo.kl.init_coef 0.01 --algo.kl.target 0.02 "
        "--algo.kl.horizon 100 --actor.num_gpus_per_node 1 --train.colocate_all --actor.adam.lr 3e-3 "
        "--ds.enable_sleep "
        "--critic.adam.lr 3e-3 --critic.lr_scheduler constant --critic.save_value_network "
        f"--rollout.vllm_generate_batch_size 12 {backend} --eval.steps -1 --train.num_episodes 2 "
        "--ckpt.save_steps 2 --ckpt.max_num 2 --train.max_steps 4 --train.batch_size 32 "
        "--algo.advantage.is_correction_enable --actor.entropy_coef 0 "
        f"--data.pretrain_dataset {task.pretrain} --actor.ptx_coef 0.1 "
    )
    whole = train(task, tmp_path / "whole", flags)
    assert whole[1]["policy/ptx_loss"] == pytest.approx(mean_loss_of_texts(task, count=32), rel=1e-5)
    cut_after_step_2(tmp_path / "whole", tmp_path / "halves")
    halves = train(task, tmp_path / "halves", f"{flags} --ckpt.load_enable")
    assert list(halves) == list(range(1, 5))
    for step in whole:  # with one optimizer step per rollout the update starts at ratio one
        assert whole[step]["policy/ppo_kl"] == pytest.approx(0, abs=1e-6)
        assert whole[step]["policy/clip_fraction"] == 0
        assert whole[step]["policy/entropy"] > 1
    assert whole[1]["policy/is_weight_mean"] == pytest.approx(1, abs=1e-4)  # later, samples have waited
    assert [whole[step]["rollout/buffered_groups"] for step in range(1, 5)] == [4, 8, 0, 4]
    assert whole[4]["kl/coef"] != whole[2]["kl/coef"] != 0.01
    same = ("rollout/reward_mean", "grad_norm", "policy/ptx_loss", "kl/coef", "kl/mean")
    same += ("critic/grad_norm", "critic/value_mean")
    for step in (3, 4):
        for name in same:
            assert halves[step][name] == pytest.approx(whole[step][name], rel=1e-4, abs=1e-7), (name, step)
    for folder in ("policy", "policy_critic"):
        one, other = (load_file(tmp_path / run / folder / "model.safetensors") for run in ("whole", "halves"))
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError) as refused:
        other_run = f"--actor.adam.lr 1e-3 --vllm.kv_cache_gb 0.5 --data.prompt_dataset {task.eval}"
        train(task, tmp_path / "halves", f"{flags} --ckpt.load_enable {other_run}")
    rate, data = changes(str(refused.value))
    assert rate == ("--actor.adam.lr", "0.003", "0.001")
    assert data.name == "--data.prompt_dataset" and data.before.startswith(f"{task.prompts} (64 ")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepspeed", "torch"])
def test_a_fork_continues_both_models_with_its_own_settings(task, tmp_path, backend):
    """Without a difference it samples and learns what the other run does. With half the learning rate, the
    same prompts are sampled by the same weights; other data begins at its first prompt."""
    flags = (
        f"{COMMON.replace('group_norm', 'gae')} --actor.num_gpus_per_node 1 --train.colocate_all "
        f"--actor.adam.lr 1e-3 --critic.adam.lr 1e-3 --train.backend {backend} "
        "--rollout.engine transformers --eval.steps -1 --train.max_steps 4 --ckpt.save_steps 2 "
        "--train.num_episodes 2 "
    )
    whole = train(task, tmp_path / "whole", flags)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").rglob("*")}
    fork = f"{flags} --ckpt.load_enable --ckpt.fork_from {tmp_path}/whole/ckpt/_actor/global_step2"
    same = train(task, tmp_path / "same", fork)
    half = train(task, tmp_path / "half", f"{fork} --actor.adam.lr 5e-4")
    data = train(task, tmp_path / "data", f"{fork} --data.prompt_dataset {task.eval}")
    assert list(same) == list(half) == list(data) == [3, 4]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").rglob("*")} == before
    for step in (3, 4):
        for name in ("rollout/reward_mean", "grad_norm", "critic/grad_norm", "critic/value_mean", "lr"):
            assert same[step][name] == pytest.approx(whole[step][name], rel=1e-4, abs=1e-7), (name, step)
    assert (half[3]["lr"], whole[3]["lr"]) == pytest.approx((5e-4, 1e-3))
    assert half[3]["critic/grad_norm"] == pytest.approx(whole[3]["critic/grad_norm"], rel=1e-4)
    assert half[4]["kl/mean"] != pytest.approx(whole[4]["kl/mean"], rel=1e-4)
    runs = ("whole", "same", "half", "data")
    tokens = [tokens_of(read_journal(tmp_path / f"{run}/run/rollouts/step_000003.parquet")) for run in runs]
    assert tokens[0] == tokens[1] == tokens[2] != tokens[3]
    record = json.loads((tmp_path / "data/run/fork.json").read_text())
    assert (record["step"], record["data_from"]) == (2, 2)
    assert list(record["changed"]) == ["--data.prompt_dataset"]


@pytest.mark.slow
def test_policy_and_critic_resume_on_other_ranks(task: TaskFiles, tmp_path: Path) -> None:
    """Each model has one rank at ZeRO 2, then two at ZeRO 3: samples and what is learned from them are the
    same."""
    flags = (
        f"{COMMON.replace('group_norm', 'gae')} --algo.kl.init_coef 0.01 --actor.adam.lr 1e-3 "
        "--critic.adam.lr 1e-3 --critic.lr_scheduler constant --critic.save_value_network "
        "--train.colocate_all --train.enable_ema --eval.steps -1 --train.max_steps 4 --ckpt.save_steps 2 "
        "--ckpt.max_num 2 "
    )
    whole = train(task, tmp_path / "whole", f"{flags} --ds.zero_stage 2 --actor.num_gpus_per_node 1")
    cut_after_step_2(tmp_path / "whole", tmp_path / "halves")
    other = "--ds.zero_stage 3 --actor.num_gpus_per_node 2 --ckpt.load_enable"
    halves = train(task, tmp_path / "halves", f"{flags} {other}")
    assert list(halves) == [1, 2, 3, 4]
    for step in (3, 4):
        rollouts = [tmp_path / run / f"run/rollouts/step_00000{step}.parquet" for run in ("whole", "halves")]
        one, other = map(read_journal, rollouts)
        assert tokens_of(one) == tokens_of(other)
        for name in ("grad_norm", "policy/loss", "rollout/reward_mean", "kl/mean", "lr"):
            assert halves[step][name] == pytest.approx(whole[step][name], abs=2e-5), (name, step)
        for name in ("critic/loss", "critic/grad_norm", "critic/value_mean"):
            assert halves[step][name] == pytest.approx(whole[step][name], rel=1e-3), (name, step)
    for folder in ("policy", "policy_critic"):
        one, other = (load_file(tmp_path / run / folder / "model.safetensors") for run in ("whole", "halves"))
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-4)


def mean_loss_of_texts(task: TaskFiles, *, count: int) -> float:
    """Computes with transformers the mean loss over all tokens of the first `count` texts in the order of the
    run."""
    texts = [json.loads(line)["input"] for line in task.pretrain.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    losses = []
    for i in epoch_order(len(texts), seed=42, epoch=0)[:count]:
        ids = tokenizer(texts[i], add_special_tokens=False).input_ids
        with torch.no_grad():
            losses.append(-plain_log_probs(model, sequence(ids)))
    return torch.cat(losses).mean().item()


def cut_after_step_2(whole: Path, halves: Path) -> None:
    """Copies the folder of a run as if it had been killed after it saved the first checkpoint of two."""
    shutil.copytree(whole / "ckpt", halves / "ckpt")
    for kept in (halves / "ckpt").glob("_*"):
        assert {path.name for path in kept.glob("global_step*")} == {"global_step2", "global_step4"}
        shutil.rmtree(kept / "global_step4")
    (halves / "ckpt" / "_actor" / "latest").write_text("global_step2")
    (halves / "run").mkdir()
    steps = (whole / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (halves / "run" / "metrics.jsonl").write_text("".join(steps[:2]))


FAULTY_REWARD = """
import os, signal, time, zlib

def fate(query):
    place = zlib.crc32(query.encode()) % 1000
    faults = {"raise": range(10), "hang": range(10, 20), "nan": range(20, 30), "kill": range(30, 40)}
    return next((name for name, places in faults.items() if place in places), "fine")

def reward_func(queries, prompts, labels):
    end = fate(queries[0])
    if end == "raise":
        raise RuntimeError("no opinion")
    if end == "hang":
        time.sleep(60)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return [float("nan") if end == "nan" else len(queries[0]) % 5]
"""
SAID = {
    "raise": "RuntimeError: no opinion",
    "hang": "took longer than --reward.timeout 1 s",
    "nan": "rewards that are not finite: [nan]",
    "kill": "process died with exit code -9",
}


@pytest.mark.slow
def test_a_faulty_reward_function_fails_the_samples_it_fails_on_and_no_others(task, tmp_path):
    """The function fails on one of 25 of the 1024 samples: it raises, hangs, dies or returns NaN."""
    reward = tmp_path / "faulty.py"
    reward.write_text(FAULTY_REWARD)
    metrics = train(
        task,
        tmp_path,
        f"{COMMON} --algo.kl.init_coef 0 --actor.num_gpus_per_node 1 --train.colocate_all --eval.steps -1 "
        "--rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 256 "
        "--train.num_episodes 2 --train.max_steps 2 --train.dynamic_batch_enable "
        f"--train.max_tokens_per_gpu 4096 --reward.remote_url {reward} --reward.timeout 1 "
        "--reward.num_workers 2",
    )
    fate, decode = runpy.run_path(str(reward))["fate"], AutoTokenizer.from_pretrained(task.model).decode
    fates: Counter[str] = Counter()
    for step in (1, 2):
        sampled = read_journal(tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet")
        assert len(sampled) == 512
        queries = [t.prompt.text + decode(t.token_ids[t.prompt_length :]) for t in sampled]
        expected = [fate(query) for query in queries]
        assert [t.ok for t in sampled] == [end == "fine" for end in expected]
        for t, query, end in zip(sampled, queries, expected, strict=True):
            if end == "fine":
                assert (t.outcome, t.reward, t.error) == ("ok", len(query) % 5, "")
            else:
                assert (t.outcome, t.reward, t.score) == ("reward_error", None, None)
                assert SAID[end] in t.error and t.num_actions > 0
        finished = [t for t in sampled if t.ok]
        assert metrics[step]["rollout/reward_error_count"] == 512 - len(finished)
        mean = sum(not_none(t.reward) for t in finished) / len(finished)
        assert metrics[step]["rollout/reward_mean"] == pytest.approx(mean)
        trained_on = sum(t.num_actions for t in finished) / 2  # two optimizer steps
        assert metrics[step]["num_tokens"] == pytest.approx(trained_on)
        fates.update(expected)
    assert fates.keys() == {*SAID, "fine"}


@pytest.mark.slow
def test_a_run_on_problems_of_reasoning_gym_and_what_it_leaves(task: TaskFiles, tmp_path: Path) -> None:
    """The run has two evaluation sets, the package's own verifier, stop texts, and no forward pass for old
    log-probs."""
    metrics = train(
        task,
        tmp_path,
        f"{COMMON} --algo.kl.init_coef 0 --actor.num_gpus_per_node 1 --train.colocate_all "
        "--data.prompt_dataset reasoning_gym:chain_sum?size=16&seed=1 --reward.remote_url none "
        "--eval.dataset reasoning_gym:chain_sum?size=4&seed=900,reasoning_gym:leg_counting?size=4&seed=900 "
        "--data.label_key none --data.max_len 256 --train.batch_size 32 --algo.skip_old_log_probs "
        "--rollout.stop e '1 ' "
        f"--logger.tensorboard_dir {tmp_path / 'tb'}",
    )
    assert "timing/logprobs" in metrics[1] and "kl/mean" not in metrics[1]
    assert metrics[1]["mismatch/abs_diff_mean"] < 1e-4
    assert metrics[1]["policy/clip_fraction"] == 0 and metrics[2]["policy/clip_fraction"] == 0
    for source in ("chain_sum", "leg_counting"):
        assert 0 <= metrics[2][f"eval/{source}_score_mean"] <= 1
        assert metrics[2][f"eval/{source}_num_samples"] == 4
    sampled = read_journal(tmp_path / "run" / "rollouts" / "step_000001.parquet")
    assert all(t.ok and t.prompt.source == "chain_sum" for t in sampled)

    evaluated = read_journal(tmp_path / "run" / "rollouts" / "eval_000002.parquet")
    check_what_ended_responses([*sampled, *evaluated], ("e", "1 "), AutoTokenizer.from_pretrained(task.model))

    folder = tmp_path / "run"
    assert json.loads((folder / "env.json").read_text())
    assert "--train.colocate_all" in (folder / "argv.txt").read_text()
    assert "group_norm" in (folder / "config.yaml").read_text()
    assert (folder / "report.html").stat().st_size > 1000
    assert list((tmp_path / "tb").rglob("events.out.*"))


def check_what_ended_responses(trajectories: list[Trajectory], stop: tuple[str, ...], tokenizer) -> None:
    """Checks that the token which completes a stop text is the last one, and that nothing else is cut."""
    ends: Counter[str] = Counter()
    for t in trajectories:
        response = t.token_ids[t.prompt_length :].tolist()
        assert len(response) == t.num_actions
        text, before = tokenizer.decode(response), tokenizer.decode(response[:-1])
        assert not any(word in before for word in stop)
        if any(word in text for word in stop):
            end = "text"
        else:
            end = "token" if response[-1] == tokenizer.eos_token_id else "length"
        assert (t.finish_reason, t.truncated) == (("length", True) if end == "length" else ("stop", False))
        ends[end] += 1
    assert ends["text"] > 5 and ends["length"] > 0, ends


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "Glm4Moe"])
def test_weights_that_transformers_renames_and_fuses(task: TaskFiles, tmp_path: Path, family: str) -> None:
    """The weights pass through two updates at ZeRO-3, with a resume in between."""
    model = tiny_family(tmp_path / "model", family)
    flags = (
        f"{COMMON} --actor.model_name_or_path {model} --ds.zero_stage 3 --actor.num_gpus_per_node 2 "
        "--train.colocate_all --algo.kl.init_coef 0 --actor.adam.lr 1e-2 --eval.steps -1 --ckpt.save_steps 1 "
    )
    metrics = train(task, tmp_path, flags)
    assert metrics[1]["mismatch/abs_diff_max"] < 1e-4
    assert metrics[2]["mismatch/abs_diff_max"] < 1e-4
    metrics = train(task, tmp_path, f"{flags} --train.max_steps 3 --ckpt.load_enable")
    assert list(metrics) == [1, 2, 3]
    assert metrics[3]["mismatch/abs_diff_max"] < 1e-4
