"""DeepSpeed behind one verb. The only file that talks to a DeepSpeed engine."""

import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.integrations import HfDeepSpeedConfig

from openrlhf.backends.base import Objective, Row, RowT
from openrlhf.backends.deepspeed.config import inference_config, training_config
from openrlhf.backends.deepspeed.moving_average import MovingAverage
from openrlhf.backends.deepspeed.optimizer_state import OptimizerState
from openrlhf.backends.deepspeed.resharding import (
    ORDER,
    Checkpoint,
    check_same_model,
    load_resharded,
    names_in_order,
)
from openrlhf.backends.distributed import ModelParallelUnit, ProcessMesh, current_device, use_own_cores
from openrlhf.backends.lr_schedule import lr_schedule
from openrlhf.backends.random_state import load_random_state, save_random_state
from openrlhf.backends.row_memory import ModelShape, RowMemory, row_memory
from openrlhf.backends.vllm.weight_sender import Part
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.device import DEVICE_TYPE
from openrlhf.files import clear_for_model
from openrlhf.models.backbone import RowModel, backbone_of, reading_of
from openrlhf.models.checkpoint_layout import CheckpointLayout
from openrlhf.models.dropout import enable_checkpointing, has_noise, set_training
from openrlhf.models.lora import (
    adapter_weights,
    base_weights,
    fill_randomly,
    has_adapters,
    merged_weights,
    save_adapter,
)
from openrlhf.models.self_check import resolve_reading, shard_matrices_checked
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.models.tensor_parallel import whole, whole_shape
from openrlhf.types import LossNorm, Metrics

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# DeepSpeed's older calls
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

ItemT = TypeVar("ItemT")
WHOLE = {"merged": merged_weights, "base": base_weights}
BUCKET_BYTES = 256 << 20
"""Of whole parameters that are gathered at a time."""


class DeepSpeedEngine:
    """One rank of a model in training, at any ZeRO stage. `init_distributed` comes first.

    `build_model` returns a module whose `.model` is a Hugging Face model (see models/policy.py); it is called
    here so that at stage 3 no rank ever holds the whole model.
    """

    def __init__(
        self,
        build_model: Callable[[], RowModel],
        *,
        optim: OptimConfig,
        ds: DeepSpeedConfig,
        total_steps: int,
        gradient_checkpointing: bool = False,
        reentrant: bool = False,
        dropout: bool = False,
        ema_beta: float | None = None,
        mesh: ProcessMesh | None = None,
    ) -> None:
        """`total_steps`: optimizer steps of the whole run, which the learning rate schedule needs.

        `dropout`: train with what the model's configuration has of it. Without, a training pass computes what
        `forward` and `evaluate` do, but for the dropout of adapters.

        `ema_beta`: decay of a moving average of the trained weights, None for no average. `export` writes the
        average, checkpoints keep it; nothing else sees it.

        `mesh`: None where every rank has samples of its own.
        """
        self.mesh = mesh or ProcessMesh.joined()
        self.ds, self.stage = ds, ds.zero_stage
        self.checkpoints_layers = gradient_checkpointing
        # DeepSpeed neither reports nor exposes the norm at stage 0 in float32, so there the engine clips by
        # itself.
        self.clips_itself = self.stage == 0 and ds.param_dtype == "fp32"
        self.max_norm = optim.max_norm
        self.scales_loss = ds.param_dtype == "fp16"
        if ds.adam_offload or ema_beta is not None:
            use_own_cores()
        config = training_config(
            ds, max_norm=0.0 if self.clips_itself else optim.max_norm, muon=optim.optim == "muon"
        )
        self._zero3_init = HfDeepSpeedConfig(config) if self.stage == 3 else None
        module = build_model()
        if self.mesh.tensor_group is not None:
            shard_matrices_checked(module.model, self.mesh.tensor_group)
        module.register_state_dict_post_hook(_leave_out_frozen)
        # Without noise nothing has to be done, and to some architectures evaluation means no gradients.
        self.plain_training = dropout or not has_noise(module.model.config)
        if gradient_checkpointing:
            enable_checkpointing(
                module.model,
                reentrant=reentrant,
                dropout=self.plain_training,
                on_host=ds.activation_offload,
            )
        optimizer = _optimizer(module, optim)
        scheduler = LambdaLR(optimizer, lr_schedule(optim, total_steps))
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            # pyrefly: ignore[bad-argument-type]  DeepSpeed names torch's older base class
            lr_scheduler=scheduler,
            mpu=None if self.mesh.tensor_group is None else ModelParallelUnit(self.mesh),
            config=config,
        )
        self.optimizer_state = OptimizerState(self.engine, on_host=ds.adam_offload)
        shard_rows(self.module, self.mesh, ds)
        resolve_reading(self.engine, self.module, zero_stage=self.stage, tensor=self.mesh.tensor)
        self.device = current_device()
        self.average = None
        if ema_beta is not None:
            parameters = self.module.model.named_parameters()
            self.average = MovingAverage(parameters, beta=ema_beta, mesh=self.mesh)

    @property
    def module(self) -> RowModel:
        return cast(RowModel, self.engine.module)

    @property
    def steps(self) -> int:
        """Optimizer steps done, also before a resume."""
        return self.engine.global_steps

    def train_step(
        self, window: Sequence[RowT], objective: Objective[RowT], *also: tuple[Sequence, Objective]
    ) -> Metrics:
        """One optimizer step over the rows that all ranks hold; `window` is this rank's, at least one row,
        and the same on ranks that have the same samples.

        `also`: more (rows, objective) of the same step. Their losses are added up, and each divides by the
        totals of its own rows.

        Returns the objectives' metrics over all ranks, and `grad_norm` (before clipping), `lr` and
        `num_tokens` (those of `window` with a loss). Raises FloatingPointError on every rank where one of
        them is not finite.
        """
        self._check_present()
        rows, norm = self._agree(window)
        passes: list[tuple[Any, Objective, LossNorm]] = [(row, objective, norm) for row in rows]
        for more, own_objective in also:
            rows, own_norm = self._agree(more)
            passes += [(row, own_objective, own_norm) for row in rows]
        set_training(self.module, dropout=self.plain_training)
        contributions: dict[str, Tensor] = {}
        for i, (row, minimise, totals) in enumerate(passes):
            self.engine.set_gradient_accumulation_boundary(i == len(passes) - 1)
            loss, metrics = minimise(self.engine, row, totals)
            # DeepSpeed averages gradients over ranks; contributions of ranks with different samples must add
            # up. Those of ranks that share rows do so by themselves: models/sequence_parallel.py.
            self.engine.backward(loss * self.mesh.data)
            for name, contribution in metrics.items():
                contributions[name] = contributions.get(name, 0) + contribution.detach()
        lr = self.engine.get_lr()[0]
        grad_norm = self._clip() if self.clips_itself else None
        self.engine.step()
        if grad_norm is None:
            found = self.engine.get_global_grad_norm()
            assert found is not None  # but in the one case in which the engine clips itself
            grad_norm = float(found)
        metrics = self._sum_over_ranks(contributions)
        # With fp16 an overflowing gradient is how DeepSpeed finds its loss scale: it skips that step.
        _check_finite(
            metrics if self.scales_loss else metrics | {"grad_norm": grad_norm}, self.engine.global_steps
        )
        if self.average is not None:
            self.average.update()
        return metrics | {"grad_norm": grad_norm, "lr": lr, "num_tokens": norm.num_tokens}

    @torch.no_grad()
    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics:
        """The objective's metrics over all rows of all ranks, as one batch; `rows` is this rank's, at least
        one."""
        rows, norm = self._agree(rows)
        self.module.eval()
        contributions: dict[str, Tensor] = {}
        for row in rows:
            for name, contribution in objective(self.engine, row, norm)[1].items():
                contributions[name] = contributions.get(name, 0) + contribution
        return self._sum_over_ranks(contributions)

    @torch.no_grad()
    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """`read(model, row)` for each of this rank's rows, on the CPU. At least one row."""
        padded, _ = self._agree(rows)
        self.module.eval()
        return on_cpu([read(self.engine, row) for row in padded])[: len(rows)]

    def row_memory(self, num_tokens: int) -> RowMemory:
        """Of this rank, at the peak of a step with a row of `num_tokens`. Said before there is one."""
        model, parameters, tensor_ranks = self.module.model, list(self.module.parameters()), self.mesh.tensor
        shape = ModelShape.of(
            model.config,
            weight_bytes=sum(map(num_bytes, parameters)) // tensor_ranks,
            trainable=sum(math.prod(whole_shape(p)) for p in parameters if p.requires_grad) // tensor_ranks,
            normed_heads=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        )
        return row_memory(
            shape,
            self.ds,
            ranks=self.mesh.size // tensor_ranks,
            tokens=-(-num_tokens // self.mesh.sequence),
            checkpointing=self.checkpoints_layers,
            gpu=torch.cuda.get_device_properties(self.device).total_memory if DEVICE_TYPE == "cuda" else None,
        )

    def weights(
        self, bucket_bytes: int = BUCKET_BYTES, part: Part = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that a checkpoint of the model holds, in full, by the checkpoint's name and in its
        layout, adapters merged into it or, by `part`, left out; or those of the adapter by peft's names. All
        ranks must iterate together: at stage 3 each bucket is a collective. Tensors last as long as they are
        kept, until the next optimizer step."""
        if part == "adapter":
            yield from self._in_full(adapter_weights(self.module.model).items(), bucket_bytes)
            return
        layout, weights = self._layout, WHOLE[part](self.module.model)
        parts = lambda conversion: [part for name in conversion.names for part in weights[name].parts]
        sizes = [sum(map(num_bytes, parts(conversion))) for conversion in layout.conversions]
        for bucket in _buckets(layout.conversions, sizes, bucket_bytes):
            with self._gathered(part for conversion in bucket for part in parts(conversion)):
                for conversion in bucket:
                    whole = {name: weights[name].merged() for name in conversion.names}
                    yield from layout.convert(conversion, whole).items()

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(name, dtype, full shape) of everything that `weights` yields, without a transfer."""
        if part == "adapter":
            of_adapter = adapter_weights(self.module.model)
            return [(name, p.dtype, whole_shape(p)) for name, p in of_adapter.items()]
        empty = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            for name, weight in WHOLE[part](self.module.model).items()
        }
        return [
            (name, t.dtype, tuple(t.shape))
            for conversion in self._layout.conversions
            for name, t in self._layout.convert(conversion, empty).items()
        ]

    @contextmanager
    def random_adapter(self, seed: int) -> Iterator[None]:
        """Inside, the model computes with random matrices A and B in the place of its adapters', large enough
        to change every layer by about as much as it does. Afterwards all bits are what they were. Collective;
        without an optimizer step inside."""
        adapters = adapter_weights(self.module.model)
        params = [*adapters.values()]
        with self._changing(params):
            kept = [p.detach().clone() for p in params]
            fill_randomly(adapters, self.ds.lora, seed)
        try:
            yield
        finally:
            with self._changing(params), torch.no_grad():
                for p, before in zip(params, kept, strict=True):
                    p.copy_(before)

    @cached_property
    def _layout(self) -> CheckpointLayout:
        model = self.module.model
        return CheckpointLayout(model, {name: weight.shape for name, weight in merged_weights(model).items()})

    def save_checkpoint(self, folder: str, tag: str, state: dict) -> None:
        self._check_present()
        if self.mesh.is_first and (place := Path(folder, tag)).exists():
            shutil.rmtree(place)  # a save that other ranks did not finish, or of before a resume
        dist.barrier()
        # DeepSpeed mixes client state with its own keys, so the trainer's stays under one.
        self.engine.save_checkpoint(
            folder,
            tag=tag,
            client_state={"openrlhf": state, ORDER: names_in_order(self.engine)},
            save_latest=False,
            exclude_frozen_parameters=True,
        )
        if self.average is not None:
            self.average.save(f"{folder}/{tag}")
        save_random_state(f"{folder}/{tag}", self.mesh.rank, self.mesh.size)
        dist.barrier()

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        """Restore everything that `save_checkpoint` wrote, with any number of ranks at any ZeRO stage, and
        return its `state`. With a moving average the checkpoint must have one too; without, one that is there
        is left where it is."""
        self._check_present()
        if self.average is not None:
            self.average.load(f"{folder}/{tag}")
        checkpoint = Checkpoint(f"{folder}/{tag}", self.engine.checkpoint_mp_rank)
        if checkpoint.fits(self.stage, self.mesh.copies):
            path, client_state = self.engine.load_checkpoint(folder, tag=tag, custom_load_fn=_load_trained)
        else:
            path, client_state = folder, load_resharded(self.engine, checkpoint)
        if path is None or client_state is None:
            raise ValueError(f"--ckpt.path {folder}: checkpoint {tag} could not be loaded from there")
        load_random_state(f"{folder}/{tag}", self.mesh.rank, self.mesh.size)
        self._follow_schedule()
        return client_state["openrlhf"]

    def _follow_schedule(self) -> None:
        """The rates that a checkpoint holds are those of the length that its run had."""
        scheduler = cast(LambdaLR, self.engine.lr_scheduler)
        groups = scheduler.optimizer.param_groups
        for group, peak, shape in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = peak * shape(scheduler.last_epoch)

    def export(self, folder: str) -> None:
        """Collective. Rank 0 writes the model in Hugging Face format, or its adapter alone where it has one;
        every rank returns when it is on disk. The moving average, where there is one, is written in place of
        what was trained; the weights themselves are not touched."""
        model, state = self.module.model, {}
        is_adapter, average = has_adapters(model), self.average
        weights = self._in_full(
            (name, p)
            for name, p in model.named_parameters()
            if (average is None if p.requires_grad else not is_adapter)
        )
        for name, tensor in chain(weights, average.in_full() if average else ()):
            if self.mesh.is_first:
                state[name] = tensor.detach().cpu().clone()
        if self.mesh.is_first:
            clear_for_model(folder, adapter=is_adapter)
        if self.mesh.is_first and is_adapter:
            save_adapter(model, state, folder)
        elif self.mesh.is_first:
            state |= {
                name: b.cpu()
                for name, b in model.state_dict().items()
                if name not in state and _is_buffer(model, name)
            }
            model.save_pretrained(folder, state_dict=state)
        dist.barrier()

    def offload(self) -> None:
        """Move optimizer state, master weights and gradients to the CPU. The weights stay: forwards and
        weight syncs read them."""
        self.optimizer_state.leave()

    def reload(self) -> None:
        self.optimizer_state.come_back()

    def _check_present(self) -> None:
        if self.optimizer_state.is_away:
            raise RuntimeError("the optimizer's state is on the CPU since offload(); reload() comes first")

    def _agree(self, rows: Sequence[RowT]) -> tuple[list[RowT], LossNorm]:
        """The same number of rows on every rank (collectives inside forward and backward count them), on its
        device, and the totals that losses divide by, of each sample once."""
        mine = torch.tensor(
            [len(rows), sum(r.num_tokens for r in rows), sum(r.num_sequences for r in rows)],
            dtype=torch.float64,
            device=self.device,
        )
        everyone = [torch.empty_like(mine) for _ in range(self.mesh.data)]
        dist.all_gather(everyone, mine, self.mesh.data_group)
        counts = torch.stack(everyone)
        most = int(counts[:, 0].max())
        num_tokens, num_sequences = counts[:, 1:].sum(0).tolist()
        padding = [rows[0].empty()] * (most - len(rows))
        norm = LossNorm(max(num_tokens, 1.0), max(num_sequences, 1.0))
        return [row.to(self.device) for row in [*rows, *padding]], norm

    def _sum_over_ranks(self, contributions: dict[str, Tensor]) -> Metrics:
        if not contributions:
            return {}
        values = torch.stack(
            [torch.as_tensor(s, device=self.device).double() for s in contributions.values()]
        )
        dist.all_reduce(values, group=self.mesh.data_group)
        return dict(zip(contributions, values.tolist(), strict=True))

    def _clip(self) -> float:
        limit = self.max_norm if self.max_norm > 0 else math.inf
        return float(clip_grad_norm_(self.module.parameters(), limit, mpu=self.engine.mpu))

    def _in_full(
        self, parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        named = list(parameters)
        for bucket in _buckets(named, [num_bytes(p) for _, p in named], bucket_bytes):
            with self._gathered(p for _, p in bucket):
                for name, param in bucket:
                    yield name, whole(param)

    def _changing(self, params: list[Tensor]) -> AbstractContextManager:
        """Inside, parameters are whole on every rank, and rank 0's are kept. Collective."""
        return deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=self.stage == 3)

    def _gathered(self, tensors: Iterable[Tensor]) -> AbstractContextManager:
        """Inside, parameters are whole on every rank. Collective."""
        return deepspeed.zero.GatheredParameters(list(tensors), enabled=self.stage == 3)


class FrozenModel:
    """One rank of a model that only answers: a reference, teacher or reward model. Sharded at ZeRO stage 3 or
    when offloaded, else a copy on every rank."""

    def __init__(
        self,
        build_model: Callable[[], RowModel],
        *,
        ds: DeepSpeedConfig,
        offload: bool,
        mesh: ProcessMesh | None = None,
    ) -> None:
        """`mesh`: None where every rank has samples of its own."""
        self.device = current_device()
        self.sharded = ds.zero_stage == 3 or (offload and DEVICE_TYPE == "cuda")
        config = inference_config(ds, offload=offload)
        self._zero3_init = HfDeepSpeedConfig(config) if self.sharded else None
        module, mesh = build_model().eval(), mesh or ProcessMesh.joined()
        if mesh.tensor_group is not None:
            shard_matrices_checked(module.model, mesh.tensor_group)
        if self.sharded:
            self.model, *_ = deepspeed.initialize(model=module, config=config)
        else:
            self.model = module.to(self.device)
        shard_rows(module, mesh, ds)
        resolve_reading(self.model, module, zero_stage=3 if self.sharded else None, tensor=mesh.tensor)

    @torch.no_grad()
    def __call__(self, row: Row) -> Any:
        """What the model answers about one row, by its kind (see models/). All ranks must ask together."""
        return self.model(row)

    @property
    def module(self) -> RowModel:
        return cast(RowModel, self.model.module if self.sharded else self.model)

    def whole(self, parameter: Tensor) -> Tensor:
        """A parameter in full, to keep. Collective."""
        with deepspeed.zero.GatheredParameters([parameter], enabled=self.sharded):
            return parameter.detach().to(self.device, copy=self.sharded)

    @torch.no_grad()
    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """`read(model, row)` for each of this rank's rows, on the CPU. At least one row."""
        count = torch.tensor(len(rows), device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        padded = [*rows, *[rows[0].empty()] * (int(count) - len(rows))]
        return on_cpu([read(self.model, row.to(self.device)) for row in padded])[: len(rows)]


def shard_rows(module: RowModel, mesh: ProcessMesh, ds: DeepSpeedConfig) -> None:
    """From now on, among the ranks of the mesh's sequence dimension."""
    if mesh.sequence_group is not None:
        reading_of(module.model).sharing = SequenceParallel(
            group=mesh.sequence_group,
            mode=ds.sequence_parallel_mode,
            heads_at_a_time=ds.ring_attn_head_stride,
        )


def on_cpu(answers: Sequence[Tensor]) -> list[Tensor]:
    """Copied once all are under way: a copy waits for its device."""
    return [answer.cpu() for answer in answers]


def num_bytes(param: Tensor) -> int:
    """Of the whole parameter, of which ZeRO-3 keeps only a shard here."""
    return math.prod(whole_shape(param)) * param.element_size()


def _buckets(items: Sequence[ItemT], sizes: Sequence[int], capacity: int) -> Iterator[list[ItemT]]:
    """In order, each full when its sizes reach `capacity`."""
    bucket, filled = [], 0
    for item, size in zip(items, sizes, strict=True):
        bucket.append(item)
        filled += size
        if filled >= capacity:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _optimizer(module: RowModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW with biases, norms and other vectors exempt from decay; or Muon for matrices, and that for the
    rest."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = _matrices(module) if optim.optim == "muon" else []
    by_muon = {id(p) for p in matrices}
    for p in trainable:
        setattr(p, "use_muon", id(p) in by_muon)  # noqa: B010  DeepSpeed's ZeRO asks the parameter
    trainable = [p for p in trainable if id(p) not in by_muon]
    exempt = _exempt_from_decay(module)
    groups = [
        {"params": [p for p in trainable if id(p) not in exempt], "weight_decay": optim.adam.weight_decay},
        {"params": [p for p in trainable if id(p) in exempt], "weight_decay": 0.0},
    ]
    adam = {"lr": optim.adam.lr, "betas": optim.adam.betas, "eps": optim.adam.eps}
    groups = [g for g in groups if g["params"]]
    if matrices:
        return _muon(groups, adam, matrices, optim)
    # Fused on a GPU and, over threads, on a CPU. DeepSpeed's own need a compiler, which users may not have.
    return torch.optim.AdamW(groups, **adam, fused=True)


def _exempt_from_decay(module: nn.Module) -> set[int]:
    """The ids of parameters. A norm is known by its class: architectures call them norm, ln_1 or ln_f."""
    found = set()
    for child in module.modules():
        is_norm = "norm" in type(child).__name__.lower()
        for name, p in child.named_parameters(recurse=False):
            num_dimensions = len(p.ds_shape) if hasattr(p, "ds_shape") else p.ndim
            if is_norm or num_dimensions < 2 or name.endswith("bias"):
                found.add(id(p))
    return found


def _matrices(module: RowModel) -> list[Tensor]:
    """What Muon trains: the weights of linear layers, but not embeddings nor the head, whose rows are
    tokens."""
    model = module.model
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end}
    layers = [m.weight for m in backbone_of(model).modules() if isinstance(m, nn.Linear)]
    return [weight for weight in layers if weight.requires_grad and id(weight) not in ends]


def _muon(groups: list[dict], adam: dict, matrices: list, optim: OptimConfig) -> torch.optim.Optimizer:
    """https://kellerjordan.github.io/posts/muon, as DeepSpeed spreads it over ranks."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if DEVICE_TYPE == "cpu":
        # DeepSpeed compiles Newton-Schulz. That takes longer than it saves here, and what torch 2.13 compiles
        # for AVX2 returns inf.
        torch.compiler.set_stance("force_eager")
    muon = {"lr": optim.muon.lr, "momentum": optim.muon.momentum, "weight_decay": optim.adam.weight_decay}
    others = [group | adam | {"use_muon": False} for group in groups]
    return MuonWithAuxAdam([*others, muon | {"params": matrices, "use_muon": True}])


def _check_finite(metrics: Metrics, step: int) -> None:
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        raise FloatingPointError(
            f"optimizer step {step}: {', '.join(f'{k} is {v}' for k, v in bad.items())}. "
            "Nothing was saved after it.\n"
            f"Lower the learning rate, or look at this step's rollouts and data in the run folder."
        )


def _leave_out_frozen(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """Frozen weights come from where the model was loaded: checkpoints are without them. DeepSpeed's
    `exclude_frozen_parameters` alone keeps tied heads and the scales of 4-bit weights."""
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name in state.keys() - trained - dict(module.named_buffers()).keys():
        del state[name]


def _load_trained(src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """What DeepSpeed does with a checkpoint's weights. Frozen ones are not in it."""
    missing = [name for name, p in dst.named_parameters() if p.requires_grad and name not in src]
    unknown = src.keys() - dst.state_dict().keys()
    check_same_model(unknown, missing)
    dst.load_state_dict(src, strict=False)


def _is_buffer(model: nn.Module, name: str) -> bool:
    return any(name == buffer for buffer, _ in model.named_buffers())
