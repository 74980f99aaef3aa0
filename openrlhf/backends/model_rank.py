"""One rank of a model, as far as all training backends share it: forward passes, training steps, gathering of
weights and export."""

import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from openrlhf.backends.base import Objective, Part, Row, RowT
from openrlhf.backends.distributed import ProcessMesh, current_device
from openrlhf.backends.finite import NotFiniteError, check_finite
from openrlhf.backends.lr_schedule import lr_schedule
from openrlhf.checkpoint.random_state import load_random_state, save_random_state
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.config.choices import BackendName
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.device import DEVICE_TYPE, own_bytes
from openrlhf.errors import ErrorCode, RunError, UsageError
from openrlhf.faults import fault
from openrlhf.files import check_owner
from openrlhf.memory.training import RankMemory, training_memory
from openrlhf.models.backbone import RowModel, get_row_layout
from openrlhf.models.checkpoint_layout import CheckpointLayout
from openrlhf.models.dropout import enable_checkpointing, has_adapter_dropout, has_noise, set_training
from openrlhf.models.lora import (
    Merge,
    adapter_weights,
    base_weights,
    fill_randomly,
    has_adapters,
    merged_weights,
    save_adapter,
)
from openrlhf.models.saving import save_model
from openrlhf.models.self_check import resolve_row_layout
from openrlhf.models.sequence_parallel import SequenceParallel
from openrlhf.models.sizes import num_bytes, shape_of
from openrlhf.models.tensor_parallel import joined, whole, whole_shape
from openrlhf.rows import ExperienceRow, LossNorm
from openrlhf.types import Metrics

ItemT = TypeVar("ItemT")
WHOLE = {"merged": merged_weights, "base": base_weights}
BUCKET_BYTES = 256 << 20
"""Bytes of parameters that are gathered at a time."""
MAX_SKIPPED = 10
"""Optimizer steps in a row that may be skipped (--train.on_nonfinite skip_step); one more ends the run."""


class ModelRank(ABC):
    """One rank of a model that computes outputs for rows."""

    def __init__(self, mesh: ProcessMesh | None) -> None:
        """`mesh`: the mesh of the model's ranks; None: all ranks have different samples."""
        self.mesh, self.device = mesh or ProcessMesh.joined(), current_device()

    @property
    def caller(self) -> Callable:
        """The callable that runs the model on a row. It is collective if weights are sharded."""
        return self.module

    @property
    @abstractmethod
    def module(self) -> RowModel: ...

    num_rows: ClassVar[int] = 0
    """Number of rows that this process has passed through models."""

    @property
    def shares_prefixes(self) -> bool:
        """True if the model computes common prefixes of a row's sequences once."""
        return get_row_layout(self.module.model).shares_prefixes

    @torch.no_grad()
    def forward(self, rows: Sequence[RowT], read: Callable[[Callable, RowT], Tensor]) -> list[Tensor]:
        """Returns `read(model, row)` for each of this rank's rows, on the CPU. `rows` must not be empty."""
        padded, _ = self._agree(rows)
        self.module.eval()
        answers = []
        for row in padded:
            answers.append(read(self.caller, row))
            ModelRank.num_rows += 1
        if fault("rows.log_probs"):
            answers[0].view(-1)[0] = math.nan
        return [answer.cpu() for answer in answers][: len(rows)]  # cpu() waits for the device

    def set_up_rows(
        self, ask: Callable[[], Any], module: RowModel, ds: DeepSpeedConfig, *, zero_stage: int | None
    ) -> None:
        """Determines how the model reads rows. `ask`: calls `module` through its engine. `zero_stage`: 3 if
        ranks gather sharded weights in every pass; None: a whole model."""
        layout = get_row_layout(module.model)
        if self.mesh.sequence_group is not None:
            layout.sharing = SequenceParallel(
                group=self.mesh.sequence_group,
                mode=ds.sequence_parallel_mode,
                heads_at_a_time=ds.ring_attn_head_stride,
            )
        layout.gathers, layout.share_prefixes = zero_stage == 3, ds.share_prefixes
        resolve_row_layout(ask, module, zero_stage=zero_stage, tensor=self.mesh.tensor)

    def _agree(self, rows: Sequence[RowT]) -> tuple[list[RowT], LossNorm]:
        """Returns this rank's rows on its device, and the totals by which losses are divided, in which each
        sample counts once. Adds dummy rows so that all ranks have the same number of rows, because forward
        and backward passes contain collectives."""
        prompts = [r.prompts for r in rows if isinstance(r, ExperienceRow) and r.prompts is not None]
        num_prompts = max((int(p.max()) + 1 for p in prompts if len(p)), default=0)
        mine = torch.tensor(
            [len(rows), num_prompts, sum(r.num_tokens for r in rows), sum(r.num_sequences for r in rows)],
            dtype=torch.float64,
            device=self.device,
        )
        everyone = [torch.empty_like(mine) for _ in range(self.mesh.data)]
        dist.all_gather(everyone, mine, self.mesh.data_group)
        counts = torch.stack(everyone)
        most = int(counts[:, 0].max())
        num_tokens, num_sequences = counts[:, 2:].sum(0).tolist()
        totals = None
        if prompts:
            num_prompts = max(1, int(counts[:, 1].max()))
            totals = torch.bincount(torch.cat(prompts), minlength=num_prompts).to(self.device)
            dist.all_reduce(totals, group=self.mesh.data_group)
        padding = [rows[0].empty()] * (most - len(rows))
        norm = LossNorm(max(num_tokens, 1.0), max(num_sequences, 1.0), totals)
        return [row.to(self.device) for row in [*rows, *padding]], norm


class FrozenRank(ModelRank):
    """One rank of a model that is not trained: a reference, a teacher or a reward model. Calls are
    collective."""

    def __init__(
        self,
        build_model: Callable[[], RowModel],
        *,
        ds: DeepSpeedConfig,
        offload: bool,
        mesh: ProcessMesh | None = None,
    ) -> None:
        """`build_model`: see `TrainedRank`. `offload`: keep the weights in CPU memory. `mesh`: see
        `ModelRank`."""
        super().__init__(mesh)
        self._build(build_model, ds, offload)

    @abstractmethod
    def _build(self, build_model: Callable[[], RowModel], ds: DeepSpeedConfig, offload: bool) -> None:
        """Builds the model and places it on the ranks."""

    @torch.no_grad()
    def __call__(self, row: Row) -> Any:
        """Returns the model's output for one row; its form depends on the kind of model (see models/)."""
        return self.caller(row)

    @abstractmethod
    def whole(self, parameter: Tensor) -> Tensor:
        """Returns a parameter without sharding. The result stays valid."""


class TrainedRank(ModelRank):
    """One rank of a model in training. A subclass defines how gradients are computed and applied, and how
    sharded weights are gathered. All methods except `steps`, `row_memory` and `has_written` are
    collective."""

    backend: ClassVar[BackendName]
    scales_loss = False
    """True with dynamic loss scaling (fp16), which skips a step whose gradient overflows."""
    skips_nonfinite = False
    """Whether the run goes on after a step whose loss or gradient is not finite."""
    skipped = 0
    """Number of steps that were skipped in a row."""
    adds_gradients = True
    """True if several calls of `forward_backward` may precede an optimizer step."""
    has_gradients = False
    """True between `forward_backward` and the optimizer step."""
    is_incomplete = False
    """True after a `forward_backward` that has ended by an error between two of its passes."""
    before_step: Callable[[], None] | None = None
    """Function that `optim_step` calls when the gradients are complete, before they are clipped and applied,
    such as one that reads `gradients`. None in training."""
    merged_fraction: float | None = None
    """Fraction of the adapters' change that rounding left in `weights`; None if they changed nothing."""
    _writer: CheckpointWriter | None = None
    """The writer of a checkpoint that is not finished."""

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
        skip_nonfinite: bool = False,
        learns: bool = True,
        mesh: ProcessMesh | None = None,
    ) -> None:
        """Builds the model and the optimizer. Call `init_distributed` first.

        `build_model`: builds the module, whose `.model` is a Hugging Face model. It is called after sharding
        is set up, so that ranks need not load the whole model. `total_steps`: optimizer steps of the whole
        run, for the learning rate schedule. `dropout`: train with the dropout of the model's configuration;
        without it a training pass computes the same as `forward` and `evaluate`, except for the dropout of
        adapters. `ema_beta`: decay of a moving average of the trained weights, None for no average; `export`
        writes the average and checkpoints keep it, nothing else uses it. `skip_nonfinite`: go on after a step
        whose loss or gradient is not finite. `learns`: False builds no optimizer states and loads the weights
        of checkpoints alone, for a model whose weights are only read. `mesh`: see `ModelRank`.
        """
        super().__init__(mesh)
        self.optim, self.ds, self.learns = optim, ds, learns
        self.schedule = lr_schedule(optim, total_steps)
        self.checkpoints_layers, self.reentrant, self.dropout = gradient_checkpointing, reentrant, dropout
        self.skips_nonfinite = skip_nonfinite
        self._build(build_model, ema_beta)

    @abstractmethod
    def _build(self, build_model: Callable[[], RowModel], ema_beta: float | None) -> None:
        """Builds the model, places it on the ranks, and builds the optimizer."""

    def close(self) -> None:
        """Gives up what would keep the model in memory when nothing else refers to it. The engine takes no
        steps afterwards."""

    @abstractmethod
    def offload(self) -> None:
        """Moves everything that only optimizer steps need to the CPU, until `reload`."""

    @abstractmethod
    def reload(self) -> None: ...

    @property
    def is_offloaded(self) -> bool:
        """True between `offload` and `reload` of the optimizer's state."""
        return False

    @property
    def has_written(self) -> bool:
        """True if no file of this rank is waiting for the disk, whether or not it could be written."""
        return self._writer is None or self._writer.is_done

    def save_checkpoint(self, folder: str, tag: str, state: dict, *, later: bool = False) -> None:
        """Writes a checkpoint of the model and of `state`. With `later` it is copied to host memory, and
        written in the background until `finish_checkpoint`."""
        self._check_present()
        self.check_finite()
        place = Path(folder, tag)
        if self.mesh.is_first:
            shutil.rmtree(place, ignore_errors=True)  # an unfinished save
            place.mkdir(parents=True)
        dist.barrier()
        self._writer = writer = CheckpointWriter(place, later=later)
        self._write_states(writer, state)
        save_random_state(writer, self.mesh.rank, self.mesh.size)
        if not later:
            self.finish_checkpoint()

    def load_checkpoint(self, folder: str, tag: str) -> dict:
        """Restores a checkpoint, which any number of ranks may have saved, and returns its `state`. Raises
        UsageError for a checkpoint of another model."""
        self._check_present()
        check_owner(place := Path(folder, tag), "--ckpt.path")
        state = self._read_states(place)
        load_random_state(place, self.mesh.rank, self.mesh.size)
        return state

    @abstractmethod
    def _write_states(self, writer: CheckpointWriter, state: dict) -> None:
        """Writes weights, optimizer states and the trainer's `state`. Collective."""

    @abstractmethod
    def _read_states(self, folder: Path) -> dict:
        """Restores what `_write_states` wrote, and returns the trainer's state. Collective."""

    def finish_checkpoint(self) -> None:
        """Waits until the files of the last `save_checkpoint` are on the disk, and writes their manifest.
        Collective. Raises RunError on every rank if one could not write."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.finish()
            dist.barrier()

    def _prepare_layers(self, module: RowModel) -> None:
        """Sets up dropout and gradient checkpointing of a model that is not sharded yet."""
        # Models without noise stay in training mode, because some architectures drop gradients in evaluation
        # mode.
        self.plain_training = self.dropout or not has_noise(module.model.config)
        """True if training passes need not disable dropout: the model has none, or is trained with it."""
        if self.checkpoints_layers:
            on_host = self.ds.activation_offload
            enable_checkpointing(
                module.model, reentrant=self.reentrant, dropout=self.plain_training, on_host=on_host
            )

    @property
    def trains_on_prefixes(self) -> bool:
        """True if training passes compute common prefixes of a row's sequences once: they have no noise."""
        layout = get_row_layout(self.module.model)
        is_random = layout.has_noise and self.plain_training
        return layout.shares_prefixes and not is_random and not has_adapter_dropout(self.module)

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of optimizer steps done, including those before a resume."""

    def _begin_pass(self, is_last: bool) -> None:
        """Prepares a forward and backward pass. `is_last`: True for the last pass of an optimizer step."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss`, averaged over ranks with different samples, to the accumulated
        gradients."""

    @abstractmethod
    def _step(self) -> tuple[float, float]:
        """Takes one optimizer step. Returns its learning rate and the gradient norm before clipping. Where
        that norm is not finite, weights and optimizer states do not change, while the step counts and the
        schedule goes on. With loss scaling the schedule waits."""

    def gradients(self) -> dict[str, Tensor]:
        """Returns a copy of the unsharded gradient of each trained weight, by its name in the model. Call it
        from `before_step`. Collective."""
        found = {}
        for name, parameter in self.module.model.named_parameters():
            if parameter.requires_grad:
                gradient, shard = self._full_gradient(parameter), getattr(parameter, "shard", None)
                found[name] = (
                    whole(gradient).clone() if shard is None else joined(gradient, shard.group, shard.dim)
                )
        return found

    def _full_gradient(self, parameter: Tensor) -> Tensor:
        """Returns the gradient of a weight; of a weight that tensor parallelism splits, of this rank's part.
        Weights that no row has used have zeros. Collective."""
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of what this rank adds to a checkpoint apart from weights: optimizer states,
        master weights, a moving average."""
        yield from ()

    def _check_present(self) -> None:
        """Raises RuntimeError if the optimizer's state is offloaded."""
        if self.is_offloaded:
            raise RuntimeError("the optimizer's state is on the CPU since offload(); reload() comes first")

    def _gathered(self, tensors: Iterable[Tensor]) -> AbstractContextManager:
        """Gathers sharded parameters within the context. Collective."""
        return nullcontext()

    def _changing(self, params: list[Tensor]) -> AbstractContextManager:
        """Gathers these parameters within the context and keeps rank 0's changes of them. Collective."""
        return nullcontext()

    def _trained_in_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, unsharded tensor) of the trained weights, as `export` writes them. Collective."""
        yield from self._in_full((n, p) for n, p in self.module.model.named_parameters() if p.requires_grad)

    def train_step(
        self, mini_batch: Sequence[RowT], objective: Objective[RowT], *also: tuple[Sequence, Objective]
    ) -> Metrics:
        """Takes one optimizer step on the rows of all ranks. `mini_batch`: this rank's rows, at least one.
        Ranks with the same samples pass the same rows.

        `also`: more (rows, objective) of the same step. The losses are added up, and each is divided by the
        totals of its own rows.

        Returns the objectives' metrics over all ranks, and `grad_norm` (before clipping), `lr` and
        `num_tokens` (the tokens with a loss in `mini_batch` on all ranks). A step with a metric or, without
        loss scaling, a `grad_norm` that is not finite changes no weights. Raises NotFiniteError for it on
        every rank, or returns the finite metrics where such steps are skipped: `skipped` is 1 for them and 0
        for others. Raises NotFiniteError on every rank where the weights are not finite after the step.
        """
        contributions, num_tokens = self._accumulate((mini_batch, objective), *also)
        return self.optim_step(contributions) | {"num_tokens": num_tokens}

    def forward_backward(self, *streams: tuple[Sequence, Objective]) -> Metrics:
        """Adds the gradients of the streams' losses to those since the last optimizer step. `streams`: pairs
        (rows, objective) as in `train_step`. Returns the objectives' metrics over all ranks, and
        `num_tokens`. Raises UsageError where the backend cannot add to gradients that are complete."""
        if self.has_gradients and not self.adds_gradients:
            text = (
                "DeepSpeed reduces gradients once per optimizer step, so one forward_backward precedes each "
                "optim_step;\npass several (batch, loss) to one call, or use --train.backend torch"
            )
            raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--train.backend", value="deepspeed")
        contributions, num_tokens = self._accumulate(*streams)
        self.has_gradients = True
        return self._sum_over_ranks(contributions) | {"num_tokens": num_tokens}

    def optim_step(self, contributions: dict[str, Tensor] | None = None) -> Metrics:
        """Takes one optimizer step with the gradients of all losses since the last one. Returns `lr`,
        `grad_norm` and the sums of `contributions` to metrics over all ranks; see `train_step` for those that
        are not finite."""
        self._check_complete()
        self.has_gradients = False
        if self.before_step is not None:
            self.before_step()
        lr, grad_norm = self._step()
        if fault("step.weights"):
            next(weight for _, weight in self._weights() if weight.numel()).view(-1)[0] = math.nan
        metrics = self._sum_over_ranks(contributions or {}) | {"grad_norm": grad_norm}
        self.check_finite(states=False)
        return self._finite(metrics) | {"lr": lr}

    def _accumulate(self, *streams: tuple[Sequence, Objective]) -> tuple[dict[str, Tensor], float]:
        """Runs forward and backward over the rows of all streams. Returns this rank's contributions to the
        metrics, and the number of tokens with a loss in the first stream on all ranks."""
        self._check_present()
        self._check_complete()
        passes: list[tuple[Any, Objective, LossNorm]] = []
        for own, objective in streams:
            rows, norm = self._agree(own)
            passes += [(row, objective, norm) for row in rows]
        set_training(self.module, dropout=self.plain_training)
        contributions: dict[str, Tensor] = {}
        for i, (row, minimise, totals) in enumerate(passes):
            self._begin_pass(i == len(passes) - 1)
            loss, metrics = minimise(self.caller, row, totals)
            ModelRank.num_rows += 1
            if i == 0 and fault("step.loss"):
                loss = loss * math.nan
            # Gradients are averaged over ranks, but contributions of ranks with different samples must add
            # up. Contributions of sequence-parallel ranks add up already: models/sequence_parallel.py.
            # A loss or metric that is not finite makes the gradient NaN on all ranks.
            poison = 1 + 0 * sum((m.detach() for m in metrics.values()), loss.detach())
            self._backward(loss * self.mesh.data * poison.to(loss.dtype))
            self.is_incomplete = i < len(passes) - 1
            for name, contribution in metrics.items():
                contributions[name] = contributions.get(name, 0) + contribution.detach()
        return contributions, passes[0][2].num_tokens

    def _check_complete(self) -> None:
        """Raises RunError if the gradients are those of some rows of a batch."""
        if self.is_incomplete:
            text = "the last forward_backward failed midway, so the gradients are incomplete; start anew"
            raise RunError(ErrorCode.USER_CODE, text)

    def _finite(self, metrics: Metrics) -> Metrics:
        """Returns the metrics of a step; see `train_step` for those that are not finite."""
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if self.scales_loss and bad.keys() == {"grad_norm"}:
            return metrics
        self.skipped = self.skipped + 1 if bad else 0
        if bad and (not self.skips_nonfinite or self.skipped > MAX_SKIPPED):
            raise _not_finite(bad, self.steps, self.skipped)
        is_skipped = {"skipped": float(bool(bad))} if self.skips_nonfinite else {}
        return {name: value for name, value in metrics.items() if name not in bad} | is_skipped

    def check_finite(self, *, states: bool = True) -> None:
        """Raises NotFiniteError on every rank where a trained weight or, with `states`, anything else that a
        checkpoint holds is not finite on some rank. Collective."""
        check_finite([*self._weights(), *(self._states() if states else ())], self.steps, self.device)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of the trained weights that this rank holds."""
        trained = ((n, p) for n, p in self.module.model.named_parameters() if p.requires_grad)
        yield from ((name, held(p).detach()) for name, p in trained)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[RowT], objective: Objective[RowT]) -> Metrics:
        """Returns the objective's metrics over the rows of all ranks, as one batch. `rows`: this rank's rows,
        at least one."""
        rows, norm = self._agree(rows)
        self.module.eval()
        contributions: dict[str, Tensor] = {}
        for row in rows:
            for name, contribution in objective(self.caller, row, norm)[1].items():
                contributions[name] = contributions.get(name, 0) + contribution
        return self._sum_over_ranks(contributions)

    def row_memory(self, num_tokens: int, with_entropy: bool = False) -> RankMemory:
        """Estimates this rank's peak memory in an optimizer step whose longest row has `num_tokens` tokens.
        `with_entropy`: the loss has an entropy bonus."""
        return training_memory(
            shape_of(self.module.model).shard(self.mesh.tensor),
            self.ds,
            self.backend,
            -(-num_tokens // self.mesh.sequence),
            self.checkpoints_layers,
            ranks=self.mesh.copies,
            gpu=own_bytes() if DEVICE_TYPE == "cuda" else None,
            with_entropy=with_entropy,
        )

    def weights(
        self, bucket_bytes: int = BUCKET_BYTES, part: Part = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, unsharded tensor) for every tensor of the model, with the names and layout of its
        Hugging Face checkpoint.

        `part`: with adapters merged, without adapters, or the adapter's tensors alone under peft's names. All
        ranks must iterate together: with sharded weights each bucket is a collective. Tensors stay valid
        until the next optimizer step.
        """
        if part == "adapter":
            yield from self._in_full(adapter_weights(self.module.model).items(), bucket_bytes)
            return
        layout, weights, merge = self._layout, WHOLE[part](self.module.model), Merge()
        parts = lambda conversion: [part for name in conversion.names for part in weights[name].parts]
        sizes = [sum(map(num_bytes, parts(conversion))) for conversion in layout.conversions]
        for bucket in _buckets(layout.conversions, sizes, bucket_bytes):
            with self._gathered(part for conversion in bucket for part in parts(conversion)):
                for conversion in bucket:
                    whole = {name: weights[name].merged(merge) for name in conversion.names}
                    yield from layout.convert(conversion, whole).items()
        self.merged_fraction = merge.fraction

    def weight_metadata(self, part: Part = "merged") -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Returns (name, dtype, unsharded shape) of each tensor that `weights` yields. Gathers nothing."""
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
        """Replaces the adapters' matrices A and B by random ones within the context, large enough to change
        every layer's output by about its own size. Afterwards all bits are restored. Collective; no optimizer
        step may happen inside."""
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

    def export(self, folder: str) -> None:
        """Writes the model in Hugging Face format; of a model with an adapter, only the adapter. Rank 0
        writes, and all ranks return when the files are written. Collective. The weights in memory do not
        change. Raises NotFiniteError on every rank where the model is not finite."""
        self.check_finite()
        model, state = self.module.model, {}
        is_adapter = has_adapters(model)
        frozen = [] if is_adapter else [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        for weights in (self._in_full(frozen), self._trained_in_full()):
            for name, tensor in weights:
                if self.mesh.is_first:
                    state[name] = tensor.detach().cpu().clone()
        if self.mesh.is_first and is_adapter:
            save_adapter(model, state, folder)
        elif self.mesh.is_first:
            buffers = dict(model.named_buffers())
            state |= {
                name: b.cpu()
                for name, b in model.state_dict().items()
                if name not in state and name in buffers
            }
            save_model(model, folder, state)
        dist.barrier()

    @cached_property
    def _layout(self) -> CheckpointLayout:
        model = self.module.model
        return CheckpointLayout(model, {name: weight.shape for name, weight in merged_weights(model).items()})

    def _in_full(
        self, parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        named = list(parameters)
        for bucket in _buckets(named, [num_bytes(p) for _, p in named], bucket_bytes):
            with self._gathered(p for _, p in bucket):
                for name, param in bucket:
                    yield name, whole(param)

    def _sum_over_ranks(self, contributions: dict[str, Tensor]) -> Metrics:
        if not contributions:
            return {}
        values = torch.stack(
            [torch.as_tensor(c, device=self.device).double() for c in contributions.values()]
        )
        dist.all_reduce(values, group=self.mesh.data_group)
        return dict(zip(contributions, values.tolist(), strict=True))


def exempt_from_decay(module: nn.Module) -> set[int]:
    """Returns the `id`s of the parameters without weight decay: biases, norms and other vectors. Norms are
    recognized by their class, because their names differ between architectures (norm, ln_1, ln_f)."""
    found = set()
    for child in module.modules():
        is_norm = "norm" in type(child).__name__.lower()
        for name, p in child.named_parameters(recurse=False):
            if is_norm or len(whole_shape(p)) < 2 or name.endswith("bias"):
                found.add(id(p))
    return found


def decay_groups(module: nn.Module, weight_decay: float, *, without: Container[int] = ()) -> list[dict]:
    """Returns the trained parameters as groups of an optimizer: those with weight decay, and those exempt
    from it. `without`: `id`s of parameters that are in neither. Empty groups are left out."""
    exempt, trained = exempt_from_decay(module), [p for p in module.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if id(p) not in without and (id(p) in exempt) is is_exempt],
            "weight_decay": 0.0 if is_exempt else weight_decay,
        }
        for is_exempt in (False, True)
    ]
    return [group for group in groups if group["params"]]


def without_states(trained: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Builds the optimizer of a model that does not learn. It has no states."""
    return torch.optim.SGD(trained, lr=0.0)


def _buckets(items: Sequence[ItemT], sizes: Sequence[int], capacity: int) -> Iterator[list[ItemT]]:
    """Yields the items, in order, in buckets. A bucket ends with the item with which its size reaches
    `capacity`."""
    bucket, filled = [], 0
    for item, size in zip(items, sizes, strict=True):
        bucket.append(item)
        filled += size
        if filled >= capacity:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def held(param: Tensor) -> Tensor:
    """Returns the elements of a parameter that this rank holds: a shard, where ranks share it."""
    if isinstance(param, DTensor):
        return param.to_local()
    if hasattr(param, "ds_tensor"):  # of ZeRO-3, whose last shard ends with elements of no parameter
        zero: Any = param
        shard, rank = zero.ds_tensor, dist.get_rank(zero.ds_process_group)
        return shard[: max(0, zero.ds_numel - rank * len(shard))]
    return param


def _not_finite(bad: Metrics, step: int, skipped: int) -> NotFiniteError:
    said = ", ".join(f"{name} is {value}" for name, value in bad.items())
    again = f", and the {skipped - 1} steps before it were skipped for the same reason" * (skipped > 1)
    text = (
        f"optimizer step {step}: {said}{again}. The step changed no weights, and no checkpoint contains it.\n"
        "Lower the learning rate, or look at the step's rollouts and data in the run folder."
    )
    return NotFiniteError(ErrorCode.NOT_FINITE, text)
