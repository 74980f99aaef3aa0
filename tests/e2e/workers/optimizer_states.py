"""DeepSpeed's optimizers by configuration; reports which one is built, whether its state can leave the
device, how gradients of micro-batches add up, and what a step asks of its device."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.utils import groups, safe_get_full_grad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openrlhf.backends.deepspeed import optimizer_state
from openrlhf.backends.deepspeed.engine import DeepSpeedEngine
from openrlhf.backends.distributed import seed_everything
from openrlhf.config.choices import OptimizerName
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, MuonConfig, OptimConfig
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.rows import PackedRow, Sample
from openrlhf.training.objectives.sft import SFTObjective

MUON_LR = 0.5
"""Learning rate at which the rounding of a weight is small beside an update."""


def build_engine(spec: dict, optim: OptimizerName = "adam", **ds: Any) -> DeepSpeedEngine:
    config = DeepSpeedConfig(**ds)

    def build() -> PolicyModel:
        return PolicyModel(
            load_causal_lm(spec["model"], flag="--model", dtype=config.param_dtype, attention="auto")
        )

    gc.collect()  # an engine at stage 3 would shard every later model
    seed_everything(7, deterministic=False)
    return DeepSpeedEngine(
        build,
        optim=OptimConfig(
            optim=optim,
            adam=AdamConfig(lr=1e-2, eps=1e-3),
            muon=MuonConfig(lr=MUON_LR),
            max_norm=1.0 if optim == "adam" else 0.0,
            lr_scheduler="constant",
            lr_warmup_ratio=0.0,
        ),
        ds=config,
        total_steps=100,
    )


def rows(count: int) -> list[PackedRow]:
    """Returns this rank's rows."""
    random = torch.Generator().manual_seed(dist.get_rank())
    mask = torch.arange(20) > 3
    ids = [torch.randint(3, 300, (20,), generator=random) for _ in range(count)]
    return [PackedRow.of([Sample(token_ids=row, action_mask=mask)]) for row in ids]


def build_all(spec: dict) -> list[list[str]]:
    """Returns [DeepSpeed's wrapper, optimizer inside of it] of each case, or the type of the error."""
    found = []
    for case in spec["cases"]:
        try:
            wrapper = build_engine(spec, **case).engine.optimizer
        except (NotImplementedError, AssertionError) as error:
            found.append([type(error).__name__])
        else:
            found.append([type(w).__name__ for w in (wrapper, getattr(wrapper, "optimizer", wrapper))])
    return found


def sleep_all(spec: dict) -> list[dict]:
    return [sleep(spec, case, Path(spec["out"]) / str(i)) for i, case in enumerate(spec["cases"])]


def sleep(spec: dict, case: dict, folder: Path) -> dict:
    engine = build_engine(spec, **case)
    awake = two_steps(engine, lambda: None)
    engine = build_engine(spec, **case)
    offload, reload = engine.offload, engine.reload
    offload()  # before the first step the optimizer has no state
    reload()
    asleep = two_steps(engine, lambda: (offload(), offload(), reload()))
    engine.train_step(rows(1), SFTObjective())
    moved = sum(t.nbytes for t in states(engine).values())
    forgotten = scratch_bytes(engine)
    before = bytes_held(engine)
    offload()
    freed = before - bytes_held(engine)
    refused = error_of(lambda: engine.train_step(rows(1), SFTObjective()))
    refused += error_of(lambda: engine.save_checkpoint(str(folder), "tag", {}))
    reload()
    engine.save_checkpoint(str(folder), "tag", {})
    trained = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.train_step(rows(1), SFTObjective())
    offload()
    reload()
    engine.load_checkpoint(str(folder), "tag")
    restored = dict(engine.weights())
    same_again = all(torch.equal(trained[name], tensor) for name, tensor in restored.items())
    offload()
    engine.optimizer_state.is_offloaded = False  # as if nobody had checked
    return {
        "changed": [name for name in awake if not torch.equal(awake[name], asleep[name])],
        "num_states": len(awake),
        "kinds": sorted({key.split()[-1] for key in awake}),
        "moved": moved,
        "forgotten": forgotten,
        "freed": freed,
        "refused": refused,
        "restored": same_again,
        "used_anyway": error_of(lambda: engine.train_step(rows(1), SFTObjective())),
    }


def two_steps(engine: DeepSpeedEngine, between: Callable[[], object]) -> dict[str, Tensor]:
    """Takes two steps and returns all weights and optimizer states after them."""
    for _ in range(2):
        engine.train_step(rows(2), SFTObjective())
        between()
    weights = {f"{name} weight": tensor.clone() for name, tensor in engine.weights()}
    return weights | {key: tensor.clone() for key, tensor in states(engine).items()}


def states(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Returns master weights, and what the optimizer keeps of each."""
    zero = engine.engine.optimizer
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    found = {f"{i} master": master.detach() for i, master in enumerate(masters)}
    for i, master in enumerate(masters):
        state = zero.optimizer.state[master].items()
        found |= {f"{i} {name}": value for name, value in state if isinstance(value, Tensor)}
    return found


def scratch_bytes(engine: DeepSpeedEngine) -> int:
    """Returns the bytes of the buffer that Muon writes a step's momentum to at stages 1 and 2, until the step
    is certain."""
    pending = getattr(engine.engine.optimizer, "_muon_pending_momentum", {})
    return sum(staged.nbytes for staged, _ in pending.values())


def bytes_held(engine: DeepSpeedEngine) -> int:
    """Returns the bytes of all tensors of this process but those that stand for the host's memory."""
    gc.collect()
    host = {piece.data_ptr() for copies in engine.optimizer_state._host.values() for piece in copies}
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if isinstance(t, Tensor) and t.device.type == "cpu" and t.layout is torch.strided
    }
    return sum(size for pointer, size in storages.items() if pointer not in host)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}\n"
    return ""


def accumulate_all(spec: dict) -> list[dict]:
    return [accumulate(spec, case) for case in spec["cases"]]


def accumulate(spec: dict, case: dict) -> dict:
    """Returns |sum - exact sum| / sum of |gradients| of the micro-batches, at most over all weights."""
    engine = build_engine(spec, **case)
    parts: dict[str, list[Tensor]] = {}
    for name, param in engine.module.named_parameters():
        parts[name] = []
        param.register_hook(lambda grad, seen=parts[name]: seen.append(grad.double()))
    errors: list[float] = []

    def look() -> None:
        for name, param in engine.module.named_parameters():
            grads = torch.stack(parts[name]).view(len(parts[name]), -1)
            assert len(grads) == spec["num_rows"]
            found = safe_get_full_grad(param).double().view(-1)
            scale = grads.abs().sum(0)
            error = (found - grads.sum(0)).abs()[scale > 0] / scale[scale > 0]
            errors.append(float(error.max()))

    take_step = engine.engine.step
    engine.engine.step = lambda: (look(), take_step())
    engine.train_step(rows(spec["num_rows"]), SFTObjective())
    del engine.engine.step
    return {"error": max(errors)}


def step_all(spec: dict) -> list[dict]:
    return [sizes_of_a_step(spec, case) for case in spec["cases"]]


def sizes_of_a_step(spec: dict, case: dict) -> dict[str, list[float]]:
    """Maps each matrix to the singular values of its first update by two micro-batches, as a share of the
    largest one that Muon makes."""
    engine = build_engine(spec, **case)
    before = {name: tensor.double() for name, tensor in engine.weights()}
    engine.train_step(rows(2), SFTObjective())
    updates = {name: before[name] - tensor.double() for name, tensor in engine.weights()}
    return {
        name: (torch.linalg.svdvals(update) / MUON_LR / max(1, len(update) / update.shape[1]) ** 0.5).tolist()
        for name, update in updates.items()
        if "proj" in name
    }


def arrange_all(spec: dict) -> list[dict]:
    """Reports the settings that DeepSpeed got, and how far the weights after two steps of two micro-batches
    are from those of the first case, as a share of how far they came."""
    found: list[dict] = []
    first: dict[str, Tensor] = {}
    for case in spec["cases"]:
        engine = build_engine(spec, **case)
        start = {name: tensor.double() for name, tensor in engine.weights()}
        for _ in range(2):
            engine.train_step(rows(2), SFTObjective())
        end = {name: tensor.double() for name, tensor in engine.weights()}
        first = first or end
        came = max(float((end[name] - start[name]).abs().max()) for name in end)
        apart = max(float((end[name] - first[name]).abs().max()) for name in end)
        found.append(told(engine) | {"apart": apart / came})
        # DeepSpeed keeps one such group in a process
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return found


def told(engine: DeepSpeedEngine) -> dict[str, Any]:
    zero = engine.engine.optimizer
    return {
        "reduced": zero.reduce_bucket_size,
        "gathered": getattr(zero, "allgather_bucket_size", None),  # none at stage 3
        "overlaps": engine.engine.zero_overlap_comm(),
        "gradients": str(zero.gradient_accumulation_dtype).removeprefix("torch."),
        "gather_among": getattr(next(engine.module.parameters()), "ds_secondary_tensor_group_size", None),
    }


class Waits(TorchDispatchMode):
    """Records operations that a GPU would have to finish its work for."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.NAMES or masks:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def wait_all(spec: dict) -> list[dict]:
    return [waits(spec, case) for case in spec["cases"]]


def waits(spec: dict, case: dict) -> dict:
    """Reports the waits of the loop over micro-batches, from the first one to the optimizer's step, and those
    of the step."""
    engine = build_engine(spec, **case)
    for _ in range(2):  # in its first passes stage 3 asks all ranks about their order
        engine.train_step(rows(3), SFTObjective())
    loop, step = Waits(), Waits()
    take_step = engine.engine.step

    def enter(model: Callable, row: PackedRow, norm: Any) -> tuple:
        if not entered:
            loop.__enter__()
            entered.append(True)
        return SFTObjective()(model, row, norm)

    def stepping() -> None:
        loop.__exit__(None, None, None)
        with step:
            take_step()

    entered: list[bool] = []
    engine.engine.step = stepping
    get_accelerator().synchronize = lambda *device: loop.seen.append("synchronize")
    engine.train_step(rows(3), enter)
    del engine.engine.step, get_accelerator().synchronize
    return {"loop": loop.seen, "step": step.seen}


def no_compiler(self: OpBuilder, verbose: bool = True) -> None:
    raise SystemError(f"{self.name} would be compiled")


PARTS = {
    "build": build_all,
    "sleep": sleep_all,
    "accumulate": accumulate_all,
    "arrange": arrange_all,
    "step": step_all,
    "wait": wait_all,
}


def on_rank(spec: dict) -> dict:
    OpBuilder.load = no_compiler
    optimizer_state.PIECE = 100_000  # each tensor takes several pieces
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks before it builds anything
    return {"cases": PARTS[spec["part"]](spec)}
