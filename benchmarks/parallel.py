"""Overhead of ranks that share a row, in each `--ds.sequence_parallel_mode`, or the model's matrices
(tensor), for 2 and 4 ranks in one run:

    overhead       CPU time of a rank, divided by that of one rank with the whole row over the number of ranks
    imbalance      CPU time of the busiest rank, divided by the mean
    kept           bytes that a rank keeps for the backward pass, divided by those of one rank over the
                   number of ranks: 1 is a fall as 1 / ranks
    MB sent        by each rank, forward and backward, counted in the collectives: by ranks that share rows
                   for attention; where they share matrices a sum of hidden states (N, H) counts as what is
                   sent round a ring, 2 (ranks - 1) / ranks of it

A pass is the SFT loss of one packed row and its gradients, in float32 over gloo, without an optimizer. Rows
are one long sequence, or many short ones. A round is a pass of every way, in random order. Ranks share the
cores of the machine, so CPU time is what counts; it includes that of gloo's threads. Exits with an error if a
way has another loss or other gradients than one rank, sends another number of bytes than its formula
(`FORMULAS`), or if a rank of the ring keeps more than its share.

    python benchmarks/parallel.py
"""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from openrlhf.models.attention import PACKED
from openrlhf.models.backbone import get_row_layout, hidden_states
from openrlhf.models.policy import PolicyModel
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.models.tensor_parallel import shard_matrices
from openrlhf.rows import LossNorm, PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective

MODES: Any = ("allgather", "ring", "ulysses")
TENSOR: Any = "tensor"
RANKS = (2, 4)
LAYERS, HEADS, KV_HEADS, SIZE = 4, 8, 4, 32
"""Layers and shape of attention. Ranks divide the heads."""
SHORT = 128
"""Length of a short sequence, in tokens."""
FLOAT = 4
"""Bytes of a float32 number."""
TOLERANCE = 1e-4
"""Relative tolerance of a loss and of the norm of its gradients."""


class Way(NamedTuple):
    row: str
    ranks: int
    mode: Any = "auto"


class Pass(NamedTuple):
    """Figures of one rank in one pass."""

    loss: float
    norm: float
    cpu: float
    wall: float
    sent: int
    """Bytes sent by attention."""


def _by_allgather(tokens: int, ranks: int) -> float:
    """Returns the bytes of the keys and values of every other rank, and of their gradients on the way
    back."""
    return LAYERS * 2 * (ranks - 1) / ranks * tokens * 2 * KV_HEADS * SIZE * FLOAT


def _by_ring(tokens: int, ranks: int) -> float:
    """Returns the bytes of keys and values that travel past every other rank, twice, the second time with
    gradients."""
    return LAYERS * 3 * (ranks - 1) / ranks * tokens * 2 * KV_HEADS * SIZE * FLOAT


def _by_ulysses(tokens: int, ranks: int) -> float:
    """Returns the bytes of all heads but a rank's own, of queries, outputs, and of keys and values, which
    each rank has at least one of; and of the gradients of all."""
    heads = 2 * HEADS + 2 * math.lcm(KV_HEADS, ranks)
    return LAYERS * 2 * (ranks - 1) / ranks * tokens / ranks * heads * SIZE * FLOAT


def _by_tensor(tokens: int, ranks: int) -> float:
    """Returns the bytes of embeddings, of each layer's attention and MLP outputs, and of the gradients of
    their inputs."""
    return (1 + 4 * LAYERS) * 2 * (ranks - 1) / ranks * tokens * HEADS * SIZE * FLOAT


FORMULAS: dict[str, Callable[[int, int], float]] = {
    "allgather": _by_allgather,
    "ring": _by_ring,
    "ulysses": _by_ulysses,
    TENSOR: _by_tensor,
}
"""Function (tokens of a row, ranks) -> bytes that a rank sends in a pass, by mode."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a row, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (options, f"file://{folder}/group"), nprocs=max(RANKS), start_method="fork")


def run(rank: int, options: argparse.Namespace, meeting_place: str) -> None:
    """Runs every way on one rank. All ranks meet for every way; those that a way does not need wait."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=max(RANKS))
    groups: dict[int, Any] = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    ways = [Way(row, 1) for row in ROWS] + [Way(*way) for way in product(ROWS, RANKS, (*MODES, TENSOR))]
    rng, whole, parts = random.Random(0), build(), {ranks: build() for ranks in RANKS if rank < ranks}
    for ranks, model in parts.items():
        shard_matrices(model.model, groups[ranks])
    passes: dict[Way, list[list[Pass]]] = {way: [] for way in ways}
    kept: dict[Way, list[int]] = {}
    for turn in range(options.rounds + 1):
        for way in rng.sample(ways, len(ways)):
            dist.barrier()
            found = None
            if rank < way.ranks:
                model = parts[way.ranks] if way.mode == TENSOR else whole
                shares_rows = way.mode in MODES
                sharing = SequenceParallel(group=groups[way.ranks], mode=way.mode) if shares_rows else None
                get_row_layout(model.model).sharing = sharing
                row = ROWS[way.row](options.tokens)
                found = kept_bytes(model, row) if turn == 0 else one_pass(model, row)
            everyone = [None] * max(RANKS)
            dist.all_gather_object(everyone, found)
            of_ranks: list[Any] = everyone[: way.ranks]
            if turn == 0:
                kept[way] = of_ranks
            else:
                passes[way].append(of_ranks)
    if rank == 0:
        report(options, passes, kept)
    dist.barrier()
    dist.destroy_process_group()


ROWS: dict[str, Callable[[int], PackedRow]] = {
    "one sequence": lambda tokens: row_of([tokens]),
    "short ones": lambda tokens: row_of(
        [SHORT] * (tokens // SHORT) + [tokens % SHORT] * (tokens % SHORT > 0)
    ),
}


def row_of(lengths: list[int]) -> PackedRow:
    random = torch.Generator().manual_seed(0)
    ids = (torch.randint(VOCABULARY, (length,), generator=random) for length in lengths)
    return PackedRow.of([Sample(token_ids=x, action_mask=torch.arange(len(x)) > 0) for x in ids])


VOCABULARY = 4096


def build() -> PolicyModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * SIZE,
        intermediate_size=3 * HEADS * SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=2**20,
    )
    model: Any = Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED)
    return PolicyModel(model)


def one_pass(model: PolicyModel, row: PackedRow) -> Pass:
    model.zero_grad()
    with counted() as sent:
        wall, cpu = time.perf_counter(), time.process_time()
        loss, _ = SFTObjective()(model, row, LossNorm(row.num_tokens, len(row.lengths)))
        loss.backward()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Pass(float(loss.detach()), norm_of_gradients(model), cpu, wall, sum(sent))


def norm_of_gradients(model: PolicyModel) -> float:
    """Returns the norm over all ranks, combined as DeepSpeed does."""
    sharing = get_row_layout(model.model).sharing
    gradients = {p: p.grad for p in model.parameters() if p.grad is not None}
    flat = torch.cat([x.flatten() for x in gradients.values()])
    if sharing is not None:
        dist.all_reduce(flat, group=sharing.group)
        flat /= sharing.size
    parts = torch.cat([torch.full((x.numel(),), hasattr(p, "shard")) for p, x in gradients.items()])
    squares = torch.stack([flat[~parts].square().sum(), flat[parts].square().sum()])
    if parts.any():
        dist.all_reduce(squares[1:], group=next(p.shard.group for p in gradients if hasattr(p, "shard")))
    return float(squares.sum().sqrt())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Patches every collective of attention, and every sum of hidden states, to append the bytes that this
    rank sends to others."""
    sent: list[int] = []
    names = ("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_reduce")
    own = {name: getattr(dist, name) for name in names}

    def gather(output: Tensor, x: Tensor, **options: Any) -> Any:
        sent.append((output.numel() - x.numel()) * FLOAT)
        return own["all_gather_single"](output, x, **options)

    def scatter(output: Tensor, x: Tensor, **options: Any) -> Any:
        sent.append((x.numel() - output.numel()) * FLOAT)
        return own["reduce_scatter_single"](output, x, **options)

    def exchange(output: Tensor, x: Tensor, *splits: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        stays = 0 if splits else x.numel() // group.size()
        sent.append((x.numel() - stays) * FLOAT)
        return own["all_to_all_single"](output, x, *splits, group=group, **options)

    def total(x: Tensor, *arguments: Any, **options: Any) -> Any:
        if x.dim() == 3:
            ranks = options["group"].size()
            sent.append(2 * (ranks - 1) * x.numel() // ranks * FLOAT)
        return own["all_reduce"](x, *arguments, **options)

    try:
        for name, function in zip(names, (gather, scatter, exchange, total), strict=True):
            setattr(dist, name, function)
        yield sent
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def kept_bytes(model: PolicyModel, row: PackedRow) -> int:
    """Returns the bytes that a pass keeps for its backward pass, beside the weights; also warms up."""
    found: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        states = hidden_states(model.model, row)  # the variable keeps the pass's memory alive
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert states.requires_grad
    return sum(size for place, size in found.items() if place not in weights)


def report(
    options: argparse.Namespace, passes: dict[Way, list[list[Pass]]], kept: dict[Way, list[int]]
) -> None:
    print(f"{options.tokens} tokens, {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print("| row | ranks | mode | overhead | imbalance | wall, s | kept | MB sent |")
    print("|---|---|---|---|---|---|---|---|")
    for way, rounds in passes.items():
        alone = passes[Way(way.row, 1)]
        if way.ranks == 1:
            cpu, wall = (statistics.median(getattr(one, x) for (one,) in alone) for x in ("cpu", "wall"))
            print(f"| {way.row} | 1 | | {cpu:.2f} s | | {wall:.2f} | {kept[way][0] / 2**20:.0f} MB | |")
            continue
        check(way, rounds, alone, options.tokens)
        mean = [statistics.mean(rank.cpu for rank in ranks) for ranks in rounds]
        ratios = sorted(way.ranks * m / one.cpu for m, (one,) in zip(mean, alone, strict=True))
        busiest = statistics.median(
            max(rank.cpu for rank in ranks) / m for ranks, m in zip(rounds, mean, strict=True)
        )
        wall = statistics.median(max(rank.wall for rank in ranks) for ranks in rounds)
        share = max(kept[way]) * way.ranks / kept[Way(way.row, 1)][0]
        if way.mode == "ring" and share > 1 + TOLERANCE:
            sys.exit(f"error: {way}: a rank keeps {share:.2f} times its share")
        print(
            f"| {way.row} | {way.ranks} | {way.mode} | {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} - {ratios[-1]:.2f}) | {busiest:.2f} | {wall:.2f} | {share:.2f} | "
            f"{rounds[0][0].sent / 2**20:.1f} |"
        )


def check(way: Way, rounds: list[list[Pass]], alone: list[list[Pass]], tokens: int) -> None:
    ((expected,), *_) = alone
    for rank in (rank for ranks in rounds for rank in ranks):
        for found, wanted in ((rank.loss, expected.loss), (rank.norm, expected.norm)):
            if not math.isclose(found, wanted, rel_tol=TOLERANCE):
                sys.exit(f"error: {way} has {found}, one rank has {wanted}: not the same training")
        if rank.sent != FORMULAS[way.mode](tokens, way.ranks):
            sys.exit(f"{way}: sent {rank.sent} bytes, not {FORMULAS[way.mode](tokens, way.ranks)}")


if __name__ == "__main__":
    main()
