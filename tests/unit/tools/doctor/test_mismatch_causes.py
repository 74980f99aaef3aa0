"""The twelve causes of a mismatch between sampler and trainer: each is injected into the sampler of a tiny
model, and `openrlhf doctor` must name it first."""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_config
from peft import LoraConfig, get_peft_model
from run_folders import sample, write_journal, write_run
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrlhf.tasks.tiny_model import tiny_model, tiny_tokenizer
from openrlhf.tools.doctor import mismatch, mismatch_causes, mismatch_findings
from openrlhf.tools.doctor.diagnose import diagnose
from openrlhf.tools.doctor.recompute import find_nucleus, hooked
from openrlhf.tools.doctor.record import RunRecord
from openrlhf.tools.reference.outputs import chosen, distribution

TOKENIZER = tiny_tokenizer()
PROMPTS = [
    f"<|system|>Be brief.<|end|><|user|>Sam has {n} limes and buys {n + 3}.<|end|><|assistant|>"
    for n in (21, 37, 52, 80)
]
LENGTH = 24
Logits = Callable[[Tensor], Tensor]
"""(B, L) token ids -> (B, L, V) logits."""


@dataclass(frozen=True)
class Flags:
    """The flags of sampling."""

    top_p: float = 1.0
    top_k: int = -1
    max_kept_tokens: int = 32
    temperature: float = 1.0

    @property
    def has_nucleus(self) -> bool:
        return self.top_p < 1 or self.top_k > 0

    @property
    def keeps_nucleus(self) -> bool:
        return self.has_nucleus and self.max_kept_tokens > 0


SETTINGS = (
    *(Flags(temperature=t) for t in (1.0, 0.7)),
    *(
        Flags(*limits, max_kept_tokens=kept, temperature=t)
        for limits in ((0.7, -1), (1.0, 20), (0.7, 20))
        for kept in (32, 0)
        for t in (1.0, 0.7)
    ),
)
"""Both values of every flag; without top-p and top-k no support is kept."""


@dataclass
class Case:
    """The computations of sampler and trainer in a step."""

    sampler: Logits
    trainer: Logits
    config: dict[str, Any] = field(default_factory=dict)
    sampled_with: Callable[[Flags], Flags] = lambda flags: flags
    """The sampler's flags."""
    trained_over: Callable[[Tensor, Tensor], Tensor | None] = lambda nucleus, targets: nucleus
    """Support that the trainer normalises over, from the recorded one, (A, V)."""
    step: int = 1
    encoded_again: Callable[[Tensor], Tensor] = lambda ids: ids
    """Tokens of an answer -> the tokens that the trainer makes of its text."""


@cache
def tiny(kind: str) -> Any:
    """Returns a tiny random model, which nothing changes."""
    torch.manual_seed(0)
    if kind == "qwen3":
        model = tiny_model(TOKENIZER, hidden_size=48)
    else:
        config = tiny_config(kind)
        config.vocab_size = len(TOKENIZER)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.2)
    return model.eval()


class Folders:
    """A tiny model, and a later version of it."""

    def __init__(self, root: Path, kind: str = "qwen3") -> None:
        self.root, self.first, self.model = root, str(root / "model"), tiny(kind)
        self.model.save_pretrained(self.first)
        TOKENIZER.save_pretrained(self.first)

    def load(self, **config: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.first, dtype=torch.float32, **config).eval()

    @property
    def checkpoint(self) -> Path:
        return self.root / "ckpt" / "checkpoints" / "_actor" / "global_step1_hf"

    def later(self) -> Any:
        """Returns the model after a step, and saves it."""
        model = self.load()
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * weight.std(correction=0) * torch.randn_like(weight)
        model.save_pretrained(self.checkpoint)
        return model


def of(model: Any) -> Logits:
    return lambda ids: model(input_ids=ids).logits


# ---- the twelve


def temperature(f: Folders) -> Case:
    other = lambda flags: replace(flags, temperature=1.7 - flags.temperature)
    return Case(of(f.model), of(f.model), sampled_with=other)


def top_p(f: Folders) -> Case:
    """The trainer normalises over all tokens, or the sampler has a top-p that no flag sets."""
    more = lambda flags: flags if flags.has_nucleus else replace(flags, top_p=0.9)
    return Case(of(f.model), of(f.model), sampled_with=more, trained_over=lambda nucleus, targets: None)


def kept_sets(f: Folders) -> Case:
    moved = lambda nucleus, targets: nucleus.roll(1, 0).scatter(1, targets[:, None], True)
    return Case(of(f.model), of(f.model), trained_over=moved)


def rope(f: Folders) -> Case:
    wrong = f.load()
    wrong.model.rotary_emb.inv_freq = wrong.model.rotary_emb.inv_freq ** (np.log(1e6) / np.log(1e4))
    return Case(of(wrong), of(f.model))


def stale_weights(f: Folders) -> Case:
    return Case(of(f.model), of(f.later()), step=2)


def adapter(f: Folders) -> Case:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(f.load(), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.2)
    model.peft_config["default"].base_model_name_or_path = f.first
    model.save_pretrained(f.checkpoint)
    return Case(of(f.model), of(model.eval()), {"ds__lora": {"rank": 4}}, step=2)


def tokenizer(f: Folders) -> Case:
    """The trainer encodes the sampler's text, whose tokenizer has the same pieces with other numbers."""
    order = torch.randperm(len(TOKENIZER), generator=torch.Generator().manual_seed(0))
    return Case(of(f.model), of(f.model), encoded_again=lambda ids: order[ids])


def head_precision(f: Folders) -> Case:
    def sampler(ids: Tensor) -> Tensor:
        hidden = f.model.model(input_ids=ids).last_hidden_state.bfloat16()
        return (hidden @ f.model.lm_head.weight.bfloat16().T).float()

    return Case(sampler, of(f.model))


def dropout(f: Folders) -> Case:
    f.load(attention_dropout=0.1).save_pretrained(f.first)
    return Case(of(f.load().train()), of(f.model))


def template(f: Folders) -> Case:
    """The sampler's prompts lack the start of the answer."""
    start = len(TOKENIZER(PROMPTS[0])["input_ids"])

    def sampler(ids: Tensor) -> Tensor:
        logits = f.model(input_ids=torch.cat([ids[:, : start - 1], ids[:, start:]], 1)).logits
        return torch.cat([logits[:, :1], logits], 1)

    return Case(sampler, of(f.model))


def routing(f: Folders) -> Case:
    routers = [
        module for module in f.model.modules() if hasattr(module, "top_k") and hasattr(module, "weight")
    ]
    assert routers

    def sampler(ids: Tensor) -> Tensor:
        with hooked(routers, lambda x: x + 0.02 * x.std() * torch.randn_like(x)):
            return f.model(input_ids=ids).logits

    return Case(sampler, of(f.model))


def weight_chunk(f: Folders) -> Case:
    """A quarter of a matrix arrives shifted."""
    model = f.later()
    wrong = AutoModelForCausalLM.from_pretrained(f.checkpoint, dtype=torch.float32).eval()
    weight = wrong.model.layers[1].mlp.down_proj.weight
    rows = len(weight) // 4
    weight.data[:rows] = weight.data[:rows].roll(7, 1)
    return Case(of(wrong), of(model), step=2)


CAUSES = (
    *(temperature, top_p, rope, stale_weights, adapter, tokenizer, head_precision, dropout, template),
    *(kept_sets, routing, weight_chunk),
)


@torch.no_grad()
def rows_of(case: Case, version: int, flags: Flags = SETTINGS[0], samples: int = 4) -> list[dict[str, Any]]:
    """Samples answers to each prompt, and returns their rows."""
    encoded = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS for _ in range(samples)]
    start = len(encoded[0])
    assert {len(ids) for ids in encoded} == {start}
    ids = torch.tensor(encoded)
    draws = torch.Generator().manual_seed(0)
    with_flags = case.sampled_with(flags)
    limits = with_flags.temperature, with_flags.top_p, with_flags.top_k
    for _ in range(LENGTH):
        last = case.sampler(ids)[:, -1]
        nucleus = find_nucleus(last, last.argmax(-1), *limits)
        likely = distribution(last, with_flags.temperature, nucleus).exp()
        ids = torch.cat([ids, likely.multinomial(1, generator=draws)], 1)
    answers = ids[:, start:]
    again = case.encoded_again(answers)
    of_sampler, of_trainer = case.sampler(ids), case.trainer(torch.cat([ids[:, :start], again], 1))
    rows, inside = [], slice(start - 1, -1)
    for i in range(len(ids)):
        nucleus = find_nucleus(of_sampler[i, inside], answers[i], *limits)
        kept = case.trained_over(nucleus, again[i]) if flags.keeps_nucleus else None
        of_side = lambda logits, t, over, ids: chosen(distribution(logits, t, over), ids).tolist()
        rows.append(
            sample(
                ids[i].tolist(),
                start,
                version,
                prompt=PROMPTS[i // samples],
                prompt_id=i // samples,
                response=TOKENIZER.decode(again[i].tolist()),
                rollout_log_probs=of_side(of_sampler[i, inside], with_flags.temperature, nucleus, answers[i]),
                log_probs=of_side(of_trainer[i, inside], flags.temperature, kept, again[i]),
            )
        )
    return rows


def build(
    root: Path,
    cause: Callable[[Folders], Case],
    flags: Flags = SETTINGS[0],
    samples: int = 4,
    of_task: float | None = None,
) -> Path:
    """Writes a run of two steps with the defect, from its first step on or after the first weight sync.
    `of_task`: temperature of a task, which has half of the prompts."""
    folders = Folders(root, "qwen3_moe" if cause is routing else "qwen3")
    case = cause(folders)
    config = {
        **({} if of_task is None else {"tasks__sums__temperature": of_task}),
        "actor__model_name_or_path": folders.first,
        "ckpt__output_dir": str(root / "ckpt"),
        "ds__param_dtype": "fp32",
        **{f"rollout__{name}": value for name, value in asdict(flags).items()},
    }
    run = write_run(root / "run", {"rollout/reward_mean": [0.1, 0.2]}, **config, **case.config)
    if case.step == 2:
        write_journal(run, 1, rows_of(Case(of(folders.model), of(folders.model)), 0, flags, samples))
    rows = rows_of(case, case.step - 1, flags, samples)
    if of_task is not None:
        own = rows_of(case, case.step - 1, replace(flags, temperature=of_task), samples)
        rows = [row for row in rows if row["prompt_id"] < 2]
        rows += [row | {"source": "sums"} for row in own if row["prompt_id"] >= 2]
    write_journal(run, case.step, rows)
    return run


def first_with(cause: Callable[[Folders], Case]) -> Flags:
    """Returns the first flags with which this cause is possible."""
    return SETTINGS[2] if cause is kept_sets else SETTINGS[0]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.__name__)
def test_each_injected_cause_comes_first(cause: Callable[[Folders], Case], tmp_path: Path) -> None:
    run = RunRecord(build(tmp_path, cause, first_with(cause)))
    began = time.monotonic()
    found = diagnose(run)
    print(f"\n{cause.__name__}: {time.monotonic() - began:.1f} s")
    for finding in found:
        print(f"  {finding.score:.2f} {finding.cause}: {' | '.join(finding.evidence)}")
    assert found[0].cause == f"gap: {cause.__name__.replace('_', '-')}"


QUICK = (temperature, top_p, kept_sets, stale_weights, adapter, tokenizer, head_precision)
COMBINED = (SETTINGS[4], SETTINGS[9], SETTINGS[11])
"""Each value of each flag at least once, and the supports that the trainer does not use."""
NOISY = (dropout, routing)
"""Causes that no recomputation repeats."""


def answers_of(cause: Callable[[Folders], Case], flags: Flags) -> list[str]:
    """Returns the causes that may come first: with supports that the trainer does not use that is the first
    gap of the run, or beside the noise of a small cause the larger one."""
    name = f"gap: {cause.__name__.replace('_', '-')}"
    unused = flags.has_nucleus and not flags.keeps_nucleus
    if unused and cause in (stale_weights, adapter, weight_chunk, head_precision):
        return ["gap: top-p"]
    return [name, "gap: top-p"] if unused and cause in NOISY else [name]


def marks_of(cause: Callable[[Folders], Case], flags: Flags) -> tuple[pytest.MarkDecorator, ...]:
    """Keeps one combination of flags for each cause in fast runs, in turn."""
    if cause not in QUICK or flags not in COMBINED:
        return (pytest.mark.slow,)
    is_first = cause is kept_sets or COMBINED.index(flags) == QUICK.index(cause) % 3
    return () if is_first else (pytest.mark.processes,)


@pytest.mark.parametrize(
    ("cause", "flags"),
    [
        pytest.param(
            cause,
            flags,
            marks=marks_of(cause, flags),
            id=f"{cause.__name__}-{'-'.join(map(str, astuple(flags)))}",
        )
        for cause in CAUSES
        for flags in SETTINGS
        if flags.keeps_nucleus or cause is not kept_sets
    ],
)
def test_the_cause_is_found_with_any_flags(
    cause: Callable[[Folders], Case], flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causes that are only noise are guessed, so it is enough that no other one is called certain."""
    monkeypatch.setattr(mismatch_causes, "ROWS", 8)
    found = [
        finding
        for finding in diagnose(RunRecord(build(tmp_path, cause, flags, samples=2)))
        if finding.cause.startswith("gap")
    ]
    assert found
    if cause not in NOISY or found[0].confidence == "certain":
        assert found[0].cause in answers_of(cause, flags)


def left_out(f: Folders) -> Case:
    """The sampler has the run's temperature in all tasks."""
    return Case(of(f.model), of(f.model), sampled_with=lambda flags: replace(flags, temperature=1.0))


@pytest.mark.parametrize(
    ("cause", "name"), [(left_out, "temperature"), (top_p, "top-p"), (adapter, "adapter")]
)
def test_tasks_have_temperatures_of_their_own(
    cause: Callable[[Folders], Case], name: str, tmp_path: Path
) -> None:
    found = diagnose(RunRecord(build(tmp_path, cause, of_task=0.6)))
    assert found[0].cause == f"gap: {name}" and found[0].confidence == "certain"
    if cause is left_out:
        assert "temperature 1 on one side, those of the tasks on the other" in " ".join(found[0].evidence)


def test_a_copy_that_a_live_run_deletes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone between the look into the folder and the reading of its files."""
    run = RunRecord(build(tmp_path, stale_weights))
    measured = mismatch.measure_mismatch(run)
    assert measured is not None
    listed = mismatch_causes.find_checkpoints

    def deleted(folder: Path) -> dict[int, str]:
        found = listed(folder)
        for path in found.values():
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(mismatch_causes, "find_checkpoints", deleted)
    examined, _ = mismatch_causes.examine(measured, None, deadline=math.inf)
    assert examined is not None
    assert examined.policy.path == examined.first and not examined.is_trainers
    missing = replace(examined, others={0: str(tmp_path / "gone"), 1: examined.first})
    assert [version for version, _ in mismatch_causes._others(missing)] == [1]


def test_after_the_deadline_the_rollouts_alone_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mismatch_findings, "BUDGET", 0.0)
    found = diagnose(RunRecord(build(tmp_path, temperature)))
    assert found and all(finding.confidence != "certain" for finding in found)
    assert any("the time limit for recomputing log-probs was reached" in text for text in found[0].evidence)


def test_a_search_that_ends_early_leaves_the_routers_as_they_were(tmp_path: Path) -> None:
    run = RunRecord(build(tmp_path, routing))
    measured = mismatch.measure_mismatch(run)
    assert measured is not None
    examined, _ = mismatch_causes.examine(measured, None, deadline=0.0)
    assert examined is not None
    before = [router.top_k for router in examined.policy.routers]
    for text, _ in mismatch_causes._routing(examined):
        if "experts" in text:
            break
    assert [router.top_k for router in examined.policy.routers] == before


def test_a_template_that_writes_the_date_writes_that_of_the_run(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}"
    (tmp_path / "argv.txt").write_text("# 2025-03-09 23:10:00 UTC\nopenrlhf ppo\n")
    run = RunRecord(tmp_path)
    row: Any = SimpleNamespace(token_ids=np.array(tokenizer("12")["input_ids"]), prompt_length=2)
    prompts = dict(mismatch_causes._prompts(SimpleNamespace(run=run, tokenizer=tokenizer)))
    chat = prompts["in the chat template of the model"](row)
    assert tokenizer.decode(chat) == tokenizer.decode(tokenizer("2025-03-0912")["input_ids"])
