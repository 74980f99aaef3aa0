"""Predicts a whole run, and suggests changes of flags with which it fits."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from openrlhf.api import ENGINE_ROLE as ENGINES
from openrlhf.api import (
    ITEM_BYTES,
    REWARD_FLAG,
    TEACHER_FLAG,
    Command,
    ErrorCode,
    ModelSize,
    PPOConfig,
    UsageError,
    compute_layout,
    flag_values,
    learner_size,
    model_size,
    resource_problems,
    to_words,
    with_values,
)
from openrlhf.api import described_layout as described
from openrlhf.tools.plan.batches import (
    SEQUENCES,
    Lengths,
    Setup,
    count_training_rows,
    estimate_lengths,
    ppo_batches,
    supervised_batches,
)
from openrlhf.tools.plan.hardware import Cluster
from openrlhf.tools.plan.memory import Demand, engine_cache, ppo_memory, supervised_memory
from openrlhf.tools.plan.time import Phase, ppo_time, step_seconds, supervised_time

Change = tuple[str, Any]
"""A flag's key and its new value."""
Remedy = tuple[Change, ...]
"""Changes that are made together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """Facts about the data that the user gave or that rows have; None for each that is unknown."""

    prompt: int | None = None
    """Mean tokens of a prompt."""
    response: int | None = None
    """Mean tokens of a response."""
    rows: int | None = None
    """Rows of the dataset."""

    @classmethod
    def of(cls, options: Namespace) -> Self:
        return cls(prompt=options.prompt_tokens, response=options.response_tokens, rows=options.rows)


@dataclass(frozen=True, kw_only=True)
class RunPlan(Setup):
    """The prediction of a run."""

    command: Command
    assumed: Assumed

    @cached_property
    def memory(self) -> list[Demand]:
        return supervised_memory(self) if self.layout is None else ppo_memory(self)

    @cached_property
    def time(self) -> list[Phase]:
        return supervised_time(self) if self.layout is None else ppo_time(self)

    @cached_property
    def starved(self) -> bool:
        """True if an engine's KV cache is too small for its longest sequence."""
        if self.layout is None:
            return False
        needed = self.sizes[ENGINES].kv_bytes(ITEM_BYTES[self.config.ds.param_dtype])
        needed *= (self.lengths.prompt + self.lengths.longest) / self.layout.roles[ENGINES].mesh.tensor
        return engine_cache(self) < needed

    @property
    def seconds(self) -> float:
        return step_seconds(self.config, self.time)

    @property
    def fits(self) -> bool:
        return all(demand.fits for demand in self.memory) and not self.starved

    @property
    def tightest(self) -> Demand:
        """The demand that comes closest to its limit."""
        return max(self.memory, key=lambda demand: demand.share / demand.limit)

    @property
    def slowest(self) -> Phase:
        return max(self.time, key=lambda phase: phase.seconds)

    @cached_property
    def suggestion(self) -> "tuple[list[Change], RunPlan] | None":
        """Changes of flags with which the run fits, and the plan with them; None if it fits, or if no changes
        suffice."""
        return None if self.fits else _suggest(self)


def plan_run(command: Command, config: Any, cluster: Cluster, assumed: Assumed) -> RunPlan:
    """Predicts a run. Raises UsageError if it needs more devices than the cluster has, if a model has no
    configuration, or if samples of the assumed lengths are longer than the flags allow."""
    data, layout = config.data, None
    if isinstance(config, PPOConfig):
        layout, sizes = compute_layout(config, described(cluster.gpus)), _sizes(config)
        longest = config.rollout.max_new_tokens
        lengths = estimate_lengths(data.max_len, longest, assumed.prompt, assumed.response)
        batches = ppo_batches(config, lengths, assumed.rows or count_training_rows(config))
    else:
        sequences, sizes = SEQUENCES.get(command.name, 1), _supervised_sizes(command, config)
        mean = assumed.response or max(1, data.max_len // 2)
        unknown = ("response",) * (assumed.response is None)
        lengths = Lengths(prompt=0, response=mean, longest=data.max_len, assumed=unknown)
        rows = assumed.rows or count_training_rows(config)
        batches = supervised_batches(config, cluster, lengths, rows, sequences=sequences)
    if lengths.total > data.max_len:
        flag = "--prompt_tokens" if assumed.response is None else "--response_tokens"
        text = f"a sample would have {lengths.total} tokens, more than --data.max_len {data.max_len}"
        raise UsageError(ErrorCode.TOO_LONG, text, flag=flag, value=assumed.response or assumed.prompt)
    return RunPlan(
        command=command,
        config=config,
        cluster=cluster,
        assumed=assumed,
        layout=layout,
        sizes=sizes,
        lengths=lengths,
        batches=batches,
    )


def _sizes(config: PPOConfig) -> dict[str, ModelSize]:
    """Returns the size of each role's model, for several reward models that of all together."""
    images, actor = config.reads_images, learner_size(config, "policy")
    sizes = {"actor": actor}
    for role in config.placements:
        if role == "critic":
            sizes[role] = learner_size(config, role)
        elif role == "ref":
            sizes[role] = actor
        elif role == "reward":
            models = [model_size(path, REWARD_FLAG, images=images).scorer() for path in config.reward.models]
            sizes[role] = _together(models)
        elif role == "teacher":
            sizes[role] = model_size(str(config.teacher.model_name_or_path), TEACHER_FLAG, images=images)
    return sizes | {ENGINES: actor}


def _together(sizes: Sequence[ModelSize]) -> ModelSize:
    """Returns the size of models in turn: the sum of their weights, and the activations of the largest."""
    counts = ("parameters", "embedding", "head", "experts", "linear")
    total: dict[str, Any] = {name: sum(getattr(size, name) for size in sizes) for name in counts}
    path = ", ".join(size.path for size in sizes)
    return replace(max(sizes, key=lambda size: size.parameters), path=path, **total)


def _supervised_sizes(command: Command, config: Any) -> dict[str, ModelSize]:
    images = config.data.reads_images
    path, sizes = config.model.model_name_or_path, {"model": learner_size(config, "policy")}
    if command.name in ("dpo", "kto"):
        own = config.ref.model_name_or_path
        # With adapters, the model without them is the reference.
        if not config.ref.precompute_enable and not (config.ds.lora.rank and not own):
            sizes["ref"] = model_size(own or path, "--ref.model_name_or_path", images=images)
    if command.name == "kd":
        path = config.teacher.model_name_or_path
        sizes["teacher"] = model_size(path, TEACHER_FLAG, images=images)
    return sizes


# ---- suggestions


def _suggest(plan: RunPlan) -> tuple[list[Change], RunPlan] | None:
    """Returns changes of flags with which the run fits, and the plan with them; None if no changes suffice.

    Tries the remedies in the order of their cost and keeps each that needs less memory, until the run fits.
    Then drops the ones that were not needed."""
    command, config, cluster, remedies = plan.command, plan.config, plan.cluster, list[Remedy]()
    assumed = replace(plan.assumed, rows=plan.batches.rows)

    def planned(some: Sequence[Remedy]) -> RunPlan | None:
        changed = with_values(config, dict(change for remedy in some for change in remedy))
        problems = [*command.problems(changed, {}), *command.placed(changed, {})]
        is_wrong = any(problem.fatal for problem in problems)
        if is_wrong or (
            isinstance(changed, PPOConfig) and resource_problems(changed, described(cluster.gpus))
        ):
            return None
        return plan_run(command, changed, cluster, assumed)

    for remedy in _remedies(config, cluster):
        if plan.fits:
            break
        better = planned([*remedies, remedy])
        if better and _need(better) < _need(plan):
            plan, remedies = better, [*remedies, remedy]
    if not plan.fits:
        return None
    for remedy in list(remedies):
        fewer = [other for other in remedies if other != remedy]
        without = planned(fewer)
        if without and without.fits:
            plan, remedies = without, fewer
    before = flag_values(config)
    changes = dict(change for remedy in remedies for change in remedy)
    return [(key, value) for key, value in changes.items() if value != before[key]], plan


def _need(plan: RunPlan) -> tuple[int, float]:
    """Returns a measure of the missing memory: the number of phases that do not fit, and the sum of all
    phases' shares of their devices."""
    wrong = sum(not demand.fits for demand in plan.memory) + plan.starved
    return wrong, sum(max(demand.share, demand.limit) for demand in plan.memory)


def _remedies(config: Any, cluster: Cluster) -> Iterator[Remedy]:
    rl = isinstance(config, PPOConfig)
    if rl and config.engines_colocated:
        yield (("vllm.enable_sleep", True),)
        yield (("ds.enable_sleep", True),)
    checkpointing = "actor" if rl else "model"
    yield ((f"{checkpointing}.gradient_checkpointing_enable", True),)
    if config.ds.bucket_mb is None:
        yield (("ds.bucket_mb", 100),)
    if config.train.dynamic_batch_enable:
        tokens = config.train.max_tokens_per_gpu // 2
        while tokens >= config.data.max_len:
            yield (("train.max_tokens_per_gpu", tokens),)
            tokens //= 2
    else:
        yield (("train.micro_batch_size", 1),)
        if rl:
            yield (("rollout.micro_batch_size", 1),)
    for role in ("ref", "reward", "teacher"):
        if hasattr(getattr(config, role, None), "offload"):
            yield ((f"{role}.offload", True),)
    yield (("ds.zero_stage", 3),)
    if rl:
        yield from _change_engines(config, cluster)
    for size in (2, 4, 8):
        if config.ds.ring_attn_size < size <= cluster.devices:
            yield (("ds.ring_attn_size", size),)
    yield (("ds.activation_offload", True),)
    asleep = (("ds.enable_sleep", False),) if rl else ()
    yield (*asleep, ("ds.adam_offload", True))


def _change_engines(config: PPOConfig, cluster: Cluster) -> Iterator[Remedy]:
    gpus = config.num_engines * config.vllm.num_gpus
    for size in (2, 4, 8):
        if config.vllm.tensor_parallel_size < size <= cluster.per_node:
            engines = max(1, gpus // (size * config.vllm.pipeline_parallel_size))
            counted = (("vllm.num_engines", engines),) if config.vllm.num_engines is not None else ()
            yield ("vllm.tensor_parallel_size", size), *counted
    for share in (0.85, 0.7, 0.6, 0.5):
        if share < config.vllm.gpu_memory_utilization:
            yield (("vllm.gpu_memory_utilization", share),)


def spelled(changes: Sequence[Change]) -> str:
    words = ((f"--{key}", *(() if value is True else to_words(value))) for key, value in changes)
    return " ".join(word for flag in words for word in flag)


# ---- what binds


ADVICE: Mapping[str, Callable[[Any], str]] = {
    "KV cache": lambda c: "a larger --vllm.gpu_memory_utilization or --vllm.tensor_parallel_size",
    "the longest response": lambda c: (
        "--train.async_enable overlaps sampling with training; --rollout.max_new_tokens limits responses"
    ),
    "memory": lambda c: (
        "a smaller --vllm.tensor_parallel_size with more --vllm.num_engines, or " * (c.vllm.num_gpus > 1)
        + "--train.async_enable on more GPUs, which samples while the models train"
    ),
    "prefill": lambda c: "--vllm.enable_prefix_caching computes each prompt once for all of its samples",
    "communication of ZeRO": lambda c: (
        "longer rows (--train.dynamic_batch_enable --train.max_tokens_per_gpu)"
        + (", --ds.zpg within a node, or --ds.zero_stage 2" if c.ds.zero_stage == 3 else "")
    ),
    "link to the host": lambda c: "more GPUs, or no offloading if the run fits without it",
    "links between devices": lambda c: "--vllm.lora_sync adapter with LoRA; otherwise more steps per sync",
    "CPU memory": lambda c: "--ds.enable_sleep instead of --ds.adam_offload, if the run fits with it",
}
"""Bottleneck of a phase -> advice with the flags that relieve it."""


def advice(plan: RunPlan) -> str:
    config, phase = plan.config, plan.slowest
    if not plan.cluster.kind.on_gpu:
        return "fewer or shorter samples, a smaller model, or a machine with GPUs"
    if phase.bound in ADVICE:
        return ADVICE[phase.bound](config)
    section = "actor" if isinstance(config, PPOConfig) else "model"
    if "update" in phase.name and getattr(config, section).gradient_checkpointing_enable:
        flag = f"--{section}.no_gradient_checkpointing_enable"
        return f"more GPUs; {flag} saves a quarter of this time if the memory suffices"
    return "more GPUs"
