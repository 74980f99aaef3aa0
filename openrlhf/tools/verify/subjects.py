"""Builds the trained model of a command for `openrlhf verify`: in one process, on a few rows of the run's own
data, with a learning rate of 0 or for short runs."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from openrlhf.api import (
    DEVICE_TYPE,
    MODEL_FLAG,
    Batch,
    ComparedTask,
    ErrorCode,
    Mesh,
    Metrics,
    PolicyWorker,
    PPOConfig,
    RMConfig,
    Sample,
    SupervisedConfig,
    TrainedRank,
    UsageError,
    build_prompt_datasets,
    check_reward_model,
    encode_prompts,
    load_config,
    load_reward_model,
    load_run_tokenizer,
    load_tokenizer,
    model_folder,
    reference_path,
    release_cached_memory,
    seed_everything,
    with_values,
)
from openrlhf.api import SupervisedRun as Run
from openrlhf.api import SupervisedTask as Task
from openrlhf.tools.reference.objectives import Reference
from openrlhf.tools.reference.outputs import plain_log_probs, plain_score
from openrlhf.tools.verify.layouts import (
    LAYOUTS,
    Chosen,
    LayoutStep,
    objective_of_rows,
    step_with_gradients,
    steps,
)
from openrlhf.tools.verify.plain import PlainOutput

AT_REST = {
    "train.on_nonfinite": "stop",
    "ds.lora.dropout": 0.0,
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "ckpt.load_enable": False,
    "ckpt.fork_from": None,
    "ckpt.save_steps": -1,
    "logger.trackers": None,
    "logger.tensorboard_dir": None,
}
"""Values of flags with which a run needs one process and writes nothing, and its steps change no random
state."""
LEARNING_RATE = 1e-3
"""Learning rate of the short runs. The run's own would hardly move the weights."""
STEPS = 4
"""Optimizer steps of a short run."""
OPTIMIZER_AT_REST = {"adam.lr": 0.0, "adam.weight_decay": 0.0, "muon.lr": 0.0, "max_norm": 0.0}


@dataclass(kw_only=True)
class Running:
    """The trained model of a command in this process."""

    engine: TrainedRank
    steps: Callable[[Iterable[str]], Iterator[LayoutStep]]
    """Function from names of layouts to their optimizer steps."""
    learn: Callable[[int, int], list[Metrics]]
    """Function (start, stop) that takes the optimizer steps in this range with the run's own objective, and
    returns their metrics."""
    items: Any
    """Items of the dataset, or the batch of a policy, on which steps are taken."""

    def forget(self) -> None:
        """Drops the model, because the name that a `with` block gives this object outlives the block."""
        self.engine.close()
        del self.engine, self.steps, self.learn


@dataclass(kw_only=True)
class Size:
    """Amount of data that a verification uses."""

    rows: int = 8
    """Rows of the dataset, or samples of a policy."""
    tokens: int = 512
    """Maximum number of tokens of a row. Longer rows are used if too few are that short."""


class Subject:
    """A command whose trained model is verified."""

    config: Any
    path: str
    """Name or folder of the model that is trained."""
    notes: dict[str, str]
    """Remarks for the report, by topic."""
    size: Size
    learning: dict[str, Any]
    """Values of flags in short runs: a learning rate above 0, and the run's own dropout and clipping."""

    def built(self, config: Any, held: ExitStack) -> Running:
        """Builds the model with its training backend. `held`: what is closed when it is freed."""
        raise NotImplementedError

    @contextmanager
    def running(self, dtype: str, *, learns: bool = False) -> Iterator[Running]:
        """Builds the model with its training backend in `dtype`, and frees it afterwards. `learns`: with
        the values `learning`, for a short run."""
        with ExitStack() as held:
            made = self.built(self.configured(dtype, learns), held)
            yield made
            made.forget()
        forget_engines()

    def configured(self, dtype: str, learns: bool) -> Any:
        """Returns the configuration with `dtype`, and with the values `learning` if the model learns."""
        return with_values(self.config, {"ds.param_dtype": dtype} | (self.learning if learns else {}))

    def output(self, entropy: bool, temperature: float) -> PlainOutput:
        return partial(plain_log_probs, temperature=temperature, entropy=entropy)

    def plain_model(self) -> Any:
        """Loads transformers' own model in float32, separately from the trainer's."""
        return language_model(self.path)

    def reference(self) -> Reference | None:
        return None

    @property
    def why_no_plain_model(self) -> str:
        """Reason why there is no comparison with a plain model; "" if there is one."""
        ds = self.config.ds
        if ds.lora.rank:
            return "the plain model has no adapters; layouts are compared with one another"
        if self.config.data.reads_images:
            return "the rows have images"
        return "weights are in 4 bits" if ds.load_in_4bit else ""


class SupervisedSubject(Subject):
    """The model of a supervised command."""

    def __init__(self, task_type: type[Task], config: SupervisedConfig, scratch: Path, size: Size) -> None:
        values = {
            **AT_REST,
            **OPTIMIZER_AT_REST,
            "model.dropout_enable": False,
            "data.cache_enable": False,
            "data.max_samples": min(config.data.max_samples, 8 * size.rows),
            "eval.dataset": None,
            "ckpt.output_dir": str(scratch / "output"),
            "ckpt.path": str(scratch / "checkpoints"),
        }
        if hasattr(config, "ref"):
            values["ref.precompute_enable"] = False
        self.learning = {
            "adam.lr": LEARNING_RATE,
            "max_norm": config.max_norm,
            "ds.lora.dropout": config.ds.lora.dropout,
            "model.dropout_enable": config.model.dropout_enable,
        }
        config = with_values(config, values)
        if isinstance(config, RMConfig):
            config = with_values(config, {"model.model_name_or_path": with_head(config, scratch / "scorer")})
        self.task_type, self.config, self.path = task_type, config, config.model.model_name_or_path
        self.size, self.notes = size, {}

    def built(self, config: Any, held: ExitStack) -> Running:
        run = Run(self.task_type(config), [], held)
        chosen = shortest(list(run.train_set.lengths), self.size)
        return Running(
            engine=run.engine,
            steps=partial(steps, run, indices=chosen),
            learn=partial(learned, run, Chosen(run.train_set, chosen)),
            items=[run.train_set[i] for i in chosen],
        )

    def output(self, entropy: bool, temperature: float) -> PlainOutput:
        if isinstance(self.config, RMConfig):
            return plain_score
        return super().output(entropy, temperature)

    def plain_model(self) -> Any:
        if not isinstance(self.config, RMConfig):
            return super().plain_model()
        config = load_config(self.path, MODEL_FLAG)
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_pretrained(
            model_folder(self.path), config=config, dtype=torch.float32, trust_remote_code=False
        )
        return model.to(DEVICE_TYPE)

    def reference(self) -> Reference | None:
        if not issubclass(self.task_type, ComparedTask):
            return None
        model = language_model(reference_path(self.config))

        def of(sample: Sample) -> torch.Tensor:
            with torch.no_grad():
                return plain_log_probs(model, sample).double()

        return of


def language_model(path: str) -> Any:
    folder = model_folder(path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return model.to(DEVICE_TYPE)


def with_head(config: RMConfig, folder: Path) -> str:
    """Returns the model's folder if it is a reward model. Else writes a copy of the language model with a new
    scalar head to `folder`, and returns that."""
    path, tokenizer = config.model.model_name_or_path, load_run_tokenizer(config)
    if Path(path).is_dir():
        try:
            check_reward_model(path, MODEL_FLAG, config.ds.value_head_prefix)
            return path
        except UsageError:
            pass  # a language model
    seed_everything(config.train.seed, deterministic=False)
    whole = with_values(config, {"ds.param_dtype": "fp32"})
    load_reward_model(whole, path, MODEL_FLAG, tokenizer=tokenizer).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class PolicySubject(Subject):
    """The policy of an RL run. Its samples are prompts of the dataset, each with two answers. The answers are
    pieces of other prompts, and advantages are random."""

    def __init__(self, config: PPOConfig, size: Size) -> None:
        at_rest = {f"actor.{key}": value for key, value in OPTIMIZER_AT_REST.items()}
        more = {"data.max_samples": min(config.data.max_samples, 8 * size.rows), "eval.dataset": None}
        more["algo.advantage.score_centering_top_k"] = 0  # answers are not sampled
        self.config = with_values(config, {**AT_REST, **at_rest, **more, "train.enable_ema": False})
        self.path, self.size, self.notes = config.actor.model_name_or_path, size, {}
        self.kept: Batch | None = None
        self.learning = {
            "actor.adam.lr": LEARNING_RATE,
            "actor.max_norm": config.actor.max_norm,
            "ds.lora.dropout": config.ds.lora.dropout,
        }
        self.notes["answers"] = "pieces of other prompts; advantages are random numbers"
        if config.algo.advantage.score_centering_top_k:
            self.notes["score centering"] = "left out: nothing sampled these answers"

    def built(self, config: Any, held: ExitStack) -> Running:
        worker = self.worker(config)
        batch = self.batch(worker)
        return Running(
            engine=worker.model,
            steps=partial(policy_steps, worker, batch),
            learn=partial(policy_learned, worker, batch),
            items=batch,
        )

    def worker(self, config: PPOConfig) -> PolicyWorker:
        ranks = int(os.environ.get("WORLD_SIZE") or 1)
        made = PolicyWorker(config, int(os.environ.get("RANK") or 0), Mesh(data=ranks))
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or 0)
        made.start(address, port, total_steps=2 * STEPS)
        return made

    def batch(self, worker: PolicyWorker) -> Batch:
        """Returns the batch of all checks. Its log-probs are derived from those of the first worker."""
        if self.kept is None:
            self.kept = with_columns(sampled(load_prompts(self.config, self.size), self.size.rows), worker)
        return self.kept


def learned(run: Run, items: Chosen, start: int, stop: int) -> list[Metrics]:
    """Takes the optimizer steps `start` to `stop` - 1 of a run with three steps an epoch on `items`."""
    prepare = objective_of_rows(run)
    mini_batches = run.lay_out(items, batch_size=-(-len(items) // 3), shuffle=True)
    return [
        run.engine.train_step(rows, prepare(rows))
        for rows in islice(mini_batches.endless(start), stop - start)
    ]


def policy_learned(worker: PolicyWorker, batch: Batch, start: int, stop: int) -> list[Metrics]:
    """Takes the optimizer steps `start` to `stop` - 1, on the even and the odd samples of a batch in turn."""
    objective = worker.objective(worker.config.algo.kl.init_coef)
    mini_batches = [list(range(len(batch)))[step % 2 :: 2] for step in range(start, stop)]
    return worker.train_steps(batch, mini_batches, objective)


def policy_steps(
    worker: PolicyWorker, batch: Batch, layouts: Iterable[str] = LAYOUTS
) -> Iterator[LayoutStep]:
    config, objective = worker.config, worker.objective(worker.config.algo.kl.init_coef)
    try:
        for layout in layouts:
            shuffle, changes = LAYOUTS[layout]
            worker.config = replace(config, train=replace(config.train, **changes))
            order = np.random.default_rng(0).permutation(len(batch)) if shuffle else range(len(batch))
            mine = [int(i) for i in order][worker.mesh.data_rank :: worker.mesh.data]
            rows = worker.rows(batch, mine)
            yield LayoutStep(layout, rows, objective, *step_with_gradients(worker.model, rows, objective))
    finally:
        worker.config = config


def sampled(prompts: list[list[int]], count: int) -> Batch:
    """Returns a batch of `count` samples, two for each prompt. Answers are pieces of other prompts."""
    used = prompts[: max(1, count // 2)]
    text = [token for prompt in reversed(prompts) for token in prompt]
    starts = [(37 * i) % max(1, len(text) - 40) for i in range(count)]
    answers = [text[start : start + 8 + (11 * i) % 24] for i, start in enumerate(starts)]
    log_probs = np.zeros(sum(map(len, answers)), np.float32)
    return join_batch([used[i % len(used)] for i in range(count)], answers, log_probs)


def join_batch(prompts: list[list[int]], answers: list[list[int]], log_probs: np.ndarray) -> Batch:
    """Joins each prompt and its answer to a sequence. `log_probs`: the engine's, (A,)."""
    pairs = list(zip(prompts, answers, strict=True))
    counts = np.array([len(answer) for answer in answers])
    return Batch(
        token_ids=np.concatenate([np.array([*prompt, *answer], np.int32) for prompt, answer in pairs]),
        action_mask=np.concatenate([np.arange(len(p) + len(a)) >= len(p) for p, a in pairs]),
        lengths=np.array([len(prompt) + len(answer) for prompt, answer in pairs]),
        num_actions=counts,
        rollout_log_probs=log_probs,
    )


def with_columns(batch: Batch, worker: PolicyWorker) -> Batch:
    """Adds log-probs near the policy's own, random advantages and returns, and prompts of two samples."""
    own, random = worker.forward(batch), np.random.default_rng(0)
    noise = lambda size: size * random.standard_normal(len(own)).astype(np.float32)
    return replace(
        batch,
        log_probs=own + noise(0.1),
        rollout_log_probs=own + noise(0.1),
        ref_log_probs=own + noise(0.3),
        advantages=noise(1.0),
        returns=noise(1.0),
        prompts=np.repeat(np.arange(len(batch)) // 2, batch.num_actions).astype(np.int32),
    )


def load_prompts(config: PPOConfig, size: Size) -> list[list[int]]:
    found, _, tokenizer = build_prompt_datasets(config)
    texts = [prompt.text for prompt in found.without_images]
    is_chat = config.data.apply_chat_template
    encoded = [list(ids) for ids in encode_prompts(texts, tokenizer, is_chat=is_chat)]
    return [encoded[i] for i in shortest([len(ids) for ids in encoded], size)]


def shortest(lengths: list[int], size: Size) -> list[int]:
    """Returns the indices of the first `size.rows` items of at most `size.tokens` tokens; if there are fewer,
    the indices of the shortest items."""
    fitting = [i for i, length in enumerate(lengths) if length <= size.tokens]
    if len(fitting) < size.rows:
        fitting = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(fitting[: size.rows])


def forget_engines() -> None:
    unset_hf_deepspeed_config()
    gc.collect()
    release_cached_memory()


def truncate_model(path: str, layers: int, folder: Path, flag: str) -> str:
    """Writes a copy of the model with only its first `layers` layers to `folder`, with its tokenizer. Returns
    the folder."""
    config = load_config(path, flag)
    text = config.get_text_config()
    whole = text.num_hidden_layers
    if layers > whole:
        problem = f"{path} has only {whole} layers; leave out the option to verify all of them"
        raise UsageError(ErrorCode.INVALID_VALUE, problem, flag="--layers", value=layers)
    text.num_hidden_layers = layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:layers])
    kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    model = kind.from_pretrained(model_folder(path, weights=True), config=config, dtype="auto")
    model.save_pretrained(folder)
    load_tokenizer(path, flag=flag).save_pretrained(folder)
    return str(folder)
