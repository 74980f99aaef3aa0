"""Times the forward and backward pass of a packed row in three ways: `ours` computes common prefixes once,
`whole` computes every token (`--ds.share_prefixes false`), and `bare` is a loop of transformers' model with
sdpa over the sequences of the row, with logits of the answers alone.

    update       8 samples of a prompt of 1024 tokens, with answers of 128 tokens
    demo         8 samples of a prompt of 27 tokens, with answers of 24 tokens
    pairs 1, 5   4 pairs of answers of 512 tokens to a prompt of 512; of 103 to one of 512
    nothing      8 sequences of 128 tokens with nothing in common

Each way runs once in a round, in random order, with a Qwen3 of random weights: in float32 on a CPU, in bf16
on a GPU. The table shows the number of tokens that go through the layers, the median ratios of the times over
the rounds (smallest to largest), and the bytes kept for the backward pass. Exits with an error if the loss or
the gradient of a way differs from that of the bare loop.

    python benchmarks/prefixes.py
"""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from openrlhf.device import DEVICE_TYPE
from openrlhf.models.attention import PACKED
from openrlhf.models.backbone import get_row_layout
from openrlhf.models.policy import PolicyModel
from openrlhf.models.prefixes import build_tree
from openrlhf.rows import PackedRow, Sample

DTYPE = torch.bfloat16 if DEVICE_TYPE == "cuda" else torch.float32
CLOCK = time.perf_counter if DEVICE_TYPE == "cuda" else time.process_time
"""Clock of the passes. On a CPU it counts the time of this process alone, so that other processes do not
distort it."""
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}[DTYPE]
"""Maximum relative difference of the losses, and of the norms of the gradients."""


class Shape(NamedTuple):
    """Sizes of a row."""

    prompts: int
    """Number of prompts."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""
    answers: int
    """Number of answers of each prompt."""


SHAPES = {
    "update": Shape(1, 1024, 128, 8),
    "demo": Shape(1, 27, 24, 8),
    "pairs 1": Shape(4, 512, 512, 2),
    "pairs 5": Shape(4, 512, 103, 2),
    "nothing": Shape(8, 64, 64, 1),
}


class Pass(NamedTuple):
    """Measurements of one forward and backward pass."""

    seconds: float
    kept: int
    """Bytes that the forward pass keeps for the backward pass."""
    loss: float
    norm: float
    """Norm of the gradients."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    policy = PolicyModel(model_of(options.hidden, options.layers, options.vocab)).to(DEVICE_TYPE, DTYPE)
    print(f"hidden {options.hidden}, {options.layers} layers, vocabulary {options.vocab}, ", end="")
    print(f"{torch.get_num_threads()} threads, {options.rounds} rounds")
    print("| row | tokens read / of the row | bare / ours | whole / ours | memory kept, ours / whole |")
    print("|---|---|---|---|---|")
    for name in options.shapes:
        row = row_of(SHAPES[name], options.vocab).to(DEVICE_TYPE)
        print(f"| {name} | {measure(policy, row, options.rounds)} |", flush=True)


def model_of(hidden: int, layers: int, vocab: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    config._attn_implementation = PACKED
    return Qwen3ForCausalLM(config)


def row_of(shape: Shape, vocab: int) -> PackedRow:
    random_tokens = torch.Generator().manual_seed(1)
    draw = lambda count: torch.randint(vocab, (count,), generator=random_tokens)
    mask = torch.arange(shape.prompt + shape.answer) >= shape.prompt
    samples = []
    for _ in range(shape.prompts):
        prompt = draw(shape.prompt)
        for _ in range(shape.answers):
            ids = torch.cat([prompt, draw(shape.answer)])
            samples.append(Sample(token_ids=ids, action_mask=mask))
    return PackedRow.of(samples)


def measure(policy: PolicyModel, row: PackedRow, rounds: int) -> str:
    """Returns the cells of the table's line for this row, separated by bars."""
    ways: dict[str, Callable[[], Tensor]] = {
        "bare": lambda: bare(policy, row),
        "whole": lambda: packed(policy, row, shares=False),
        "ours": lambda: packed(policy, row, shares=True),
    }
    passes: dict[str, list[Pass]] = {name: [] for name in ways}
    order = random.Random(0)
    for _ in range(rounds + 1):  # the first round warms up
        for name in order.sample(list(ways), len(ways)):
            passes[name].append(run(policy, ways[name]))
    check(passes)
    ratios = lambda name: [
        x.seconds / y.seconds for x, y in zip(passes[name][1:], passes["ours"][1:], strict=True)
    ]
    shown = lambda x: f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})"
    tree = build_tree(row, with_routing=False)
    read = len(row.token_ids) if tree is None else len(tree.places)
    kept = passes["ours"][0].kept / passes["whole"][0].kept
    return f"{read} / {len(row.token_ids)} | {shown(ratios('bare'))} | {shown(ratios('whole'))} | {kept:.2f}"


def packed(policy: PolicyModel, row: PackedRow, *, shares: bool) -> Tensor:
    policy.model.set_attn_implementation(PACKED)
    get_row_layout(policy.model).shares_prefixes = shares
    return -policy(row).log_probs.mean()


def bare(policy: PolicyModel, row: PackedRow) -> Tensor:
    policy.model.set_attn_implementation("sdpa")
    total = torch.zeros((), device=row.token_ids.device)
    for ids, mask in zip(row.token_ids.split(row.lengths), row.action_mask.split(row.lengths), strict=True):
        hidden = policy.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        places = mask.nonzero()[:, 0]
        logits = policy.model.lm_head(hidden[places - 1]).float()
        total = total + torch.nn.functional.cross_entropy(logits, ids[places], reduction="sum")
    return total / row.num_tokens


def run(policy: PolicyModel, loss_of: Callable[[], Tensor]) -> Pass:
    policy.zero_grad()
    kept: dict[int, int] = {}
    synchronize()
    start = CLOCK()
    with counted(kept, policy):
        loss = loss_of()
    loss.backward()
    synchronize()
    seconds = CLOCK() - start
    gradients = [p.grad.norm() for p in policy.parameters() if p.grad is not None]
    return Pass(seconds, sum(kept.values()), float(loss.detach()), float(torch.stack(gradients).norm()))


def synchronize() -> None:
    if DEVICE_TYPE == "cuda":
        torch.cuda.synchronize()


def counted(kept: dict[int, int], policy: PolicyModel) -> AbstractContextManager:
    """Records in `kept` the bytes of every tensor saved for the backward pass, by the address of its
    memory."""
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def keep(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory.nbytes()
        return x

    return saved_tensors_hooks(keep, lambda x: x)


def check(passes: dict[str, list[Pass]]) -> None:
    """Exits with an error if a way's loss or gradient norm differs from that of the bare loop."""
    expected = passes["bare"][0]
    for name, of_way in passes.items():
        for figure in ("loss", "norm"):
            found, wanted = getattr(of_way[0], figure), getattr(expected, figure)
            if abs(found - wanted) > TOLERANCE * abs(wanted):
                sys.exit(f"error: the {figure} of {name} is {found}, of the bare loop {wanted}")


if __name__ == "__main__":
    main()
