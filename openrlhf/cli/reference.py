"""The reference model of DPO and KTO."""

from collections.abc import Callable

from openrlhf.config.supervised import RefConfig


def check_reference(ref: RefConfig) -> None:
    """Raise ValueError for a reference that is not there."""
    from openrlhf.models.loading import check_model

    if ref.model_name_or_path:
        check_model(ref.model_name_or_path, "--ref.model_name_or_path")


def reference_of(run, ref: RefConfig, *, read: Callable) -> Callable | None:
    """row -> (A,) log-probs of the reference. None with `ref.precompute_enable`: then the datasets of `run`
    are given what `read(model, row)` says of each item."""
    from openrlhf.cli.supervised import load_language_model
    from openrlhf.engine.deepspeed_engine import FrozenModel
    from openrlhf.engine.reference import answers_of
    from openrlhf.models.lora import has_adapters
    from openrlhf.models.policy import PolicyModel

    path = ref.model_name_or_path or run.config.model.model_name_or_path
    is_policy = path == run.config.model.model_name_or_path

    def load() -> FrozenModel:
        return FrozenModel(
            lambda: PolicyModel(load_language_model(run.config, path, "--ref.model_name_or_path")),
            ds=run.config.ds,
            offload=ref.offload,
        )

    if not ref.precompute_enable and is_policy and has_adapters(run.engine.module.model):
        return without_adapters(run.engine.module)
    if not ref.precompute_enable:
        reference = load()
        return lambda row: reference(row).log_probs
    model = run.engine if is_policy else load()  # before its first step the policy is its own reference
    run.attach(lambda dataset: answers_of(model, run.in_order(dataset), read, len(dataset)))
    return None


def without_adapters(policy) -> Callable:
    """row -> (A,) log-probs of the model below the adapters: no second copy is needed."""
    import torch

    from openrlhf.models.lora import disabled_adapters

    def log_probs(row):
        with torch.no_grad(), disabled_adapters(policy.model):
            return policy(row).log_probs

    return log_probs
