"""Trained and frozen models on DeepSpeed, at any ZeRO stage."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.utils import groups as process_groups
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.integrations import HfDeepSpeedConfig

from openrlhf.backends.deepspeed.config import inference_config, training_config
from openrlhf.backends.deepspeed.model_parallel import ModelParallelUnit
from openrlhf.backends.deepspeed.moving_average import MovingAverage
from openrlhf.backends.deepspeed.optimizer_state import OptimizerState
from openrlhf.backends.distributed import BACKENDS, use_own_cores
from openrlhf.backends.model_rank import FrozenRank, TrainedRank, decay_groups, without_states
from openrlhf.checkpoint.writer import CheckpointWriter
from openrlhf.checkpoint.zero import (
    ORDER,
    Checkpoint,
    DeepSpeedFiles,
    load_states,
    names_in_order,
    stepped_tensors,
)
from openrlhf.config.sections import DeepSpeedConfig, OptimConfig
from openrlhf.device import DEVICE_TYPE
from openrlhf.models.backbone import RowModel, get_backbone
from openrlhf.models.self_check import shard_matrices_checked
from openrlhf.types import Metrics

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# DeepSpeed calls deprecated functions of torch.distributed
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


class DeepSpeedEngine(TrainedRank):
    """One rank of a model in training, at any ZeRO stage. At stage 3 no rank ever has the whole model in
    memory."""

    backend = "deepspeed"
    adds_gradients = False

    def _build(self, build_model: Callable[[], RowModel], ema_beta: float | None) -> None:
        join_deepspeed()
        ds, optim, self.stage = self.ds, self.optim, self.ds.zero_stage
        # At stage 0 in float32 DeepSpeed does not expose the gradient norm, so this class clips gradients
        # itself.
        self.clips_itself = self.stage == 0 and ds.param_dtype == "fp32"
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
        self._prepare_layers(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = _optimizer(module, optim) if self.learns else without_states(trained)
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            # pyrefly: ignore[bad-argument-type]  DeepSpeed's annotation is torch's older base class
            lr_scheduler=LambdaLR(optimizer, self.schedule),
            mpu=None if self.mesh.tensor_group is None else ModelParallelUnit(self.mesh),
            config=config,
        )
        self.files = DeepSpeedFiles.of(self.engine)
        self.optimizer_state = OptimizerState(self.engine, on_host=ds.adam_offload)
        self.set_up_rows(self.engine, self.module, ds, zero_stage=self.stage)
        self.average = None
        if ema_beta is not None:
            parameters = self.module.model.named_parameters()
            self.average = MovingAverage(parameters, beta=ema_beta, mesh=self.mesh)

    @property
    def caller(self) -> Callable:
        return self.engine

    @property
    def module(self) -> RowModel:
        return cast(RowModel, self.engine.module)

    @property
    def steps(self) -> int:
        return self.engine.global_steps

    def close(self) -> None:
        self.engine.destroy()  # its hooks on the autograd graph are references that Python does not see

    def _begin_pass(self, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def _full_gradient(self, parameter: Tensor) -> Tensor:
        gradient = safe_get_full_grad(parameter)
        return torch.zeros_like(parameter) if gradient is None else gradient

    def _step(self) -> tuple[float, float]:
        lr = self.engine.get_lr()[0]
        grad_norm = self._clip() if self.clips_itself else None
        if grad_norm is not None and not math.isfinite(grad_norm):
            self.engine.zero_grad()
            self.engine.global_steps += 1
            self._scheduler.step()
            return lr, grad_norm
        self.engine.step()
        if not (self.engine.was_step_applied() or self.scales_loss):
            self._scheduler.step()
            return lr, math.inf  # DeepSpeed may report the norm of an earlier step
        if grad_norm is None:
            found = self.engine.get_global_grad_norm()
            assert found is not None  # it is None only if this class clips
            grad_norm = float(found)
        return lr, grad_norm

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        yield from stepped_tensors(self.engine)
        if self.average is not None:
            yield from ((f"{name} (moving average)", part) for name, part in self.average.parts.items())

    def optim_step(self, contributions: dict[str, Tensor] | None = None) -> Metrics:
        metrics = super().optim_step(contributions)
        if self.average is not None and math.isfinite(metrics.get("grad_norm", math.inf)):
            self.average.update()
        return metrics

    def _write_states(self, writer: CheckpointWriter, state: dict) -> None:
        self.files.writer, place = writer, writer.folder
        # DeepSpeed merges client state into its own dictionary, so the trainer's state is under a single key.
        self.engine.save_checkpoint(
            str(place.parent),
            tag=place.name,
            client_state={"openrlhf": state, ORDER: names_in_order(self.engine)},
            save_latest=False,
            exclude_frozen_parameters=True,
        )
        if self.average is not None:
            self.average.save(writer)

    def _read_states(self, folder: Path) -> dict:
        """Reads a checkpoint of any ZeRO stage. Raises UsageError if this engine has a moving average and the
        checkpoint has none. Ignores the checkpoint's average if the engine has none."""
        if self.average is not None:
            self.average.load(folder)
        own = [dict(group) for group in self._scheduler.optimizer.param_groups]
        checkpoint = Checkpoint(folder, self.engine.checkpoint_mp_rank)
        shared = load_states(self.engine, checkpoint, of_optimizer=self.learns)
        self._keep_settings(own)
        return shared["openrlhf"]

    def _keep_settings(self, own: list[dict[str, Any]]) -> None:
        """Sets this run's learning rates and the other settings of its optimizer's groups `own` instead of
        those in the checkpoint, because its run may have had another length, or be another run."""
        scheduler = self._scheduler
        scheduler.base_lrs = [group["initial_lr"] for group in own]
        groups = scheduler.optimizer.param_groups
        for group, mine, shape in zip(groups, own, scheduler.lr_lambdas, strict=True):
            group.update({key: value for key, value in mine.items() if key not in ("params", "step")})
            group["lr"] = mine["initial_lr"] * shape(scheduler.last_epoch)

    @property
    def _scheduler(self) -> LambdaLR:
        return cast(LambdaLR, self.engine.lr_scheduler)

    def offload(self) -> None:
        # The weights stay, because forward passes and weight syncs read them.
        self.optimizer_state.offload()

    def reload(self) -> None:
        self.optimizer_state.reload()

    @property
    def is_offloaded(self) -> bool:
        return self.optimizer_state.is_offloaded

    def _trained_in_full(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the moving average instead of the trained weights, if there is one."""
        return super()._trained_in_full() if self.average is None else self.average.in_full()

    def _clip(self) -> float:
        limit = self.optim.max_norm if self.optim.max_norm > 0 else math.inf
        return float(clip_grad_norm_(self.module.parameters(), limit, mpu=self.engine.mpu))

    def _changing(self, params: list[Tensor]) -> AbstractContextManager:
        return deepspeed.zero.GatheredParameters(params, modifier_rank=0, enabled=self.stage == 3)

    def _gathered(self, tensors: Iterable[Tensor]) -> AbstractContextManager:
        return deepspeed.zero.GatheredParameters(list(tensors), enabled=self.stage == 3)


class DeepSpeedFrozen(FrozenRank):
    """One rank of a model that is not trained. It is sharded at ZeRO stage 3, and if it is offloaded from a
    GPU; otherwise every rank has a copy."""

    def _build(self, build_model: Callable[[], RowModel], ds: DeepSpeedConfig, offload: bool) -> None:
        join_deepspeed()
        self.sharded = ds.zero_stage == 3 or (offload and DEVICE_TYPE == "cuda")
        config = inference_config(ds, offload=offload)
        self._zero3_init = HfDeepSpeedConfig(config) if self.sharded else None
        module = build_model().eval()
        if self.mesh.tensor_group is not None:
            shard_matrices_checked(module.model, self.mesh.tensor_group)
        if self.sharded:
            self.model, *_ = deepspeed.initialize(model=module, config=config)
        else:
            self.model = module.to(self.device)
        self.set_up_rows(self.model, module, ds, zero_stage=3 if self.sharded else None)

    @property
    def caller(self) -> Callable:
        return self.model

    @property
    def module(self) -> RowModel:
        return cast(RowModel, self.model.module if self.sharded else self.model)

    def whole(self, parameter: Tensor) -> Tensor:
        with deepspeed.zero.GatheredParameters([parameter], enabled=self.sharded):
            return parameter.detach().to(self.device, copy=self.sharded)


def join_deepspeed() -> None:
    """Initializes DeepSpeed with the process group that `init_distributed` created. DeepSpeed forgets the
    groups of an earlier run of this process, which `leave_distributed` has destroyed."""
    if DEVICE_TYPE == "cpu":  # DeepSpeed would compile its shared-memory collectives on first use
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=BACKENDS[DEVICE_TYPE], verbose=False)
    if process_groups._WORLD_GROUP is not None:
        try:
            dist.get_global_rank(process_groups._WORLD_GROUP, 0)
        except ValueError:
            process_groups._release_process_group_references()


def _optimizer(module: RowModel, optim: OptimConfig) -> torch.optim.Optimizer:
    """Builds AdamW, without weight decay for biases, norms and other vectors. With `optim.optim` muon,
    matrices are trained by Muon instead."""
    matrices = _matrices(module) if optim.optim == "muon" else []
    by_muon = {id(p) for p in matrices}
    for p in (p for p in module.parameters() if p.requires_grad):
        setattr(p, "use_muon", id(p) in by_muon)  # noqa: B010  DeepSpeed's ZeRO reads this attribute
    groups = decay_groups(module, optim.adam.weight_decay, without=by_muon)
    adam = {"lr": optim.adam.lr, "betas": optim.adam.betas, "eps": optim.adam.eps}
    if matrices:
        return _muon(groups, adam, matrices, optim)
    # torch's fused AdamW, on GPUs and CPUs. DeepSpeed's AdamW needs a compiler, which users may lack.
    return torch.optim.AdamW(groups, **adam, fused=True)


def _matrices(module: RowModel) -> list[Tensor]:
    """Returns the parameters that Muon trains: weights of linear layers, except embeddings and the head,
    whose rows belong to tokens."""
    model = module.model
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end}
    layers = [m.weight for m in get_backbone(model).modules() if isinstance(m, nn.Linear)]
    return [weight for weight in layers if weight.requires_grad and id(weight) not in ends]


def _muon(groups: list[dict], adam: dict, matrices: list, optim: OptimConfig) -> torch.optim.Optimizer:
    """Builds DeepSpeed's distributed Muon (https://kellerjordan.github.io/posts/muon), with AdamW for
    `groups`."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # takes two seconds

    if DEVICE_TYPE == "cpu":
        # DeepSpeed compiles Newton-Schulz. That takes longer than it saves on a CPU, and the code that torch
        # 2.13 generates for AVX2 returns inf.
        torch.compiler.set_stance("force_eager")
    muon = {"lr": optim.muon.lr, "momentum": optim.muon.momentum, "weight_decay": optim.adam.weight_decay}
    others = [group | adam | {"use_muon": False} for group in groups]
    return MuonWithAuxAdam([*others, muon | {"params": matrices, "use_muon": True}])


def _leave_out_frozen(module: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    """Removes frozen weights from a state dict, because a resume loads them with the model. DeepSpeed's
    `exclude_frozen_parameters` alone would leave tied heads and the scales of 4-bit weights in it."""
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    for name in state.keys() - trained - dict(module.named_buffers()).keys():
        del state[name]
