"""Errors of the memory that `openrlhf plan` predicts, against the tensors that a training process holds.

    weights        the model's parameters; at stage 3 a rank's part
    gradients      tensors that the backward passes leave behind for the optimizer
    optimizer      other tensors that are alive between optimizer steps: master weights and Adam's moments
    activations    peak of forward and backward pass of the model alone, without its gradients
    all            peak of the process, with the buffers of a step, against the whole prediction

The process is one rank of `DeepSpeedEngine`, or of PyTorch alone, on the CPU. Its second optimizer step, of
two rows, is measured. Tensors are found by the garbage collector, and the peak by the storages that torch's
operators allocate. Exits with an error if a term that is at least a hundredth of the whole differs by more
than `--limit`.

    python benchmarks/plan.py
    python benchmarks/plan.py --models a/folder/with/SmolLM2-135M --objectives sft dpo rl
"""

import openrlhf  # noqa: F401  first: transformers may need its mending of CUDA builds

# isort: split
import argparse
import gc
import multiprocessing
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from openrlhf.backends.build import ENGINES, build_engine
from openrlhf.backends.distributed import ProcessMesh, init_distributed, leave_distributed
from openrlhf.config.choices import BackendName, ParamDtype
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.memory.sizes import ModelShape
from openrlhf.memory.training import training_memory
from openrlhf.models.attention import PACKED
from openrlhf.models.dropout import enable_checkpointing
from openrlhf.models.policy import PolicyModel
from openrlhf.models.sizes import model_size, shape_of
from openrlhf.rows import ExperienceRow, LossNorm, PackedRow, Pair, PairRow, Sample
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.objectives.sft import SFTObjective

TERMS = ("weights", "gradients", "optimizer", "activations", "all")
SMALLEST_SHARE = 0.01
"""Share of the whole below which a term's error is not judged."""


class Size(NamedTuple):
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    tokens: int
    """Tokens of a row."""


SIZES = {
    "1M": Size(4, 128, 384, 4, 1024, 512),
    "10M": Size(6, 320, 896, 5, 4096, 512),
    "100M": Size(10, 768, 2048, 12, 16384, 256),
    "500M": Size(16, 1344, 4608, 21, 32000, 128),
}


TOKENS = 256
"""Tokens of a row of a model from a folder."""


class Way(NamedTuple):
    size: str
    """Key of SIZES, or a folder with a model's config.json; its weights are random."""
    dtype: ParamDtype = "bf16"
    stage: int = 2
    checkpointing: bool = False
    family: str = "llama"
    backend: BackendName = "deepspeed"
    objective: str = "sft"
    """Key of OBJECTIVES."""


WAYS = (
    Way("1M"),
    Way("1M", "fp32", 0),
    Way("1M", "fp32", 2),
    Way("1M", stage=0),
    Way("1M", stage=1),
    Way("1M", stage=3),
    Way("1M", checkpointing=True),
    Way("1M", family="qwen3"),
    Way("1M", family="qwen3_moe"),
    Way("1M", "fp32", backend="torch"),
    Way("10M"),
    Way("10M", "fp32", 2, True),
    Way("10M", stage=3),
    Way("100M"),
    Way("100M", "fp32", 0),
    Way("100M", stage=3, checkpointing=True),
    Way("500M", checkpointing=True),
    Way("500M", "fp32", 0),
)


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that torch's operators allocate in the context, and their peak, with and
    without gradients of parameters."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        super().__init__()
        self.alive = self.peak = self.peak_without_gradients = 0
        self.parameters, self.known = parameters, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = {id(x.untyped_storage()) for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and id(x.untyped_storage()) not in self.known | own:
                self._count(x.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), id(storage)
        self.known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        if self.alive > self.peak_without_gradients:
            gradients = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
            self.peak_without_gradients = max(self.peak_without_gradients, self.alive - gradients)

        def freed() -> None:
            self.alive -= size
            self.known.discard(key)

        weakref.finalize(storage, freed)


def held(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of each storage behind the tensors, by its address."""
    storages = [x.untyped_storage() for x in tensors if x.layout is torch.strided and x.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def all_held() -> dict[int, int]:
    gc.collect()
    return held(x for x in gc.get_objects() if issubclass(type(x), Tensor))


def config_of(way: Way) -> Any:
    if way.size not in SIZES:
        return AutoConfig.from_pretrained(way.size)
    size = SIZES[way.size]
    sizes: dict[str, Any] = {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "vocab_size": size.vocabulary,
    }
    if way.family == "llama":
        return LlamaConfig(**sizes)
    sizes["head_dim"] = size.hidden // size.heads
    if way.family == "qwen3":
        return Qwen3Config(**sizes)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": size.intermediate // 2}
    return Qwen3MoeConfig(**sizes, **experts)


def tokens_of(way: Way) -> int:
    return SIZES[way.size].tokens if way.size in SIZES else TOKENS


def sample_of(vocabulary: int, count: int, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (count,), generator=generator)
    return Sample(token_ids=tokens, action_mask=torch.arange(count) > 0)


def answer_row(vocabulary: int, count: int, seed: int) -> PackedRow:
    return PackedRow.of([sample_of(vocabulary, count, seed)])


def pair_row(vocabulary: int, count: int, seed: int) -> PairRow:
    chosen, rejected = (sample_of(vocabulary, count // 2, seed + i) for i in (0, 10))
    return PairRow.of([Pair(chosen=chosen, rejected=rejected, ref_log_probs=torch.zeros(2))])


def experience_row(vocabulary: int, count: int, seed: int) -> ExperienceRow:
    row = answer_row(vocabulary, count, seed)
    column = torch.zeros(len(row.actions))
    return ExperienceRow(
        row=row, old_log_probs=column, advantages=column + 1, returns=column, rollout_log_probs=column
    )


OBJECTIVES: dict[str, tuple[Callable[[int, int, int], Any], Any]] = {
    "sft": (answer_row, SFTObjective()),
    "dpo": (pair_row, DPOObjective(beta=0.1)),
    "rl": (experience_row, PolicyObjective(entropy_coef=0.01)),
}
"""Objectives, and functions (vocabulary, number of tokens, seed) -> a row. The reference is precomputed, and
RL has an entropy bonus."""


def predicted_shape(config: Any, ds: DeepSpeedConfig, backend: BackendName) -> ModelShape:
    """Returns the sizes that a plan reads from the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return model_size(folder, "--model.model_name_or_path").on_rank(ds, backend, trained=True)


def measure(way: Way) -> tuple[int, dict[str, float], dict[str, float]]:
    """Returns (number of parameters, predicted bytes, measured bytes)."""
    config, num_tokens = config_of(way), tokens_of(way)
    ds = DeepSpeedConfig(zero_stage=way.stage, param_dtype=way.dtype, bucket_mb=1 if way.stage == 3 else None)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[way.dtype]

    def build() -> PolicyModel:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.set_attn_implementation(PACKED)
        return PolicyModel(model)

    shape = predicted_shape(config, ds, way.backend)
    make_row, objective = OBJECTIVES[way.objective]
    has_bonus = way.objective == "rl"
    said = training_memory(
        shape, ds, way.backend, num_tokens, way.checkpointing, with_entropy=has_bonus
    ).parts
    init_distributed()
    rows = [make_row(config.vocab_size, num_tokens, seed) for seed in (1, 2)]
    activations = pass_bytes(build(), objective, rows[0], way.checkpointing)
    before = all_held()
    engine: Any = build_engine(
        build,
        backend=way.backend,
        mesh=ProcessMesh(),
        optim=OptimConfig(),
        ds=ds,
        total_steps=10,
        gradient_checkpointing=way.checkpointing,
    )
    engine.train_step(rows, objective)
    own = {key: n for key, n in all_held().items() if key not in before}
    parameters = list(engine.module.parameters())
    weights = held(getattr(p, "ds_tensor", p) for p in parameters)
    # Stage 3 keeps one buffer of gradients from step to step.
    zero = getattr(getattr(engine, "engine", None), "optimizer", None)
    buffer = getattr(zero, "grad_partitions_flat_buffer", None)
    lasting = {} if buffer is None else held([buffer])
    gradients, step = {}, engine._step

    def step_and_look() -> Any:
        nonlocal gradients
        gradients = {key: n for key, n in all_held().items() if key not in before | own}
        return step()

    engine._step = step_and_look
    with Allocations(parameters) as work:
        engine.train_step(rows, objective)
    found = {
        "weights": sum(weights.values()),
        "gradients": sum((gradients | lasting).values()),
        "optimizer": sum(n for key, n in own.items() if key not in weights | lasting),
        "activations": activations,
        "all": sum(own.values()) + work.peak,
    }
    leave_distributed()
    said["all"] = sum(said.values())
    said["activations"] += said.pop("logits")
    return shape_of(engine.module.model).trainable, said, found


def pass_bytes(model: PolicyModel, objective: Any, row: Any, checkpointing: bool) -> int:
    """Returns the peak of a forward and a backward pass, without gradients of parameters."""
    if checkpointing:
        enable_checkpointing(model.model, reentrant=False, dropout=True)
    with Allocations(list(model.parameters())) as work:
        loss, _ = objective(model.train(), row, LossNorm(row.num_tokens, row.num_sequences))
        loss.backward()
    return work.peak_without_gradients


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--models", nargs="+", default=[], help="folders of models, in place of --sizes")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=["sft"])
    parser.add_argument("--limit", type=float, default=0.1, help="largest relative error (default: 0.1)")
    options = parser.parse_args()
    facts = ("model", "objective", "dtype", "ZeRO", "checkpointing", "backend", "tokens", *TERMS, "s")
    print(f"| {' | '.join(facts)} |\n|" + "---|" * len(facts))
    worst = 0.0
    import_module(ENGINES["deepspeed"][0])  # before processes are forked
    own = [Way(folder, "fp32", 0) for folder in options.models]
    ways = own or [way for way in WAYS if way.size in options.sizes]
    for way in [way._replace(objective=name) for way in ways for name in options.objectives]:
        began = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            count, said, found = pool.submit(measure, way).result()
        cells = []
        for name in TERMS:
            error = said[name] / found[name] - 1 if found[name] else float(said[name] > 0)
            judged = max(said[name], found[name]) >= SMALLEST_SHARE * found["all"]
            worst = max(worst, abs(error) if judged else 0)
            cells.append(f"{error:+.1%} of {found[name] / 2**20:,.1f} MiB")
        facts = (
            f"{way.family if way.size in SIZES else Path(way.size).name} {count / 1e6:,.1f}M",
            way.objective,
            way.dtype,
            str(way.stage),
            "yes" if way.checkpointing else "no",
            way.backend,
            str(tokens_of(way)),
        )
        print(f"| {' | '.join([*facts, *cells])} | {time.perf_counter() - began:.0f} |", flush=True)
    print(f"largest error: {worst:.1%}")
    return int(worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
