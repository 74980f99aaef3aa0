"""Real tokens per second of supervised fine-tuning, four ways on the same model and the same samples.

ours            DeepSpeedEngine.train_step over packed rows: what train_sft runs
bare            a PyTorch loop over the same rows, attention and log-prob head, without DeepSpeed
padded          a PyTorch loop over padded batches of a plain transformers model
padded, sorted  the same with the samples of a step sorted by length, so that batches pad less

Every optimizer step is done by each way before the next one starts, so load on the machine meets all of them;
trust the ratios, not the absolute figures. All ways start from the same weights, and the losses of their last
steps must agree.

    python benchmarks/sft.py --model tiny --repeats 5 --steps 8
"""

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.datasets.batches import Windows
from openrlhf.device import DEVICE_TYPE
from openrlhf.engine.deepspeed_engine import DeepSpeedEngine
from openrlhf.engine.distributed import current_device, init_distributed, leave_distributed
from openrlhf.models.attention import PACKED
from openrlhf.models.policy import PolicyModel
from openrlhf.objectives.sft import SFTObjective
from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer
from openrlhf.types import LossNorm, PackedRow, Sample

LEARNING_RATE = 1e-4
MAX_NORM = 1.0

Step = Callable[[int], float]
"""Does optimizer step i and returns its loss."""


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    init_distributed()
    model = build_model(options.model)
    samples = LognormalSamples(
        options.batch_size * options.steps, vocab_size=model.config.vocab_size, max_len=options.tokens
    )
    windows = Windows(
        samples,
        PackedRow.of,
        batch_size=options.batch_size,
        max_tokens=options.tokens,
        rank=0,
        world=1,
        seed=0,
        shuffle=False,
    )
    start = time.perf_counter()
    rows = list(windows.epoch(0))
    packing_seconds = time.perf_counter() - start
    batches = [
        [samples[i] for i in range(k, k + options.batch_size)]
        for k in range(0, len(samples), options.batch_size)
    ]
    describe(options, model, samples, rows, batches)
    builders: dict[str, Callable[[], Step]] = {
        "ours": lambda: ours(model, rows, options.zero_stage),
        "bare": lambda: bare(model, rows),
        "padded": lambda: padded(model, batches, options.micro_batch_size, is_sorted=False),
        "padded, sorted": lambda: padded(model, batches, options.micro_batch_size, is_sorted=True),
    }
    ways = {name: build() for name, build in builders.items() if not options.fast or "padded" not in name}
    seconds, losses = measure(ways, options.steps, options.repeats)
    report(seconds, losses, sum(samples.lengths))
    share = packing_seconds / statistics.median(seconds["ours"])
    print(f"Making the packed rows is not in these figures: {share:.2%} of the time of ours.")
    leave_distributed()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny, small, or a Hugging Face name or folder")
    parser.add_argument("--repeats", type=int, default=5, help="ratios to take the median of")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps in one repeat")
    parser.add_argument("--batch_size", type=int, default=32, help="samples in an optimizer step")
    parser.add_argument("--tokens", type=int, default=1024, help="of a packed row, and of the longest sample")
    parser.add_argument("--micro_batch_size", type=int, default=8, help="samples in a padded batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="only ours and bare")
    return parser.parse_args()


def build_model(name: str) -> PreTrainedModel:
    """In float32."""
    if name == "tiny":
        return tiny_model(tiny_tokenizer(), max_len=4096)
    if name == "small":
        torch.manual_seed(0)
        return Qwen3ForCausalLM(SMALL)
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


SMALL = Qwen3Config(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


class LognormalSamples:
    """Random tokens in samples of lognormal length (median 150, mean 200), the first quarter a prompt."""

    def __init__(self, count: int, *, vocab_size: int, max_len: int) -> None:
        rng, generator = random.Random(0), torch.Generator().manual_seed(0)
        self.lengths = [min(max_len, max(8, round(rng.lognormvariate(5.0, 0.8)))) for _ in range(count)]
        self.samples = []
        for length in self.lengths:
            mask = torch.arange(length) >= length // 4
            tokens = torch.randint(vocab_size, (length,), generator=generator)
            self.samples.append(Sample(token_ids=tokens, action_mask=mask))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int, /) -> Sample:
        return self.samples[i]


def ours(model: PreTrainedModel, rows: Sequence[list[PackedRow]], zero_stage: int) -> Step:
    engine = DeepSpeedEngine(
        lambda: packed_policy(model),
        optim=OptimConfig(adam=AdamConfig(lr=LEARNING_RATE), lr_scheduler="constant", max_norm=MAX_NORM),
        ds=DeepSpeedConfig(zero_stage=zero_stage, param_dtype="fp32"),
        total_steps=1,
    )
    objective = SFTObjective()
    return lambda i: engine.train_step(rows[i], objective)["sft/loss"]


def bare(model: PreTrainedModel, rows: Sequence[list[PackedRow]]) -> Step:
    policy = packed_policy(model).to(current_device())
    optimizer = adamw(policy)
    objective = SFTObjective()

    def step(i: int) -> float:
        norm = LossNorm(sum(row.num_tokens for row in rows[i]), sum(row.num_sequences for row in rows[i]))
        total = torch.zeros((), device=current_device())
        for row in rows[i]:
            loss, _ = objective(policy, row.to(current_device()), norm)
            loss.backward()
            total += loss.detach()
        update(policy, optimizer)
        return total.item()

    return step


def padded(
    model: PreTrainedModel, samples: Sequence[list[Sample]], micro_batch_size: int, *, is_sorted: bool
) -> Step:
    model = copy.deepcopy(model).to(current_device()).train()
    optimizer = adamw(model)
    steps = [micro_batches(step, micro_batch_size, is_sorted) for step in samples]
    num_tokens = [sum(sample.num_actions for sample in step) for step in samples]

    def step(i: int) -> float:
        total = torch.zeros((), device=current_device())
        for batch in steps[i]:
            inputs = {name: x.to(current_device()) for name, x in batch.items()}
            loss = model(**inputs, use_cache=False, num_items_in_batch=num_tokens[i]).loss
            loss.backward()
            total += loss.detach()
        update(model, optimizer)
        return total.item()

    return step


def packed_policy(model: PreTrainedModel) -> PolicyModel:
    """A copy that reads packed rows."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(PACKED)
    return PolicyModel(model).train()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    adam = AdamConfig()
    return torch.optim.AdamW(
        model.parameters(),
        lr=LEARNING_RATE,
        betas=adam.betas,
        eps=adam.eps,
        weight_decay=0.0,
        fused=True,
    )


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def micro_batches(samples: Sequence[Sample], size: int, is_sorted: bool) -> list[dict[str, Tensor]]:
    if is_sorted:
        samples = sorted(samples, key=lambda sample: sample.length)
    return [collate(samples[k : k + size]) for k in range(0, len(samples), size)]


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    labels = [sample.token_ids.where(sample.action_mask, -100) for sample in samples]
    return {
        "input_ids": pad_sequence([s.token_ids for s in samples], batch_first=True),
        "attention_mask": pad_sequence([torch.ones(s.length, dtype=torch.long) for s in samples], True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def measure(
    ways: dict[str, Step], steps: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each repeat, and the loss of the last step. The first steps warm up and are not counted."""
    losses = {name: step(0) for name, step in ways.items()}
    seconds = {name: [0.0] * repeats for name in ways}
    names, rng = list(ways), random.Random(0)
    for repeat in range(repeats):
        for i in range(steps):
            rng.shuffle(names)  # what ran before decides what is in the caches
            for name in names:
                start = time.perf_counter()
                losses[name] = ways[name](i)  # returns a number, so the device is done
                seconds[name][repeat] += time.perf_counter() - start
    return seconds, losses


def describe(
    options: argparse.Namespace,
    model: PreTrainedModel,
    samples: LognormalSamples,
    rows: Sequence[list[PackedRow]],
    batches: Sequence[list[Sample]],
) -> None:
    tokens, load = sum(samples.lengths), Path("/proc/loadavg")
    padding = [
        sum(
            batch["input_ids"].numel()
            for step in batches
            for batch in micro_batches(step, options.micro_batch_size, is_sorted)
        )
        / tokens
        for is_sorted in (False, True)
    ]
    print(
        f"{options.model}: {model.num_parameters() / 1e6:.1f}M weights, "
        f"vocabulary {model.config.vocab_size}\n"
        f"float32, {DEVICE_TYPE}, {options.threads} threads, ZeRO stage {options.zero_stage}, "
        f"torch {torch.__version__}, load {load.read_text().split()[0] if load.exists() else 'unknown'}\n"
        f"{len(batches)} steps of {options.batch_size} samples, "
        f"{tokens} tokens, longest {max(samples.lengths)}\n"
        f"{sum(map(len, rows))} rows of at most {options.tokens} tokens; "
        f"padded to {padding[0]:.2f} times the tokens, sorted {padding[1]:.2f}\n",
        flush=True,
    )


def report(seconds: dict[str, list[float]], losses: dict[str, float], tokens: int) -> None:
    print(f"{'':16}{'tokens/s':>10}{'loss':>9}   ours / this (min / median / max of repeats)")
    for name, times in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(times, seconds["ours"], strict=True)]
        print(
            f"{name:16}{tokens / statistics.median(times):10.0f}{losses[name]:9.4f}   "
            f"{min(ratios):6.3f} / {statistics.median(ratios):6.3f} / {max(ratios):6.3f}"
        )
    spread = max(losses.values()) - min(losses.values())
    if spread > 1e-3:
        sys.exit(f"the losses differ by {spread:.4f}: these are not the same training")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
