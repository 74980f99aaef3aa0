"""The workers of a run as a single rank in this process, with the torch backend and tiny models."""

import copy
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_config, tiny_model
from peft import PeftModel
from records import batch_of, sequence, trajectory
from refusals import refused
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.backends.weight_sync.stored_weights import Probe, fingerprints
from openrlhf.checkpoint.folder import UNFINISHED
from openrlhf.config.ppo import (
    ACTOR_FLAG,
    REWARD_FLAG,
    ActorConfig,
    CriticConfig,
    PPOCkptConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    VllmConfig,
)
from openrlhf.config.sections import AdamConfig, LoraConfig, ScorerDeepSpeedConfig
from openrlhf.data.scored import score_last
from openrlhf.data.store import SampleStore
from openrlhf.errors import ErrorCode
from openrlhf.mesh import Mesh
from openrlhf.models.lora import prepare_for_training
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import load_scorer
from openrlhf.rows import LossNorm, PackedRow
from openrlhf.tasks.tiny_model import tiny_chat_model, tiny_tokenizer
from openrlhf.tools.reference.outputs import plain_log_probs, plain_score, values_of_row
from openrlhf.training import trained_worker
from openrlhf.training import worker as workers
from openrlhf.training.trained_worker import CriticWorker, PolicyWorker
from openrlhf.training.worker import FrozenWorker, RewardWorker, row_groups
from openrlhf.types import Batch

PLACE = "127.0.0.1", 29999
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TOKENS = [[3, 40, 50, 60, 70], [7, 80, 90], [9, 30, 55, 44]]
NUM_ACTIONS = sum(len(tokens) - 1 for tokens in TOKENS)
ROUNDING = 1e-5
"""Absolute error of log-probs of two layers in float32: about a hundred roundings of numbers near 6."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the policy `policy`, another language model `other` and a reward model `rewards`."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "other")):
        tiny_chat_model(folder / name, seed=seed, hidden_size=32)
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    path, options = str(folder / "other"), {"dtype": "fp32", "attention": "auto", "tokenizer": tokenizer}
    scorer = load_scorer(path, flag="--model", **options).model
    scorer.config.mean, scorer.config.std = 0.5, 2.0
    scorer.save_pretrained(folder / "rewards")
    tokenizer.save_pretrained(folder / "rewards")
    return folder


@pytest.fixture(autouse=True)
def same_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variables that a worker sets when it joins."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "?")


def config_of(folder: Path, **changes: Any) -> PPOConfig:
    values = {
        "actor": ActorConfig(
            model_name_or_path=str(folder / "policy"),
            adam=AdamConfig(lr=1e-3),
            lr_scheduler="linear",
            lr_warmup_ratio=0.0,
        ),
        "critic": CriticConfig(adam=AdamConfig(lr=1e-2), lr_scheduler="constant", lr_warmup_ratio=0.0),
        "rollout": RolloutConfig(temperature=0.5, micro_batch_size=2),
        "train": TrainConfig(backend="torch", micro_batch_size=2, batch_size=2, verify_steps=0),
        "ds": ScorerDeepSpeedConfig(param_dtype="fp32"),
    }
    return PPOConfig(**(values | changes))


def sampled(**columns: Any) -> Batch:
    return batch_of([trajectory(token_ids=ids) for ids in TOKENS], **({"advantages": 1.0} | columns))


@torch.no_grad()
def log_probs_of(path: Path | str, temperature: float) -> Tensor:
    """Returns the log-probs of all actions by transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    return torch.cat([plain_log_probs(model, sequence(tokens), temperature) for tokens in TOKENS])


def started(worker: Any, *arguments: Any) -> Any:
    worker.start(*PLACE, *arguments)
    return worker


def policy(config: PPOConfig, total_steps: int = 4, texts: SampleStore | None = None) -> Any:
    return started(PolicyWorker(config, 0, Mesh()), total_steps, texts)


def weights_of(worker: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in worker.model.module.named_parameters()}


def moved(before: dict[str, Tensor], worker: Any) -> float:
    """Returns the largest change of a weight."""
    return max(float((p - before[name]).abs().max()) for name, p in weights_of(worker).items())


# ---- joining


@pytest.mark.parametrize(
    ("gpu", "local_rank", "local_size"),
    [({}, "5", "?"), ({"local_rank": 1, "local_size": 4}, "1", "4"), ({"local_rank": 0}, "0", "?")],
)
def test_a_rank_joins_the_group_that_it_describes(monkeypatch, gpu, local_rank, local_size):
    calls: dict[str, Any] = {}
    monkeypatch.setattr(workers, "init_distributed", lambda **options: calls.update(options))
    monkeypatch.setattr(workers, "seed_everything", lambda *options: calls.update(seeded=options))
    joined = staticmethod(lambda **sizes: calls.update(sizes) or "joined")
    monkeypatch.setattr(workers.ProcessMesh, "joined", joined)
    monkeypatch.setenv("KEPT", "kept")
    train = TrainConfig(rank_timeout=600, seed=7, full_determinism_enable=True)
    worker = PolicyWorker(PPOConfig(train=train), 5, Mesh(data=2, sequence=3, tensor=2), **gpu)
    worker.join("host", 1234)
    wanted = ["5", local_rank, "12", local_size, "host", "1234"]
    assert [os.environ[name] for name in VARIABLES] == wanted and os.environ["KEPT"] == "kept"
    assert calls == {"timeout_minutes": 11, "sequence": 3, "tensor": 2, "seeded": (7, True)}
    assert worker.mesh == "joined"


def test_calls_take_as_many_arguments_as_they_are_told_and_book_their_memory() -> None:
    worker: Any = PolicyWorker(PPOConfig(), 0, Mesh())
    worker.forward = lambda *batches: batches
    worker.has_written = lambda: "written"
    assert worker.call("forward", 1, "batch", "a result to wait for") == ("batch",)
    assert worker.call("has_written", 0, "batch") == "written"
    assert list(worker.peak_memory()) == ["logprobs"] and not worker.peak_memory()


# ---- the policy


def test_policy_reference_and_teacher_have_the_log_probs_of_transformers(threads, folder):
    def work() -> None:
        config = config_of(folder)
        found = {"policy": policy(config)}
        for name in ("policy", "other"):
            frozen = FrozenWorker(config, 0, Mesh())
            found[f"frozen {name}"] = started(frozen, str(folder / name), ACTOR_FLAG, False)
        for name, worker in found.items():
            log_probs = torch.from_numpy(worker.forward(sampled()))
            expected = log_probs_of(folder / name.split()[-1], 0.5)
            torch.testing.assert_close(log_probs, expected, atol=ROUNDING, rtol=0)
        assert [type(found[name].model).__name__ for name in found][:2] == ["TorchEngine", "TorchFrozen"]

    threads(1, work)


def test_an_update_takes_a_step_for_each_window(threads: Callable, folder: Path) -> None:
    """The learning rate falls linearly over the steps of the run. Log-probs before the update are returned in
    the order of the first window if the batch has none."""

    def work() -> None:
        worker, batch = policy(config_of(folder), 4), sampled()
        known, before = worker.forward(batch), weights_of(worker)
        steps, log_probs = worker.update(batch, [[2, 0], [1]], 0.0)
        first = np.concatenate([known[6:], known[:4]])
        assert log_probs == pytest.approx(first, abs=ROUNDING)
        assert [step["num_tokens"] for step in steps] == [7, 2]
        assert [step["lr"] for step in steps] == pytest.approx([1e-3, 0.75e-3])
        # Adam's first two steps move every weight by at most lr each
        assert 1e-3 < moved(before, worker) < 2e-3
        known = replace(batch, log_probs=worker.forward(batch))
        assert worker.update(known, [[0, 1, 2]], 0.0)[1] is None

    threads(1, work)


def test_a_checkpoint_restores_a_policy_and_its_step(threads: Callable, folder: Path, tmp_path: Path) -> None:
    def work() -> None:
        ckpt = PPOCkptConfig(path=str(tmp_path))
        worker = policy(config_of(folder, ckpt=ckpt))
        worker.update(sampled(), [[0], [1]], 0.0)
        worker.save_checkpoint("global_step1", {"number": 3})
        assert worker.has_written()
        worker.finish_checkpoint()
        (tmp_path / "_actor" / UNFINISHED / "global_step1").rename(tmp_path / "_actor" / "global_step1")
        other = policy(config_of(folder, ckpt=ckpt))
        assert moved(weights_of(worker), other) > 1e-4
        assert other.load_checkpoint("global_step1") == {"number": 3}
        assert moved(weights_of(worker), other) == 0 and other.model.steps == 2
        assert other.update(sampled(), [[2]], 0.0)[0][0]["lr"] == pytest.approx(0.5e-3)

    threads(1, work)


def test_a_checkpoint_may_be_written_later(threads: Callable, folder: Path, tmp_path: Path) -> None:
    def work() -> None:
        worker = policy(config_of(folder, ckpt=PPOCkptConfig(path=str(tmp_path), async_save=True)))
        asked, save = {}, worker.model.save_checkpoint
        worker.model.save_checkpoint = lambda *args, later: (
            asked.update(later=later) or save(*args, later=later)
        )
        worker.save_checkpoint("global_step1", {})
        assert asked == {"later": True}
        worker.finish_checkpoint()
        assert worker.has_written()

    threads(1, work)


def test_an_exported_policy_is_a_model_with_its_tokenizer(threads, folder, tmp_path):
    def work() -> None:
        worker = policy(config_of(folder))
        worker.update(sampled(), [[0]], 0.0)
        worker.export(str(tmp_path / "out"))
        expected = torch.from_numpy(worker.forward(sampled()))
        torch.testing.assert_close(log_probs_of(tmp_path / "out", 0.5), expected, atol=ROUNDING, rtol=0)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer("1 + 1")["input_ids"] == tiny_tokenizer()("1 + 1")["input_ids"]

    threads(1, work)


def test_an_exported_adapter_is_one_of_peft_for_its_base_model(threads, folder, tmp_path):
    def work() -> None:
        ds = ScorerDeepSpeedConfig(param_dtype="fp32", lora=LoraConfig(rank=2))
        worker = policy(config_of(folder, ds=ds))
        worker.update(sampled(), [[0, 1]], 0.0)
        worker.export(str(tmp_path / "out"))
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder / "policy"), tmp_path / "out"
        )
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        expected = torch.from_numpy(worker.forward(sampled()))
        torch.testing.assert_close(log_probs_of(tmp_path / "merged", 0.5), expected, atol=ROUNDING, rtol=0)
        base = log_probs_of(folder / "policy", 0.5)
        assert (expected - base).abs().max() > 10 * ROUNDING

    threads(1, work)


def test_only_the_first_rank_writes_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    worker: Any = PolicyWorker(config_of(folder), 1, Mesh(data=2))
    worker.model = SimpleNamespace(export=lambda path: (tmp_path / "asked").write_text(path))
    worker.export(str(tmp_path / "out"))
    assert (tmp_path / "asked").read_text() == str(tmp_path / "out") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("dynamic", [False, True])
def test_pretraining_texts_are_learned_in_every_step(threads: Callable, folder: Path, dynamic: bool) -> None:
    """Advantages are 0, so the weights move by the texts alone, which come in their order and start again."""
    texts = SampleStore()
    for ids in ([5, 6, 7], [8, 9], [10, 11, 12, 13]):
        texts.append(ids, [False] + [True] * (len(ids) - 1))

    def work() -> None:
        config = config_of(folder)
        train = replace(config.train, dynamic_batch_enable=dynamic, max_tokens_per_gpu=3)
        config = replace(config, train=train, actor=replace(config.actor, ptx_coef=0.5))
        worker, batch = policy(config, texts=texts), sampled(advantages=0.0)
        before, rows = weights_of(worker), []
        train_step = worker.model.train_step
        worker.model.train_step = lambda *args: rows.append(args[2][0]) or train_step(*args)
        steps, _ = worker.update(batch, [[0], [1], [2]], 0.0)
        lengths = [[list(row.lengths) for row in step] for step in rows]
        first = [[3], [2]] if dynamic else [[3, 2]]
        assert sorted(map(sorted, lengths[0])) == sorted(map(sorted, first))
        assert lengths[1] == [[4]] and sorted(map(sorted, lengths[2])) == sorted(map(sorted, first))
        assert all(step["policy/ptx_loss"] > 4 for step in steps) and moved(before, worker) > 1e-4
        without = policy(config)
        steps, _ = without.update(batch, [[0]], 0.0)
        assert "policy/ptx_loss" not in steps[0] and moved(before, without) == 0

    threads(1, work)


def test_what_a_sync_sends_and_what_it_is_compared_with(threads: Callable, folder: Path) -> None:
    def work() -> None:
        worker: Any = policy(config_of(folder))
        saved = load_file(folder / "policy" / "model.safetensors")
        assert worker.weight_bytes() == sum(4 * weight.numel() for weight in saved.values())
        worker.sender = SimpleNamespace(source=SimpleNamespace(whole_part="merged"))
        assert worker.weight_fingerprints() == fingerprints(worker.model.weights())
        assert worker.weight_fingerprints().keys() == saved.keys()
        probe = Probe(token_ids=TOKENS[0], asked=TOKENS[0])
        # at temperature 1, whatever the samples' is
        expected = log_probs_of(folder / "policy", 1.0)[:4]
        torch.testing.assert_close(worker.compute_log_probs(probe), expected, atol=ROUNDING, rtol=0)

    threads(1, work)


def test_a_sync_under_a_random_adapter_leaves_the_policy_as_it_was(threads: Callable, folder: Path) -> None:
    """The log-probs of the probe are those of the weights that are sent."""
    lora = LoraConfig(rank=2, alpha=4)
    config = config_of(folder, ds=ScorerDeepSpeedConfig(param_dtype="fp32", lora=lora))

    def work() -> None:
        worker: Any = policy(config)
        probe, sent = Probe(token_ids=TOKENS[0], asked=TOKENS[0]), []
        send = lambda version: sent.append((version, worker.compute_log_probs(probe)))
        worker.sender = SimpleNamespace(send=send)
        before = weights_of(worker)
        assert worker.send_weights(1, None) is None
        plain, random = worker.send_weights(2, probe), worker.send_weights(3, probe, 5)
        assert [version for version, _ in sent] == [1, 2, 3]
        assert torch.equal(plain, sent[1][1]) and torch.equal(random, sent[2][1])
        assert float((plain - random).abs().mean()) > 0.1 and moved(before, worker) == 0
        assert list(worker.peak_memory()) == ["sync"]
        reference = worker.forward_without_adapters(sampled())
        assert reference == pytest.approx(log_probs_of(folder / "policy", 0.5).numpy(), abs=ROUNDING)

    threads(1, work)


def test_a_sync_stops_before_it_sends_weights_that_are_not_finite(threads: Callable, folder: Path) -> None:
    def work() -> None:
        worker: Any = policy(config_of(folder))
        worker.sender = SimpleNamespace(send=lambda version: pytest.fail("weights were sent"))
        next(worker.model.module.parameters()).data.view(-1)[0] = math.nan
        with pytest.raises(RuntimeError, match="finite"):
            worker.send_weights(1, None)

    threads(1, work)


@pytest.mark.parametrize(
    ("rank", "mode", "bucket", "sent"),
    [(0, "adapter", None, "merged"), (4, "adapter", 3, "adapter"), (4, "merged", None, "merged")],
)
def test_a_sender_is_opened_as_the_flags_say(monkeypatch, rank, mode, bucket, sent):
    made = []
    monkeypatch.setattr(trained_worker, "WeightSender", lambda *args, **options: made.append((args, options)))
    ds = ScorerDeepSpeedConfig(lora=LoraConfig(rank=rank))
    config = PPOConfig(ds=ds, vllm=VllmConfig(lora_sync=mode, sync_bucket_mb=bucket))
    worker: Any = PolicyWorker(config, 3, Mesh(data=4))
    worker.model = "model"
    worker.open_weight_sync("client", "gloo", "host", 1234)
    options = {"backend": "gloo", "address": "host", "port": 1234, "rank": 3}
    options |= {"lora_sync": sent, "bucket_bytes": bucket and bucket << 20}
    assert made == [(("model", "client"), options)]


@pytest.mark.parametrize(("enabled", "beta"), [(True, 0.5), (False, None)])
def test_an_engine_is_built_as_the_flags_say(monkeypatch, folder, enabled, beta):
    made: dict[str, Any] = {}
    model = SimpleNamespace(offload=lambda: made.update(offloaded=True), reload=lambda: None)
    build = lambda build, **options: made.update(options, build=build) or model
    monkeypatch.setattr(trained_worker, "build_engine", build)
    monkeypatch.setattr(PolicyWorker, "join", lambda self, address, port: made.update(place=(address, port)))
    config = config_of(folder)
    train = replace(
        config.train, enable_ema=enabled, ema_beta=0.5, on_nonfinite="skip_step" if enabled else "stop"
    )
    actor = replace(config.actor, gradient_checkpointing_reentrant=enabled)
    config = replace(config, train=train, actor=actor)
    worker = policy(config, 17)
    built = made.pop("build")()
    assert type(built).__name__ == "PolicyModel" and built.model.name_or_path == str(folder / "policy")
    assert made.pop("mesh") is worker.mesh
    assert made == {
        "place": PLACE,
        "backend": "torch",
        "optim": actor,
        "ds": config.ds,
        "total_steps": 17,
        "gradient_checkpointing": False,
        "reentrant": enabled,
        "ema_beta": beta,
        "skip_nonfinite": enabled,
        "learns": True,
    }


# ---- the critic


def test_a_critic_begins_as_its_reward_model_and_learns_returns(threads, folder, tmp_path):
    def work() -> None:
        reward = RewardConfig(model_name_or_path=str(folder / "rewards"))
        train = TrainConfig(backend="torch", micro_batch_size=2, batch_size=2, verify_steps=2)
        config = config_of(folder, reward=reward, train=train, ckpt=PPOCkptConfig(path=str(tmp_path)))
        critic = started(CriticWorker(config, 0, Mesh()), 4)
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "rewards").eval()
        expected = values_of_row(scorer, PackedRow.of([sequence(tokens) for tokens in TOKENS]))
        values = critic.forward(sampled())
        assert values == pytest.approx(expected.numpy(), abs=ROUNDING)
        with refused(ErrorCode.BROKEN_INVARIANT, told="the critic's values"):
            critic.update(sampled(values=np.roll(values, 1), returns=values + 1), [[0, 1], [2]], 0.0)
        batch, before = sampled(values=values, returns=values + 1), weights_of(critic)
        steps, log_probs = critic.update(batch, [[0, 1], [2]], 0.0)
        assert log_probs is None and steps[0]["critic/loss"] == pytest.approx(0.5)
        assert [step["critic/lr"] for step in steps] == [1e-2, 1e-2]
        names = {name for step in steps for name in step}
        assert all(name.startswith("critic/") and "critic/critic" not in name for name in names)
        assert moved(before, critic) > 1e-3
        critic.save_checkpoint("global_step1", {})
        assert (tmp_path / "_critic" / UNFINISHED / "global_step1").exists()

    threads(1, work)


# ---- reward models


def with_end(tokens: list[int]) -> list[int]:
    return [*tokens, tiny_tokenizer().eos_token_id]


@pytest.mark.parametrize("normalize", [False, True])
def test_reward_models_score_whole_answers(threads: Callable, folder: Path, normalize: bool) -> None:
    """Two models share the ranks. A finished answer is scored at its end, another at its last token."""
    paths = f"{folder / 'rewards'},{folder / 'rewards'}"
    reward = RewardConfig(model_name_or_path=paths, normalize_enable=normalize)
    samples = [trajectory(0.0, token_ids=ids, truncated=i == 1) for i, ids in enumerate(TOKENS)]

    def work() -> None:
        worker = started(RewardWorker(config_of(folder, reward=reward), 0, Mesh()))
        scorer = AutoModelForSequenceClassification.from_pretrained(folder / "rewards").eval()
        mean, std = (0.5, 2.0) if normalize else (0.0, 1.0)
        for i, scores in enumerate(worker.forward(samples)):
            tokens = TOKENS[i] if i == 1 else with_end(TOKENS[i])
            with torch.no_grad():
                expected = (float(plain_score(scorer, sequence(tokens))) - mean) / std
            assert scores == pytest.approx([expected, expected], abs=ROUNDING)
        assert worker.forward([]).shape == (0, 2)
        assert [reader.max_len for reader in worker.readers] == [512, 512]
        assert worker.readers[0].stop_token_ids == [tiny_tokenizer().eos_token_id]

    threads(1, work)


def test_a_reward_model_needs_a_trained_head(threads: Callable, folder: Path) -> None:
    reward = RewardConfig(model_name_or_path=str(folder / "other"))

    def work() -> None:
        with pytest.raises(ValueError, match=REWARD_FLAG):
            started(RewardWorker(config_of(folder, reward=reward), 0, Mesh()))

    threads(1, work)


def test_models_that_do_not_learn_are_built_as_the_flags_say(monkeypatch, folder):
    made = []
    build = lambda build, **options: made.append((build, options))
    monkeypatch.setattr(workers, "build_frozen", build)
    monkeypatch.setattr(workers.Worker, "join", lambda self, address, port: None)
    config = config_of(folder, reward=RewardConfig(model_name_or_path=str(folder / "rewards"), offload=True))
    here = replace(config, reward=replace(config.reward, offload=False))
    started(RewardWorker(config, 0, Mesh()))
    started(RewardWorker(here, 0, Mesh()))
    started(FrozenWorker(config, 0, Mesh()), str(folder / "other"), ACTOR_FLAG, True)
    assert [options["offload"] for _, options in made] == [True, False, True]
    assert all(options["backend"] == "torch" and options["ds"] == config.ds for _, options in made)
    assert all(options["mesh"] is not None for _, options in made)
    models = [build() for build, _ in made]
    assert [type(model).__name__ for model in models] == ["ScoreModel", "ScoreModel", "PolicyModel"]
    assert models[2].model.name_or_path == str(folder / "other")
    assert AutoConfig.from_pretrained(folder / "rewards").mean == 0.5


def test_one_more_token_than_two_rows_hold_needs_a_third():
    """The rows have 21 tokens for a budget of 10: rounded down there would be two rows, and one of them too
    long."""
    assert len(row_groups([7, 7, 7], max_tokens=10, max_sequences=1)) == 3
    rows = row_groups([5, 5, 5, 5, 1], max_tokens=10, max_sequences=1)
    assert sorted(sum([5, 5, 5, 5, 1][i] for i in row) for row in rows) == [1, 10, 10]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("worker_class", [PolicyWorker, FrozenWorker])
def test_log_probs_are_of_the_temperature_that_was_sampled_at(worker_class, temperature):
    """The log-probs are those before the update, of the policy and of its reference. The update computes them
    in the same way, so that its first ratios are 1."""
    config = replace(PPOConfig(), rollout=RolloutConfig(temperature=temperature))
    policy = PolicyModel(tiny_model(tiny_config("qwen3"))).eval()
    batch = Batch.of([trajectory(0.0, [2, 3, 4]), trajectory(1.0, [7, 8])])
    worker = worker_class(config, 0, Mesh())
    worker.model = SimpleNamespace(
        forward=lambda rows, read: [read(policy, row) for row in rows],
        shares_prefixes=False,
        trains_on_prefixes=False,
    )
    with torch.no_grad():
        found = torch.from_numpy(worker.forward(batch))
        samples = [sequence(ids) for ids in ([1, 2, 3, 4], [1, 7, 8])]
        expected = torch.cat([plain_log_probs(policy.model, sample, temperature) for sample in samples])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    if worker_class is PolicyWorker:
        seen: list[Tensor] = []
        ones = np.ones(len(found), np.float32)
        learned = replace(batch, log_probs=found.numpy(), advantages=ones, returns=ones)
        for row in worker.rows(learned, [0, 1]):
            worker.objective(0.0, seen=seen)(policy, row, LossNorm(5, 2))
        torch.testing.assert_close(torch.cat(seen), found, atol=1e-5, rtol=0)


def test_the_reference_of_adapters_is_the_model_without_them():
    model = tiny_model(tiny_config("qwen3"))
    batch = Batch.of([trajectory(0.0, [2, 3, 4])])
    worker = PolicyWorker(replace(PPOConfig(), rollout=RolloutConfig()), 0, Mesh())
    before = PolicyModel(copy.deepcopy(model)).eval()
    ds = replace(worker.config.ds, lora=LoraConfig(rank=2, alpha=4, target_modules=("q_proj",)))
    policy = PolicyModel(prepare_for_training(model, ds)).eval()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    answer = lambda rows, read: [read(policy, row).detach() for row in rows]
    worker.model = SimpleNamespace(forward=answer, module=policy, shares_prefixes=False)
    with torch.no_grad():
        expected = before(PackedRow.from_batch(batch)).log_probs.numpy()
    assert worker.forward_without_adapters(batch) == pytest.approx(expected, abs=1e-6)
    assert np.abs(worker.forward(batch) - expected).max() > 1e-3


def test_rewards_of_packed_answers_go_to_their_samples():
    """Rows hold the answers in another order, longest first; scores are normalized."""
    config = replace(PPOConfig(), train=TrainConfig(dynamic_batch_enable=True, max_tokens_per_gpu=9))
    worker = RewardWorker(config, 0, Mesh())
    last_tokens = lambda rows, read: [row.token_ids[row.actions].float() for row in rows]
    reader = lambda t: score_last(t.token_ids.tolist(), len(t.token_ids))
    worker.models, worker.readers = [SimpleNamespace(forward=last_tokens, shares_prefixes=False)], [reader]
    worker.statistics = [(10.0, 2.0)]
    answers = [[30], [4, 4, 40], [50, 5], [6, 6, 6, 60]]
    found = worker.forward([trajectory(0.0, answer) for answer in answers])
    assert found.tolist() == [[(answer[-1] - 10) / 2] for answer in ([30], [40], [5], [60])]
