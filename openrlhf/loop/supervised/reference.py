"""The tasks that compare a policy with a reference model, DPO and KTO, and that model: another one, the
policy without its adapters, or stored log-probs."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from openrlhf.backends.model_rank import FrozenRank
from openrlhf.config.supervised import DPOConfig, KTOConfig
from openrlhf.data.cache import arrays_digest, digest
from openrlhf.data.store import Samples
from openrlhf.files import cache_folder
from openrlhf.loop.supervised.task import Parts, Task
from openrlhf.models.backbone import RowModel
from openrlhf.models.configurations import model_digest
from openrlhf.models.lora import disabled_adapters, has_adapters
from openrlhf.models.policy import PolicyModel
from openrlhf.models.tokenizers import check_same_vocabulary, load_run_tokenizer, load_tokenizer
from openrlhf.observability.waits import waiting
from openrlhf.rows import PackedRow
from openrlhf.training.models import load_language_model
from openrlhf.training.objectives.reference import Reference
from openrlhf.training.precompute import cached_array, values_of_items

ConfigT = TypeVar("ConfigT", DPOConfig, KTOConfig)

REF_FLAG = "--ref.model_name_or_path"


class ComparedTask(Task[ConfigT]):
    """A task that trains a policy against a reference model."""

    def models(self) -> dict[str, str]:
        return {**super().models(), REF_FLAG: reference_path(self.config)}

    def check_models(self) -> None:
        """Also refuses a reference whose vocabulary differs from the policy's."""
        super().check_models()
        path = reference_path(self.config)
        if path != self.config.model.model_name_or_path:
            own, other = load_run_tokenizer(self.config), load_tokenizer(path, flag=REF_FLAG)
            check_same_vocabulary(own, other, REF_FLAG, path)


def reference_path(config: DPOConfig | KTOConfig) -> str:
    """Returns the folder or hub name of the reference; by default that of the policy."""
    return config.ref.model_name_or_path or config.model.model_name_or_path


def reference_of(config: DPOConfig | KTOConfig, parts: Parts, *, read: Callable) -> Reference | None:
    """Returns a function row -> (A,) log-probs of the reference. With `ref.precompute_enable`, returns None
    and adds the precomputed values `read(model, row)` to the items of the run's datasets."""
    path, ref = reference_path(config), config.ref
    is_policy = path == config.model.model_name_or_path

    def load() -> FrozenRank:
        with waiting("loading the reference model", key=path):
            build = lambda: PolicyModel(load_language_model(config, path, REF_FLAG))
            return parts.frozen(build, ref.offload)

    if not ref.precompute_enable and is_policy and has_adapters(parts.engine.module.model):
        return without_adapters(parts.engine.module)
    if not ref.precompute_enable:
        reference = load()
        return lambda row: reference(row).log_probs
    # Before the first step the policy equals the reference.
    model = cache(lambda: parts.engine if is_policy else load())

    def compute(dataset: Samples) -> np.ndarray:
        batches = parts.lay_out(dataset, batch_size=config.train.batch_size, shuffle=False)
        return values_of_items(model(), batches, read, len(dataset), parts.mesh)

    parts.attach_reference(
        lambda dataset: _cached_log_probs(config, path, dataset, partial(compute, dataset))
    )
    return None


def _cached_log_probs(
    config: DPOConfig | KTOConfig, path: str, dataset: Samples, compute: Callable[[], np.ndarray]
) -> np.ndarray:
    """Returns reference log-probs (n, 2) from the data cache if it has them for the same model, precision,
    tokens and images. Otherwise computes them."""
    data, ds = config.data, config.ds
    if not data.cache_enable:
        return compute()
    folder = Path(data.cache_dir).expanduser() if data.cache_dir else cache_folder()
    precision = (ds.param_dtype, ds.load_in_4bit)
    read = [arrays_digest(dataset.arrays()), dataset.images_digest]
    key = digest([model_digest(path, REF_FLAG), *read, precision])
    return cached_array(folder / "reference" / f"{key}.npy", compute)


def without_adapters(policy: RowModel) -> Reference:
    """Returns a function row -> (A,) log-probs of the policy with its adapters disabled. No second copy of
    the model is needed."""

    def log_probs(row: PackedRow) -> Tensor:
        with torch.no_grad(), disabled_adapters(policy.model):
            return policy(row).log_probs

    return log_probs
