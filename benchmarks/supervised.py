"""Real tokens per second and peak memory of SFT, RM, DPO and KTO, in several ways on the same model and data.

ours              DeepSpeedEngine.train_step over packed rows, as in the train_* commands
bare              a PyTorch loop over the same rows and attention: logits and cross-entropy, no DeepSpeed
padded            a PyTorch loop over padded batches of a plain transformers model (SFT)
padded-sorted     the same with the samples of a step sorted by length and split in four (SFT)
trl               TRL's trainer as it comes: padded batches
trl-grouped       TRL with batches of samples of about the same length, which KTO does not support
trl-padding-free  TRL with the samples of a batch end to end, which only SFT supports

The reference model of DPO and KTO runs in every step, or, for names with `-precomputed`, once before the
first step, which is not timed. TRL runs without gradient checkpointing, like all others.

Each way has a process of its own, and works while all others wait. A round is one pass over the data by every
way, in random order, so load on the machine meets all of them; trust the ratios, not the absolute figures.
Ratios of CPU time hold on a busy machine, too.
The time includes making rows or batches. All ways start from the same weights, and the first losses of ours
and bare must agree; trl-grouped begins with other samples. Peak memory is counted above the process's memory
before the model was built: weights, gradients, optimizer states and activations.

    python benchmarks/supervised.py --model tiny
    python benchmarks/supervised.py --model small --tasks sft --vocab 151936 --rows 32
    python benchmarks/supervised.py --model a/folder/with/SmolLM2-135M --tasks sft dpo --rows 8 --batch_size 4
"""

import openrlhf  # noqa: F401  first: it repairs imports of CUDA builds

# isort: split
import argparse
import gc
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3ForSequenceClassification,
)

from openrlhf.backends.deepspeed.engine import DeepSpeedEngine, DeepSpeedFrozen
from openrlhf.backends.distributed import ProcessMesh, current_device, init_distributed, leave_distributed
from openrlhf.config.sections import AdamConfig, DeepSpeedConfig, OptimConfig
from openrlhf.data.batches import MiniBatches
from openrlhf.device import DEVICE_TYPE
from openrlhf.models.attention import PACKED, packing_kwargs
from openrlhf.models.policy import PolicyModel
from openrlhf.models.scorer import ScoreModel
from openrlhf.rows import PackedRow, Pair, PairRow, Sample, UnpairedExample, UnpairedRow
from openrlhf.tasks.tiny_model import tiny_model
from openrlhf.training.objectives.dpo import DPOObjective, pair_log_probs
from openrlhf.training.objectives.kto import KTOObjective, MismatchedLogRatio, unpaired_log_probs
from openrlhf.training.objectives.rm import RewardObjective
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.training.precompute import values_of_items
from openrlhf.types import not_none

SIZES = {
    "tiny": {"hidden_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2},
    "small": {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4},
    "medium": {"hidden_size": 1024, "num_layers": 24, "num_heads": 32, "num_kv_heads": 8},
}
VOCABULARIES = {"tiny": 368, "small": 4096, "medium": 32768}
PRECISION = "bf16" if DEVICE_TYPE == "cuda" else "fp32"
DTYPE = torch.bfloat16 if DEVICE_TYPE == "cuda" else torch.float32
TOLERANCE = 2e-2 if DEVICE_TYPE == "cuda" else 1e-4
"""Largest difference between the first losses of ours and bare."""
LEARNING_RATE = 1e-4
MAX_NORM = 1.0
BETA = 0.1
MAX_LEN = 1024
SPLITS = 4
"""Micro-batches of a step in `padded-sorted`."""
PAD, EOS = "<pad>", "<eos>"


FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["openrlhf.backends.deepspeed.engine"]
PRELOADED += [f"trl.trainer.{task}_trainer" for task in ("sft", "reward", "dpo", "kto") if find_spec("trl")]
"""Modules that every process imports first, so that imports take time once and count for no peak of
memory."""


class Pass(NamedTuple):
    """One pass over the data."""

    seconds: float
    first_loss: float
    cpu: float
    """CPU seconds of the process."""
    peak: float = 0.0
    """Peak memory of all passes so far, MiB."""


Way = Callable[[], Pass]
Build = Callable[[], Way]


class Text(NamedTuple):
    """Token ids of a sample. Answers end with the end-of-sequence token; SFT and KTO know only the first
    one."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Options that all ways of a task share."""

    options: argparse.Namespace

    @cached_property
    def texts(self) -> list[Text]:
        """Random tokens. A prompt and an answer together have a lognormal length (median 100, mean 128), and
        a quarter of it is the prompt's."""
        rng = random.Random(0)
        tokens = lambda count: [rng.randrange(2, self.vocab_size) for _ in range(count)]
        length = lambda: min(MAX_LEN, max(8, round(rng.lognormvariate(4.6, 0.7))))
        texts = []
        for _ in range(self.options.rows):
            whole, other = length(), length()
            of_prompt = whole // 4
            of_answers = (max(4, total - of_prompt) for total in (whole, other))
            prompt, *answers = tokens(of_prompt), *([*tokens(count - 1), 1] for count in of_answers)
            texts.append(Text(prompt, *answers))
        return texts

    @property
    def vocab_size(self) -> int:
        model = self.options.model
        known = VOCABULARIES.get(model) or AutoConfig.from_pretrained(model).vocab_size
        return self.options.vocab or known

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokenizer with a word for each token id: its number."""
        words = {PAD: 0, EOS: 1} | {str(i): i for i in range(2, self.vocab_size)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)

    def language_model(self, seed: int = 0) -> Any:
        """Builds a model of random weights, or reads a folder, where `seed` shifts the head's weights."""
        shape = SIZES.get(self.options.model)
        if shape is not None:
            model: Any = tiny_model(self.tokenizer, seed=seed, max_len=4 * MAX_LEN, **shape)
            return model.to(DTYPE)
        model = AutoModelForCausalLM.from_pretrained(self.options.model, dtype=DTYPE)
        with torch.no_grad():
            model.get_output_embeddings().weight += 1e-3 * seed
        return model

    def scorer(self) -> Any:
        config = self.language_model().config
        config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: Any = Qwen3ForSequenceClassification(config)
        return model.to(DTYPE)


@dataclass(frozen=True, kw_only=True)
class Task:
    unit: str
    examples: Callable[[Sequence[Text], int], list]
    """Function (texts, batch size) -> the package's examples."""
    collate: Callable[[list], Any]
    num_tokens: Callable[[Any], int]
    """Number of tokens of one example, without padding and mismatched answers."""
    objective: Callable[[Any], Any]
    """Function (reference or None) -> the package's objective."""
    bare_losses: Callable[..., Iterator[Tensor]]
    """Function (model, reference or None, the rows of a step) -> each row's share of the loss."""
    trl: str
    """Name in `trl.{trl}Trainer` and `trl.{trl}Config`."""
    columns: Callable[[Text, int], dict]
    """Function (text, index) -> a row of TRL's dataset."""
    read: Callable | None = None
    """Function (model, row) -> (P, 2) log-probs of the reference, for tasks with one."""
    is_scorer: bool = False


def main() -> None:
    options = parse_options()
    FORKSERVER.set_forkserver_preload(PRELOADED)
    describe(Setting(options=options))
    for task in options.tasks:
        benchmark(task, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny", help=f"{', '.join(SIZES)}, or the folder of a causal language model"
    )
    parser.add_argument("--vocab", type=int, help="size of the vocabulary (default: the model's own)")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument(
        "--modes", nargs="+", help="ways to run, with those they are compared with (default: all)"
    )
    parser.add_argument("--rows", type=int, default=256, help="samples or pairs of a pass over the data")
    parser.add_argument("--batch_size", type=int, default=16, help="samples or pairs of an optimizer step")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--zero_stage", type=int, default=0)
    return parser.parse_args()


def benchmark(name: str, options: argparse.Namespace) -> None:
    workers = {way: Worker(name, way, options) for way in ways(name, Setting(options=options))}
    try:
        passes = measure(workers, options.rounds)
    finally:
        for worker in workers.values():
            worker.stop()
    report(name, options, passes)
    check_losses(name, {way: runs[0].first_loss for way, runs in passes.items()})


def check_losses(name: str, first_losses: dict[str, float]) -> None:
    for way, loss in first_losses.items():
        if way.startswith("bare") and abs(loss - first_losses[rival(way)]) > TOLERANCE:
            sys.exit(
                f"error: {name}: the first losses of {way} and {rival(way)} differ: not the same training"
            )


def ways(name: str, setting: Setting) -> dict[str, Build]:
    """Returns functions that build the ways of doing a task."""
    task, modes = TASKS[name], setting.options.modes
    found: dict[str, Build] = {}
    for suffix, precomputed in {"": False, "-precomputed": True}.items():
        if precomputed and task.read is None:
            continue
        found[f"ours{suffix}"] = lambda x=precomputed: ours(task, setting, precomputed=x)
        found[f"bare{suffix}"] = lambda x=precomputed: bare(task, setting, precomputed=x)
        extra = {"precompute_ref_log_probs": True} if precomputed else {}
        found[f"trl{suffix}"] = lambda extra=extra: trl(task, setting, **extra)
        if name != "kto":
            grouped = extra | {"train_sampling_strategy": "group_by_length"}
            found[f"trl-grouped{suffix}"] = lambda grouped=grouped: trl(task, setting, **grouped)
    if name == "sft":
        found["trl-padding-free"] = lambda: trl(task, setting, padding_free=True, max_length=None)
        found["padded"] = lambda: padded(setting, is_sorted=False)
        found["padded-sorted"] = lambda: padded(setting, is_sorted=True)
    wanted = {way for mode in modes or found for way in (mode, rival(mode))}
    return {way: build for way, build in found.items() if way in wanted}


def rival(way: str) -> str:
    """Returns the way of the package that this way is compared with: the one with the same use of the
    reference."""
    return "ours-precomputed" if way.endswith("-precomputed") else "ours"


def measure(workers: dict[str, "Worker"], rounds: int) -> dict[str, list[Pass]]:
    """Returns a first pass that warms up, and the passes of all rounds."""
    passes = {name: [worker.run()] for name, worker in workers.items()}
    names, rng = list(workers), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(names)
        for name in names:
            passes[name].append(workers[name].run())
    return passes


class Worker:
    """One way of doing a task, in a process of its own."""

    def __init__(self, task: str, way: str, options: argparse.Namespace) -> None:
        self.name, (self.connection, theirs) = f"{task} {way}", FORKSERVER.Pipe()
        self.process = FORKSERVER.Process(target=serve, args=(theirs, task, way, options), daemon=True)
        self.process.start()
        theirs.close()

    def run(self) -> Pass:
        try:
            self.connection.send("again")
            return self.connection.recv()
        except (EOFError, BrokenPipeError):
            sys.exit(f"error: {self.name} failed, see above")

    def stop(self) -> None:
        self.connection.close()
        self.process.join()


def serve(connection: Connection, task: str, way: str, options: argparse.Namespace) -> None:
    """Builds a way, then makes a pass whenever it is asked to."""
    torch.set_num_threads(options.threads)
    be_quiet()
    if not way.startswith("trl"):  # TRL would wrap its model for the group
        init_distributed()
    setting = Setting(options=options)
    build = ways(task, setting)[way]
    memory = Memory()
    run = build()
    memory.reset_peak()
    try:
        while connection.recv():
            connection.send(run()._replace(peak=memory.peak()))
    except EOFError:  # the benchmark needs no more passes
        leave_distributed()


def be_quiet() -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    import datasets

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


class Memory:
    """Peak memory over what this process holds when the object is made, MiB."""

    def __init__(self) -> None:
        gc.collect()
        self.before = self._read("VmRSS")

    def reset_peak(self) -> None:
        """Forgets the memory that only building needed."""
        gc.collect()
        if DEVICE_TYPE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        if DEVICE_TYPE == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return self._read("VmHWM") - self.before

    def _read(self, field: str) -> float:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith(f"{field}:")) / 1024


# Ours


def ours(task: Task, setting: Setting, *, precomputed: bool) -> Way:
    options = setting.options
    engine = DeepSpeedEngine(
        lambda: ScoreModel(packed(setting.scorer())) if task.is_scorer else policy(setting),
        optim=OptimConfig(adam=AdamConfig(lr=LEARNING_RATE), lr_scheduler="constant", max_norm=MAX_NORM),
        ds=DeepSpeedConfig(zero_stage=options.zero_stage, param_dtype=PRECISION),
        total_steps=1,
    )
    mini_batches = lay_out_mini_batches(task, setting, precomputed=precomputed)
    objective = task.objective(None if precomputed or task.read is None else frozen_log_probs(setting))

    def step(rows: list) -> float:
        chosen = objective
        if isinstance(objective, KTOObjective):
            log_ratio = engine.evaluate(rows, MismatchedLogRatio(reference=objective.reference))["log_ratio"]
            chosen = replace(objective, kl=max(0.0, log_ratio))
        metrics = engine.train_step(rows, chosen)
        return next(value for name, value in metrics.items() if name.endswith("/loss"))

    return lambda: timed(step, mini_batches)


def lay_out_mini_batches(task: Task, setting: Setting, *, precomputed: bool) -> MiniBatches:
    examples = task.examples(setting.texts, setting.options.batch_size)
    mini_batches = lay_out(task, setting, examples)
    if precomputed:
        answers = values_of_items(
            frozen(setting), mini_batches, not_none(task.read), len(examples), ProcessMesh()
        )
        known = torch.from_numpy(answers)
        examples = [replace(e, ref_log_probs=x) for e, x in zip(examples, known, strict=True)]
        mini_batches = lay_out(task, setting, examples)
    return mini_batches


def lay_out(task: Task, setting: Setting, examples: list) -> MiniBatches:
    return MiniBatches(
        Examples(examples, [task.num_tokens(example) for example in examples]),
        task.collate,
        batch_size=setting.options.batch_size,
        max_tokens=setting.options.tokens,
        data_rank=0,
        data_size=1,
        seed=0,
        shuffle=False,
    )


class Examples(list):
    def __init__(self, examples: list, lengths: Sequence[int]) -> None:
        super().__init__(examples)
        self.lengths = lengths

    def sequences(self, i: int) -> NoReturn:
        raise NotImplementedError("rows are laid by lengths alone")


def frozen_log_probs(setting: Setting) -> Callable[[PackedRow], Tensor]:
    reference = frozen(setting)
    return lambda row: reference(row).log_probs


def frozen(setting: Setting) -> DeepSpeedFrozen:
    """Builds the reference with other weights than the policy's, so that the first losses depend on it."""
    ds = DeepSpeedConfig(zero_stage=setting.options.zero_stage, param_dtype=PRECISION)
    return DeepSpeedFrozen(lambda: policy(setting, seed=1), ds=ds, offload=False)


def policy(setting: Setting, seed: int = 0) -> PolicyModel:
    return PolicyModel(packed(setting.language_model(seed)))


def packed(model: Any) -> Any:
    """Makes the model read packed rows."""
    model.set_attn_implementation(PACKED)
    return model


def timed(step: Callable[[Any], float], batches) -> Pass:
    start, started = time.perf_counter(), time.process_time()
    losses = [step(batch) for batch in (batches.epoch(0) if isinstance(batches, MiniBatches) else batches())]
    seconds, cpu = time.perf_counter() - start, time.process_time() - started
    return Pass(seconds, losses[0], cpu)  # the loss is a number, so the device has finished


# A PyTorch loop over packed rows


def bare(task: Task, setting: Setting, *, precomputed: bool) -> Way:
    mini_batches = lay_out_mini_batches(task, setting, precomputed=precomputed)
    model = packed(setting.scorer() if task.is_scorer else setting.language_model())
    model = model.to(current_device()).train()
    reference = None
    if task.read is not None and not precomputed:
        reference = packed(setting.language_model(seed=1)).to(current_device()).eval()
    optimizer = adamw(model)

    def step(rows: list) -> float:
        total = torch.zeros((), device=current_device())
        for loss in task.bare_losses(model, reference, [row.to(current_device()) for row in rows]):
            loss.backward()
            total += loss.detach()
        update(model, optimizer)
        return total.item()

    return lambda: timed(step, mini_batches)


def sft_losses(model, reference, rows: list[PackedRow]) -> Iterator[Tensor]:
    count = sum(int(row.action_mask.sum()) for row in rows)
    for row in rows:
        yield -token_log_probs(model, row).sum() / count


def rm_losses(model, reference, rows: list[PairRow]) -> Iterator[Tensor]:
    count = sum(len(row.margins) for row in rows)
    for pairs in rows:
        row = pairs.row
        hidden = model.model(**packed_inputs(row)).last_hidden_state[0]
        last = torch.tensor(row.lengths, device=hidden.device).cumsum(0) - 1
        scores = model.score(hidden[last]).float()
        yield -F.logsigmoid(scores[::2] - scores[1::2]).sum() / count


def dpo_losses(model, reference, rows: list[PairRow]) -> Iterator[Tensor]:
    count = sum(len(row.margins) for row in rows)
    for pairs in rows:
        ratios = log_ratios(model, reference, pairs.row, pairs.ref_log_probs)
        yield -F.logsigmoid(BETA * (ratios[::2] - ratios[1::2])).sum() / count


def kto_losses(model, reference, rows: list[UnpairedRow]) -> Iterator[Tensor]:
    count = sum(len(row.desirable) for row in rows)
    with torch.no_grad():
        mismatched = [log_ratios(model, reference, row.mismatched, row.ref_mismatched) for row in rows]
    kl = (torch.cat(mismatched).sum() / count).clamp(min=0)
    for row in rows:
        ratios = log_ratios(model, reference, row.row, row.ref_log_probs)
        gain = BETA * (ratios - kl)
        yield (1 - F.sigmoid(gain.where(row.desirable, -gain))).sum() / count


def log_ratios(model, reference, row: PackedRow, known: Tensor | None) -> Tensor:
    """Returns the (B,) log-prob of each answer under the policy less that under the reference."""
    if known is None:
        with torch.no_grad():
            known = answer_log_probs(reference, row)
    return answer_log_probs(model, row) - known


def answer_log_probs(model, row: PackedRow) -> Tensor:
    return torch.stack([x.sum() for x in token_log_probs(model, row).split(row.lengths)])


def token_log_probs(model, row: PackedRow) -> Tensor:
    """Returns (N,) log-probs, 0 for tokens without a loss."""
    logits = model(**packed_inputs(row)).logits[0, :-1].float()
    labels = row.token_ids.where(row.action_mask, -100)[1:]
    return F.pad(-F.cross_entropy(logits, labels, reduction="none"), (1, 0))


def packed_inputs(row: PackedRow) -> dict[str, Any]:
    return {
        "input_ids": row.token_ids[None],
        "position_ids": row.position_ids[None],
        "use_cache": False,
        **packing_kwargs(PACKED, row.lengths, row.token_ids.device),
    }


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    adam = AdamConfig()
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=adam.betas, eps=adam.eps, weight_decay=0.0, fused=True
    )


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


# A PyTorch loop over padded batches


def padded(setting: Setting, *, is_sorted: bool) -> Way:
    samples, size = sft_samples(setting.texts, 0), setting.options.batch_size
    model = setting.language_model().to(current_device()).train()
    optimizer = adamw(model)

    def step(batch: list[Sample]) -> float:
        total = torch.zeros((), device=current_device())
        count = sum(sample.num_actions for sample in batch)
        micro_size = size
        if is_sorted:
            batch, micro_size = sorted(batch, key=lambda sample: sample.length), max(1, size // SPLITS)
        for k in range(0, len(batch), micro_size):
            loss = model(**padded_inputs(batch[k : k + micro_size]), num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        update(model, optimizer)
        return total.item()

    return lambda: timed(step, lambda: (samples[k : k + size] for k in range(0, len(samples), size)))


def padded_inputs(samples: Sequence[Sample]) -> dict[str, Any]:
    labels = [sample.token_ids.where(sample.action_mask, -100) for sample in samples]
    tensors = {
        "input_ids": pad_sequence([s.token_ids for s in samples], batch_first=True),
        "attention_mask": pad_sequence([torch.ones(s.length, dtype=torch.long) for s in samples], True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }
    return {name: x.to(current_device()) for name, x in tensors.items()} | {"use_cache": False}


# TRL


def trl(task: Task, setting: Setting, **settings) -> Way:
    import trl as library
    from datasets import Dataset
    from transformers import PrinterCallback

    model = setting.scorer() if task.is_scorer else setting.language_model()
    kernel = "flash_attention_2" if DEVICE_TYPE == "cuda" and find_spec("flash_attn") else "sdpa"
    model.set_attn_implementation(kernel)
    models: dict[str, Any] = {"model": model}
    if task.read is not None:
        models["ref_model"] = setting.language_model(seed=1)
        models["ref_model"].set_attn_implementation(kernel)
    columns = [task.columns(text, i) for i, text in enumerate(setting.texts)]
    stopwatch = new_stopwatch()
    trainer = getattr(library, f"{task.trl}Trainer")(
        **models,
        args=getattr(library, f"{task.trl}Config")(**trl_settings(setting, task) | settings),
        train_dataset=Dataset.from_list(columns),
        processing_class=setting.tokenizer,
        callbacks=[stopwatch],
    )
    trainer.remove_callback(PrinterCallback)
    if settings.get("precompute_ref_log_probs"):
        trainer.ref_model = None
    del models

    def run() -> Pass:
        trainer.train()
        return Pass(stopwatch.end - stopwatch.begin, stopwatch.first_loss, stopwatch.cpu)

    return run


def trl_settings(setting: Setting, task: Task) -> dict[str, Any]:
    adam = AdamConfig()
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": setting.options.batch_size,
        "num_train_epochs": 1,
        "max_length": MAX_LEN + 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": adam.betas[0],
        "adam_beta2": adam.betas[1],
        "adam_epsilon": adam.eps,
        "max_grad_norm": MAX_NORM,
        "train_sampling_strategy": "sequential",  # the texts are in random order
        "gradient_checkpointing": False,
        "bf16": PRECISION == "bf16",
        "use_cpu": DEVICE_TYPE == "cpu",
        "logging_first_step": True,
        "logging_steps": 10**9,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **({"beta": BETA} if task.read is not None else {}),
    }


def new_stopwatch():
    """Returns a callback with the `begin` and `end` of the steps of the last run, its `cpu` seconds and its
    `first_loss`."""

    class Stopwatch(transformers.TrainerCallback):
        begin = end = first_loss = started = cpu = 0.0

        def on_train_begin(self, args, state, control, **kwargs):
            self.begin, self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            if DEVICE_TYPE == "cuda" and state.global_step == state.max_steps:
                torch.cuda.synchronize()
            self.end, self.cpu = time.perf_counter(), time.process_time() - self.started

        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.global_step == 1 and logs and "loss" in logs:
                self.first_loss = float(logs["loss"])

    return Stopwatch()


# Tasks


def sft_samples(texts: Sequence[Text], batch_size: int) -> list[Sample]:
    return [sample_of(text.prompt, text.chosen) for text in texts]


def dpo_pairs(texts: Sequence[Text], batch_size: int) -> list[Pair]:
    return [
        Pair(chosen=sample_of(t.prompt, t.chosen), rejected=sample_of(t.prompt, t.rejected)) for t in texts
    ]


def rm_pairs(texts: Sequence[Text], batch_size: int) -> list[Pair]:
    return [
        Pair(chosen=last_token(pair.chosen), rejected=last_token(pair.rejected))
        for pair in dpo_pairs(texts, batch_size)
    ]


def kto_answers(texts: Sequence[Text], batch_size: int) -> list[UnpairedExample]:
    """Returns examples whose mismatched answers are those of the step's previous prompts, as in TRL."""
    found = []
    for k in range(0, len(texts), batch_size):
        step = texts[k : k + batch_size]
        found += [
            UnpairedExample(
                sample=sample_of(text.prompt, text.chosen),
                mismatched=sample_of(text.prompt, step[i - 1].chosen),
                desirable=(k + i) % 2 == 0,
            )
            for i, text in enumerate(step)
        ]
    return found


def sample_of(prompt: list[int], answer: list[int]) -> Sample:
    tokens = torch.tensor(prompt + answer)
    return Sample(token_ids=tokens, action_mask=torch.arange(len(tokens)) >= len(prompt))


def last_token(sample: Sample) -> Sample:
    return replace(sample, action_mask=torch.arange(sample.length) == sample.length - 1)


def words(tokens: list[int]) -> str:
    """Returns the text of these tokens, without the last one, which TRL adds by itself."""
    return "".join(f"{token} " for token in tokens if token != 1)


def pair_columns(text: Text, i: int) -> dict:
    return {
        "prompt": words(text.prompt),
        "chosen": words(text.chosen),
        "rejected": words(text.rejected),
        "length": len(text.prompt) + max(len(text.chosen), len(text.rejected)),
    }


def pair_tokens(pair: Pair) -> int:
    return pair.chosen.length + pair.rejected.length


TASKS = {
    "sft": Task(
        unit="samples",
        examples=sft_samples,
        collate=PackedRow.of,
        num_tokens=lambda sample: sample.length,
        objective=lambda reference: SFTObjective(),
        bare_losses=sft_losses,
        trl="SFT",
        columns=lambda text, i: {
            "prompt": words(text.prompt),
            "completion": words(text.chosen),
            "length": len(text.prompt) + len(text.chosen),
        },
    ),
    "rm": Task(
        unit="pairs",
        examples=rm_pairs,
        collate=PairRow.of,
        num_tokens=pair_tokens,
        objective=lambda reference: RewardObjective(),
        bare_losses=rm_losses,
        trl="Reward",
        columns=pair_columns,
        is_scorer=True,
    ),
    "dpo": Task(
        unit="pairs",
        examples=dpo_pairs,
        collate=PairRow.of,
        num_tokens=pair_tokens,
        objective=lambda reference: DPOObjective(beta=BETA, reference=reference),
        bare_losses=dpo_losses,
        trl="DPO",
        columns=pair_columns,
        read=pair_log_probs,
    ),
    "kto": Task(
        unit="answers",
        examples=kto_answers,
        collate=UnpairedRow.of,
        num_tokens=lambda answer: answer.sample.length,
        objective=lambda reference: KTOObjective(beta=BETA, reference=reference),
        bare_losses=kto_losses,
        trl="KTO",
        columns=lambda text, i: {
            "prompt": words(text.prompt),
            "completion": words(text.chosen),
            "label": i % 2 == 0,
        },
        read=unpaired_log_probs,
    ),
}


# Report


def describe(setting: Setting) -> None:
    options, load = setting.options, Path("/proc/loadavg")
    weights = setting.language_model().num_parameters() / 1e6
    print(
        f"{options.model}: {weights:.1f}M weights, vocabulary {setting.vocab_size}\n"
        f"{PRECISION}, {DEVICE_TYPE}, {options.threads} threads, ZeRO stage {options.zero_stage}, "
        f"torch {torch.__version__}, load {load.read_text().split()[0] if load.exists() else 'unknown'}\n"
        f"steps of {options.batch_size}, rows of at most {options.tokens} tokens",
        flush=True,
    )


def report(name: str, options: argparse.Namespace, passes: dict[str, list[Pass]]) -> None:
    task, setting = TASKS[name], Setting(options=options)
    tokens = sum(map(task.num_tokens, task.examples(setting.texts, options.batch_size)))
    print(
        f"\n{name.upper()}: {options.rows} {task.unit}, {tokens} tokens, {options.rounds} rounds\n"
        f"{'':26}{'tokens/s (min - max)':>24}{'ours / this (min - max)':>27}{'of CPU time':>13}"
        f"{'peak MiB':>10}{'loss':>9}"
    )
    for way, (first, *runs) in passes.items():
        rates = [tokens / run.seconds for run in runs]
        ratios = [run.seconds / mine.seconds for run, mine in zip(runs, passes[rival(way)][1:], strict=True)]
        cpu_ratios = [run.cpu / mine.cpu for run, mine in zip(runs, passes[rival(way)][1:], strict=True)]
        rate_range = f"({min(rates):.0f} - {max(rates):.0f})"
        ratio_range = f"({min(ratios):.3f} - {max(ratios):.3f})"
        print(
            f"{way:26}{statistics.median(rates):8.0f} {rate_range:>15}"
            f"{statistics.median(ratios):10.3f} {ratio_range:>16}"
            f"{statistics.median(cpu_ratios):13.3f}{runs[-1].peak:10.0f}{first.first_loss:9.4f}",
            flush=True,
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
