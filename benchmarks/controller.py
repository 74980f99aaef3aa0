"""Cost of an RL controller's work for each token, in one process and without any model: nanoseconds of CPU
time for each stage, and the peak of its memory.

    collect   all groups to one batch
    score     each rank's share of the batch as bytes, and the answers of the ranks of two models
    credit    rewards, KL and group baselines to advantages (GRPO with a reference), and their metrics
    update    each rank's share of the batch with credit as bytes

These are the step's critical path. The rest is done while others work, and is not in the sums:

    receive   groups as engines send them, from bytes to records; while the engines sample others
    metrics   statistics of the samples; while the models compute log-probs
    journal   every sample with its credit in Parquet, without texts; in a thread of its own

Each stage is compared with its floor, measured in the same round: the same content moved as often, as bare
flat arrays; for credit the shortest arithmetic on flat tensors, without metrics but the mean KL. The floor
has no top-p/top-k support, and divides samples among ranks without a look at their lengths and prefixes.
Exits with an error if the samples do not come back unchanged from the ranks.

    python benchmarks/controller.py --samples 8192 --tokens 512
    python benchmarks/controller.py --samples 2048 --tokens 8192 --rounds 3
    python benchmarks/controller.py --samples 2048 --tokens 512 --kept 6
"""

import argparse
import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from openrlhf import heap
from openrlhf.config.ppo import AdvantageConfig, AlgoConfig, KLConfig, RewardConfig
from openrlhf.data.related import identities, parts_of_related
from openrlhf.observability.journal import Journal, Trained
from openrlhf.observability.rollout_metrics import rollout_metrics, source_metrics
from openrlhf.training.advantages import compute_advantages
from openrlhf.training.schedule import training_schedule
from openrlhf.types import Batch, Nuclei, Prompt, PromptGroup, Trajectory, not_none, runs

CRITICAL, BESIDE = ("collect", "score", "credit", "update"), ("receive", "metrics", "journal")
PROMPT_TOKENS, SAMPLES_OF_PROMPT, RANKS = 64, 8, 8
VOCABULARY = 150_000


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    heap.grow()  # as a command does
    heap.freeze()
    heap.keep()
    groups = make_groups(options.samples, options.tokens, options.kept)
    num_tokens = sum(len(t.token_ids) for group in groups for t in group.trajectories)
    print(f"{options.samples} samples, {num_tokens / 1e6:.1f} M tokens, {RANKS} ranks", end="")
    print(f", load {os.getloadavg()[0]:.1f}")
    peak = ours(groups).peak  # of later rounds malloc has kept the memory
    floor(groups)
    print(f"peak {peak / num_tokens:.0f} bytes a token")
    report([(ours(groups), floor(groups)) for _ in range(options.rounds)], num_tokens)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=512, help="mean length of a response")
    parser.add_argument(
        "--kept", type=int, default=0, help="tokens in each action's top-p/top-k support; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def make_groups(num_samples: int, mean_length: int, num_kept: int) -> list[PromptGroup]:
    rng = np.random.default_rng(0)
    return [make_group(i, rng, mean_length, num_kept) for i in range(num_samples // SAMPLES_OF_PROMPT)]


def make_group(prompt_id: int, rng: np.random.Generator, mean_length: int, num_kept: int) -> PromptGroup:
    prompt = Prompt(prompt_id=prompt_id, text="a prompt of some words " * 10)
    lengths = rng.integers(mean_length // 2, mean_length * 3 // 2, SAMPLES_OF_PROMPT)
    prefix = rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
    return PromptGroup(
        prompt=prompt,
        trajectories=[
            make_trajectory(prompt, prefix, i, rng, int(n), num_kept) for i, n in enumerate(lengths)
        ],
    )


def make_trajectory(
    prompt: Prompt, prefix: np.ndarray, index: int, rng: np.random.Generator, length: int, num_kept: int
) -> Trajectory:
    kept = Nuclei(
        ids=rng.integers(0, VOCABULARY, length * num_kept, dtype=np.int32),
        counts=np.full(length, num_kept, np.int32),
        log_masses=np.zeros(length, np.float32),
    )
    reward = float(rng.integers(2))
    return Trajectory(
        prompt=prompt,
        sample_index=index,
        token_ids=np.concatenate([prefix, rng.integers(0, VOCABULARY, length, dtype=np.int32)]),
        action_mask=np.arange(PROMPT_TOKENS + length) >= PROMPT_TOKENS,
        rollout_log_probs=-rng.random(length, np.float32),
        weight_versions=runs(np.full(length, 3)),
        kept=kept if num_kept else None,
        reward=reward,
        score=reward,
    )


Bytes = tuple[bytes, list[bytes]]


def dump(record: object) -> Bytes:
    """Pickles a record as Ray does: arrays apart from the record that holds them."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(record, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer.raw()) for buffer in buffers]


def load(sent: Bytes) -> Any:
    return pickle.loads(sent[0], buffers=sent[1])


class Clock:
    """Records CPU seconds of each stage of one round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak = 0.0
        """Peak memory in bytes, above the memory in use at the start."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name] = time.process_time() - started

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = memory("VmRSS")
        yield
        self.peak = memory("VmHWM") - before


def memory(name: str) -> float:
    """Returns a figure of the kernel about this process's memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


def ours(groups: Sequence[PromptGroup]) -> Clock:
    now = Clock()
    sent = [dump(group) for group in groups]
    with now.watching_memory():
        with now.stage("receive"):
            received = [load(one) for one in sent]
        with now.stage("collect"):
            trajectories = [t for group in received for t in group.trajectories]
            batch = Batch.of(trajectories)
        with now.stage("score"):
            batch = replace(batch, log_probs=answers(batch), ref_log_probs=answers(batch))
        with now.stage("credit"):
            batch = credited(batch, trajectories)
        with now.stage("update"):
            lengths = batch.lengths.tolist()
            (step,) = training_schedule(
                lengths,
                range(len(lengths)),
                num_batches=1,
                epochs=1,
                num_ranks=RANKS,
                seed=(0,),
                token_ids=identities(batch.token_ids, batch.lengths),
            )
            num_dealt = sum(len(load(dump(batch.select(share))).token_ids) for share in step)
        with now.stage("metrics"):
            rollout_metrics(trajectories, version=4) | source_metrics(trajectories, version=4)
    with TemporaryDirectory() as folder, now.stage("journal"):
        journal = Journal(Path(folder))
        journal.write(1, trajectories, trained=Trained(batch=batch, schedule=[step], first_update=0))
        journal.close()
    if num_dealt != len(batch.token_ids):
        sys.exit(f"error: {num_dealt} of {len(batch.token_ids)} tokens were dealt to the ranks")
    if not np.array_equal(not_none(batch.log_probs), batch.rollout_log_probs):
        sys.exit("error: the answers of the ranks are not in the batch's order")
    return now


def answers(batch: Batch) -> np.ndarray:
    """Returns the answers of a model whose ranks echo the log-probs that came with their shares."""
    token_ids = identities(batch.token_ids, batch.lengths)
    shares = parts_of_related(token_ids, batch.lengths.tolist(), RANKS)
    parts = [load(dump(batch.select(share))).rollout_log_probs for share in shares]
    return batch.put_together(shares, [load(dump(part)) for part in parts])


def credited(batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
    advantage, kl = AdvantageConfig(estimator="group_norm"), KLConfig(use_loss=True, estimator="k3")
    algo = AlgoConfig(advantage=advantage, kl=kl)
    return compute_advantages(
        batch,
        trajectories,
        estimator=algo.build_estimator(),
        algo=algo,
        reward=RewardConfig(),
        kl_coef=0.01,
        max_new_tokens=1 << 20,
    )[0]


Arrays = dict[str, np.ndarray]
OF_TOKENS, OF_SEQUENCES = ("token_ids", "action_mask"), ("lengths", "num_actions", "rewards")


def floor(groups: Sequence[PromptGroup]) -> Clock:
    now = Clock()
    sent = [dump(flat_arrays(group)) for group in groups]
    with now.watching_memory():
        with now.stage("receive"):
            received: list[Arrays] = [load(one) for one in sent]
        with now.stage("collect"):
            whole = {name: np.concatenate([arrays[name] for arrays in received]) for name in received[0]}
        order = np.random.default_rng(1).permutation(len(whole["lengths"]))
        shares = [order[rank::RANKS] for rank in range(RANKS)]
        with now.stage("score"):
            for _ in range(2):
                parts = [load(dump(cut(whole, share)))["rollout_log_probs"] for share in shares]
                log_probs = np.concatenate([load(dump(part)) for part in parts])
        with now.stage("credit"):
            whole |= bare_credit(whole, log_probs)
        with now.stage("update"):
            for share in shares:
                load(dump(cut(whole, share)))
    return now


def flat_arrays(group: PromptGroup) -> Arrays:
    batch = Batch.of(group.trajectories)
    return {
        "token_ids": batch.token_ids,
        "action_mask": batch.action_mask,
        "lengths": batch.lengths,
        "num_actions": batch.num_actions,
        "rollout_log_probs": batch.rollout_log_probs,
        "rewards": np.array([t.reward for t in group.trajectories], np.float32),
    }


def cut(whole: Arrays, share: np.ndarray) -> Arrays:
    """Returns the share's parts of every array."""
    found: Arrays = {}
    for name, array in whole.items():
        if name in OF_SEQUENCES:
            found[name] = array[share]
            continue
        sizes = whole["lengths" if name in OF_TOKENS else "num_actions"]
        ends = sizes.cumsum()
        found[name] = np.concatenate([array[ends[i] - sizes[i] : ends[i]] for i in share])
    return found


def bare_credit(whole: Arrays, ref_log_probs: np.ndarray) -> Arrays:
    rewards = torch.from_numpy(whole["rewards"]).view(-1, SAMPLES_OF_PROMPT)
    shaped = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-9)
    advantages = shaped.flatten().repeat_interleave(torch.from_numpy(whole["num_actions"]))
    log_ratio = torch.from_numpy(whole["rollout_log_probs"]) - torch.from_numpy(ref_log_probs)
    ((-log_ratio).exp() - 1 + log_ratio).mean()
    return {
        "log_probs": whole["rollout_log_probs"],
        "ref_log_probs": ref_log_probs,
        "advantages": advantages.numpy(),
        "returns": advantages.numpy(),
    }


def report(rounds: Sequence[tuple[Clock, Clock]], num_tokens: int) -> None:
    print(f"\nns of CPU time for a token\n{'stage':<10}{'ours':>8}{'floor':>8}")
    for name in (*CRITICAL, *BESIDE):
        columns = [statistics.median(clocks[i].seconds.get(name, 0.0) for clocks in rounds) for i in (0, 1)]
        print(f"{name:<10}" + "".join(f"{seconds / num_tokens * 1e9:>8.1f}" for seconds in columns))
    totals = [
        [sum(clock.seconds.get(name, 0.0) for name in CRITICAL) for clock in clocks] for clocks in rounds
    ]
    for name, i in (("ours", 0), ("floor", 1)):
        total = statistics.median(total[i] for total in totals) / num_tokens * 1e9
        print(f"{name}: {total:.0f} ns a token on the critical path")
    ratios = sorted(mine / least for mine, least in totals)
    print(f"ours / floor: {statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
