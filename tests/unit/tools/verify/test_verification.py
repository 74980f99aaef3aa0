"""`openrlhf verify`: each check passes for a sound setup, and fails when its defect is put into it."""

import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file

from openrlhf.backends.distributed import init_distributed, leave_distributed
from openrlhf.backends.torch.engine import TorchEngine
from openrlhf.backends.transformers.engine import TransformersEngine
from openrlhf.config.commands import DPO, KTO, PPO, RM, SFT
from openrlhf.config.parse import parse
from openrlhf.data import batches
from openrlhf.errors import ErrorCode, RunError
from openrlhf.models import backbone, policy, scorer
from openrlhf.rows import ExperienceRow, PackedRow, PairRow
from openrlhf.tasks.tiny_model import tiny_chat_model
from openrlhf.tools.command_line import jobs
from openrlhf.tools.verify import compare, continuing, engine, ranks, trainer
from openrlhf.tools.verify.compare import Gradient, Rounding, Scale
from openrlhf.tools.verify.flags import verify
from openrlhf.tools.verify.report import Finding, Verdict, judged, not_checked, table, write_report
from openrlhf.tools.verify.subjects import Size, Subject, shortest
from openrlhf.tools.verify.verify import _with_layers, build_subject
from openrlhf.training.objectives import kto, sft

ROWS = [
    {
        "input": f"Tom has {i // 2} apples and {7 * i} pears.",
        "output": f" He has {8 * i} of them{' now' * (i % 4)}.",
        "chosen": f" {i} apples",
        "rejected": f" no apples, {i * i}",
        "label": i % 3 != 0,
    }
    for i in range(10)
]
WORDS = "--model.model_name_or_path m --data.dataset d --data.output_key o --train.seed 7"
COMMANDS = {
    "sft": (SFT, "--data.output_key output"),
    "rm": (RM, "--data.prompt_key input"),
    "dpo": (DPO, "--data.prompt_key input --model.nll_loss_coef 0.1 --ref.model_name_or_path {reference}"),
    "kto": (KTO, "--data.output_key output --ref.model_name_or_path {reference}"),
    "ppo": (
        PPO,
        "--algo.kl.use_loss --algo.kl.estimator k2 --actor.entropy_coef 0.01 --rollout.temperature 0.7 "
        "--reward.remote_url http://localhost/reward",
    ),
    "gspo": (
        PPO,
        "--actor.policy_loss_type gspo --algo.kl.init_coef 0 --reward.remote_url http://localhost/reward",
    ),
}
COMMANDS_OF_ENGINE = {
    "engine": (PPO, "--rollout.engine transformers --reward.remote_url http://localhost/reward"),
}
COMMANDS_OF_DEEPSPEED = {
    "sft with DeepSpeed": (SFT, "--data.output_key output --train.backend deepspeed"),
}
TAKES_LONG = pytest.mark.processes
FP32_CHECKS = ["plain transformers", "micro-batches and order", "token budget", "packing", "common prefixes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("verification")
    tiny_chat_model(made / "model", hidden_size=32)
    tiny_chat_model(made / "reference", hidden_size=32, seed=1)
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return made


@pytest.fixture
def verified(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, Finding]]]:
    """Yields a function that verifies a command and returns its findings by check."""
    for name in jobs.LAUNCHED:
        monkeypatch.setenv(name, "")  # what the checks set is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENRLHF_CACHE", str(folder / "cache"))

    def verify(
        name: str, dtype: str = "fp32", checks: Callable = trainer.trainer_checks, count: int | None = None
    ) -> dict[str, Finding]:
        command, flags = (COMMANDS | COMMANDS_OF_ENGINE | COMMANDS_OF_DEEPSPEED)[name]
        model, data = ("actor", "prompt_dataset") if command is PPO else ("model", "dataset")
        words = (
            f"--{model}.model_name_or_path {folder / 'model'} --data.{data} {folder / 'rows.jsonl'} "
            f"--train.backend torch --ds.param_dtype {dtype} {flags.format(reference=folder / 'reference')}"
        )
        config = parse(command, words.split()).config

        init_distributed()
        findings = list(checks(build_subject(command, config, tmp_path, Size(rows=6)), dtype))
        assert len(findings) == (trainer.number_of_checks(dtype) if count is None else count)
        assert all(finding.claim for finding in findings)
        return {finding.check: finding for finding in findings}

    yield verify
    leave_distributed()


def failed(findings: dict[str, Finding]) -> set[str]:
    return {name for name, finding in findings.items() if finding.verdict is Verdict.FAILED}


@pytest.mark.parametrize(
    "name", ["sft", "rm", "ppo", *(pytest.param(name, marks=TAKES_LONG) for name in ("dpo", "kto", "gspo"))]
)
@pytest.mark.few(1)
def test_a_sound_setup_is_proved(verified: Callable, name: str) -> None:
    findings = verified(name)
    assert {name: f.verdict for name, f in findings.items()} == dict.fromkeys(FP32_CHECKS, Verdict.PROVED)
    assert all(f.error < f.bound < 1e-4 and f.how for f in findings.values())


@TAKES_LONG
def test_the_dtype_of_the_run_is_compared_with_float32(verified: Callable) -> None:
    findings = verified("sft", "bf16")
    assert not failed(findings)
    assert 1e-3 < findings["dtype bf16"].error < findings["dtype bf16"].bound


def leaking_attention(patch: pytest.MonkeyPatch) -> None:
    """Attention sees a row as one sequence, once the model's own check is over."""
    honest = backbone.packing_kwargs

    def leak(model: Any, row: PackedRow, tree: Any = None) -> torch.Tensor:
        one = lambda name, lengths, *more: honest(name, (sum(lengths),), *more[:-1], None)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(backbone, "packing_kwargs", one)
            return backbone.in_one_pass(model, row)

    patch.setattr(backbone, "hidden_states", leak)
    patch.setattr(backbone, "_common_prefixes", lambda model, row: None)


def one_temperature(patch: pytest.MonkeyPatch) -> None:
    """The policy's log-probs are those of temperature 1."""
    honest = policy.PolicyModel.forward
    without = lambda self, row, temperature=1.0, **more: honest(self, row, 1.0, **more)
    patch.setattr(policy.PolicyModel, "forward", without)


def wrong_total(patch: pytest.MonkeyPatch) -> None:
    """The loss is divided by a constant instead of the number of actions."""
    patch.setattr(sft, "token_mean", lambda loss, norm: loss.sum() / 20)


def mean_of_each_row(patch: pytest.MonkeyPatch) -> None:
    """Each row's loss is divided by its own number of sequences."""
    patch.setattr(PairRow, "num_sequences", property(lambda row: 1))


def advantages_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """A row's advantages belong to other tokens."""
    honest = ExperienceRow.of.__func__
    flipped = lambda cls, batch: honest(cls, replace(batch, advantages=batch.advantages[::-1].copy()))
    patch.setattr(ExperienceRow, "of", classmethod(flipped))


def forgotten_prefixes(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a shared prefix lacks the parts of all sequences but one."""
    honest = backbone.action_states

    def lost(model: Any, row: PackedRow, places: torch.Tensor) -> Any:
        states = honest(model, row, places)
        if backbone._common_prefixes(model, row) is None:
            return states
        return states._replace(hidden=states.hidden * 0.999)

    patch.setattr(policy, "action_states", lost)


def score_of_an_earlier_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scorer.ScoreModel, "forward", lambda self, row: self.read(row, row.actions - 1))


def kl_of_the_answers(patch: pytest.MonkeyPatch) -> None:
    """KTO's KL is estimated on the answers instead of on mismatched ones."""
    honest = kto.KTOObjective.__call__
    shifted = lambda self, model, row, norm: honest(replace(self, kl=self.kl + 1), model, row, norm)
    patch.setattr(kto.KTOObjective, "__call__", shifted)


def coarse_head(patch: pytest.MonkeyPatch) -> None:
    """The head is wrong in half precision alone."""
    honest = policy.LogProbHead.forward

    def forward(self: Any, hidden: torch.Tensor, *more: Any, **options: Any) -> Any:
        if self.weight.dtype == torch.bfloat16:
            options |= {"scale": options.get("scale", 1.0) * 1.5}
        return honest(self, hidden, *more, **options)

    patch.setattr(policy.LogProbHead, "forward", forward)


DEFECTS = [
    ("sft", leaking_attention, {"packing", "token budget", "micro-batches and order"}),
    ("ppo", one_temperature, {"plain transformers"}),
    ("sft", wrong_total, {"plain transformers"}),
    ("dpo", mean_of_each_row, {"micro-batches and order", "token budget", "packing"}),
    ("ppo", advantages_in_another_order, {"plain transformers", "packing"}),
    ("ppo", forgotten_prefixes, {"common prefixes", "packing"}),
    ("rm", score_of_an_earlier_token, {"plain transformers"}),
    ("kto", kl_of_the_answers, {"plain transformers"}),
]


@TAKES_LONG
@pytest.mark.parametrize(("name", "defect", "checks"), DEFECTS)
def test_a_defect_is_found(
    verified: Callable, monkeypatch: pytest.MonkeyPatch, name: str, defect: Callable, checks: set[str]
) -> None:
    defect_is_in = []

    def with_defect(subject: Any, dtype: str) -> Any:
        running = type(subject).running

        @contextmanager
        def broken(self: Any, of_dtype: str) -> Any:
            with running(self, of_dtype) as found, pytest.MonkeyPatch.context() as patch:
                defect(patch)  # after the model's own checks at its start
                yield found
                defect_is_in.append(True)

        monkeypatch.setattr(type(subject), "running", broken)
        return trainer.trainer_checks(subject, dtype)

    findings = verified(name, checks=with_defect)
    assert defect_is_in
    assert checks <= failed(findings)
    assert all(findings[check].meaning for check in checks)


@TAKES_LONG
def test_a_defect_of_one_dtype_is_found(verified: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    coarse_head(monkeypatch)
    assert failed(verified("sft", "bf16")) == {"dtype bf16", "dtype bf16, packed"}


def test_a_model_may_be_as_sensitive_to_rounding_as_plain_transformers() -> None:
    scale = compare.Scale(1.0, {"w": 1.0})
    rounding = Rounding(dtype="bf16", layers=1, longest_sum=8)  # 5 / 256 sqrt(40) = 0.1235
    for error, plain_error, verdict, bound in (
        (0.12, 0.0, Verdict.PROVED, 0.1235),
        (0.13, 0.0, Verdict.FAILED, 0.1235),
        (0.13, 0.06, Verdict.FAILED, 0.1235),
        (0.19, 0.1, Verdict.PROVED, 0.2),
        (0.21, 0.1, Verdict.FAILED, 0.2),
    ):
        difference = compare.Difference(0.0, 1.0, {"w": error})
        found = compare.compared("c", "C holds", difference, scale, rounding, "m", 0.0, plain_error)
        assert found.verdict is verdict and found.bound == pytest.approx(bound, abs=1e-4)
        assert ("plain transformers in bf16" in found.how) == (bound == 0.2)


def test_the_report_has_everything_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-key")
    config = parse(SFT, WORDS.split()).config
    findings = [
        judged("a", "A holds", 0.5, 0.1, where="the loss", meaning="B is broken; very-secret-key"),
        judged("b", "B holds", 0.0, 0.1, how="arithmetic"),
        judged("c", "C holds", math.nan, 0.1),
        not_checked("d", "D holds", "no GPU"),
    ]
    assert [f.verdict for f in findings] == ["FAILED", "proved", "FAILED", "not checked"]
    tmp_path /= "new"
    write_report(tmp_path / "v.json", "sft", config, findings, {"rows": "synthetic"})
    written = json.loads((tmp_path / "v.json").read_text())
    assert [f["check"] for f in written["findings"]] == ["a", "b", "c", "d"]
    assert written["command"] == "sft" and "seed: 7" in written["config"]
    assert written["environment"]["versions"] and "host" not in written["environment"]
    text = (tmp_path / "v.txt").read_text()
    for part in ("B is broken", "arithmetic", "equal bits", "no GPU", "synthetic", "at the loss"):
        assert part in text
    assert "very-secret-key" not in text + (tmp_path / "v.json").read_text()
    assert table(findings) in text.replace("<redacted>", "very-secret-key")


@pytest.mark.parametrize("name", ["", "v.txt"])
def test_a_report_that_could_not_be_written_is_refused_before_the_checks(name: str, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        verify(["sft", *WORDS.split(), "--out", str(tmp_path / name)])
    assert f"error: --out {tmp_path / name}: the report cannot be written: " in capsys.readouterr().err


def test_the_sync_that_differs_most_or_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(*outcomes: float | RunError) -> tuple[float | None, str]:
        left = list(outcomes)

        def sync() -> None:
            if isinstance(left[0], RunError):
                raise left[0]

        pair: Any = SimpleNamespace(sync=sync, difference=lambda: left.pop(0), reason=lambda: "old weights")
        return engine.error_of_syncs(pair, None, len(outcomes))

    moves = [True]
    monkeypatch.setattr(engine, "moved", lambda pair, batch: moves[0])
    gone = RunError(ErrorCode.ENGINE_FAILED, "gone")
    assert error_of(0.25, 0.5, 0.1) == (0.5, "sync 2")
    assert error_of(0.25, 2.0, 0.1) == (2.0, "sync 2: old weights")
    assert error_of(0.25, gone) == (math.inf, f"sync 2: {gone}")
    moves[0] = False
    assert error_of(0.25)[0] is None


@pytest.mark.parametrize("name", ["sft", "dpo", "ppo"])
def test_only_the_first_layers_are_verified(folder: Path, tmp_path: Path, name: str) -> None:
    command, flags = COMMANDS[name]
    model, data = ("actor", "prompt_dataset") if command is PPO else ("model", "dataset")
    words = f"--{model}.model_name_or_path {folder / 'model'} --data.{data} {folder / 'rows.jsonl'} "
    config = parse(command, (words + flags.format(reference=folder / "reference")).split()).config
    assert _with_layers(command, config, None, tmp_path) is config
    cut = _with_layers(command, config, 1, tmp_path)
    kept = {model: "model"} | ({"ref": "reference"} if name == "dpo" else {})
    for section, source in kept.items():
        path = tmp_path / f"{section}-of-1-layers"
        assert getattr(cut, section).model_name_or_path == str(path)
        few, whole = (load_file(at / "model.safetensors") for at in (path, folder / source))
        assert few.keys() == {key for key in whole if ".layers." not in key or ".layers.0." in key}
        assert all(torch.equal(few[key], whole[key]) for key in few)
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1
        assert (path / "tokenizer.json").is_file()
    with refused(ErrorCode.INVALID_VALUE, flag="--layers", value=99):
        _with_layers(command, config, 99, tmp_path)


@pytest.mark.parametrize("name", ["sft", "ppo", pytest.param("sft with DeepSpeed", marks=TAKES_LONG)])
def test_a_model_is_freed_at_the_end_of_its_block(verified: Callable, name: str) -> None:
    """The name of the block still exists; checks of large models build the next one."""

    def checks(subject: Subject, dtype: str) -> list[Finding]:
        with subject.running(dtype) as running:
            kept = [weakref.ref(x) for x in (running.engine, *running.engine.module.parameters())]
            assert len(kept) > 10
        assert running.items and not [ref for ref in kept if ref() is not None]
        return []

    verified(name, checks=checks, count=0)


def test_bounds_follow_from_the_dtype_and_the_sizes() -> None:
    sizes = {"layers": 2, "longest_sum": 340}
    # 20 (2 + 1) + 340 = 400 roundings in float32; sums of half precision are in float32
    assert Rounding(dtype="fp32", **sizes).bound == pytest.approx(5 * 2**-24 * 20)
    assert Rounding(dtype="bf16", **sizes).bound == pytest.approx(5 * 2**-8 * 60**0.5)


def test_short_rows_come_first() -> None:
    assert shortest([9, 2, 700, 4], Size(rows=3, tokens=10)) == [0, 1, 3]
    assert shortest([900, 20, 700, 4], Size(rows=3, tokens=10)) == [1, 2, 3]
    assert shortest([1, 1], Size(rows=3)) == [0, 1]


def continued(verified: Callable, tmp_path: Path, name: str) -> dict[str, Finding]:
    checks = lambda subject, dtype: continuing.continuing_checks(subject, dtype, tmp_path / "checkpoint")
    return verified(name, checks=checks, count=2)


@pytest.mark.parametrize("name", ["sft", pytest.param("ppo", marks=TAKES_LONG)])
def test_a_run_that_goes_on_where_it_was_saved(verified: Callable, tmp_path: Path, name: str) -> None:
    findings = continued(verified, tmp_path, name)
    assert {f.check: (f.verdict, f.error) for f in findings.values()} == {
        "seeds": (Verdict.PROVED, 0.0),
        "resume": (Verdict.PROVED, 0.0),
    }


def test_differences_of_numbers_that_are_not_finite() -> None:
    """A gradient norm in fp16 is infinite where the loss scale was too large."""
    inf, nan = math.inf, math.nan
    assert [continuing.gap(1.5, 1.0), continuing.gap(inf, inf), continuing.gap(nan, nan)] == [0.5, 0.0, 0.0]
    assert [continuing.gap(*pair) for pair in ((1.0, inf), (nan, 1.0), (inf, nan))] == [inf] * 3
    state = lambda *norms: continuing.State({}, [{"loss": 1.0, "grad_norm": norm} for norm in norms])
    assert continuing.difference(state(inf, 1.0), state(inf, 1.0))[0] == 0.0
    error, where = continuing.difference(state(nan, 1.0), state(1.0, 1.0))
    assert error == inf and "grad_norm of step 1" in where


@TAKES_LONG
def test_a_checkpoint_without_the_optimizer(
    verified: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TorchEngine._tensors
    weights = lambda engine: {n: t for n, t in honest(engine).items() if n.startswith("weights.")}
    monkeypatch.setattr(TorchEngine, "_tensors", weights)
    assert failed(continued(verified, tmp_path, "sft")) == {"resume"}


@TAKES_LONG
def test_a_run_that_its_seed_does_not_fix(
    verified: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = iter(range(100))
    order = batches.epoch_order
    monkeypatch.setattr(
        batches, "epoch_order", lambda count, *, seed, **more: order(count, seed=next(seeds), **more)
    )
    assert "seeds" in failed(continued(verified, tmp_path, "sft"))


@pytest.fixture
def with_engine(verified: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Finding]]:
    """Returns a function that checks a policy beside the engine of transformers, with three syncs."""
    monkeypatch.setattr(engine, "SYNCS", 2)
    return lambda: verified("engine", checks=engine.engine_checks, count=len(engine.NAMES))


ENGINE_CHECKS = {"engine", "sampled log-probs", "engine seeds", "one sync", "several syncs", "sleep and wake"}


def test_an_engine_beside_the_trainer(with_engine: Callable) -> None:
    findings = with_engine()
    assert {f.check for f in findings.values() if f.verdict is Verdict.PROVED} == ENGINE_CHECKS
    assert all(f.error < f.bound for f in findings.values() if f.check != "engine seeds")


def skipped_weights(patch: pytest.MonkeyPatch) -> None:
    """The engine does not load what it receives."""

    async def update(self: Any, info: Any) -> None:
        pass

    patch.setattr(TransformersEngine, "update_weights", update)


def unused_weights(patch: pytest.MonkeyPatch) -> None:
    """The engine receives the weights, and computes with those of its files."""
    honest = TransformersEngine.finish_weight_update

    async def finish(self: Any, version: str) -> None:
        kept = self.__dict__.setdefault("kept", {n: t.clone() for n, t in self.files.items()})
        await honest(self, version)
        self.model.load_state_dict(kept)

    start = TransformersEngine.start

    async def started(self: Any, free: float | None = None) -> None:
        await start(self, free)
        self.files = {n: t.clone() for n, t in self.model.state_dict().items()}

    patch.setattr(TransformersEngine, "start", started)
    patch.setattr(TransformersEngine, "finish_weight_update", finish)


def log_probs_of_another_temperature(patch: pytest.MonkeyPatch) -> None:
    honest = engine.answer
    patch.setattr(
        engine, "answer", lambda pair, prompt, temperature, seed: honest(pair, prompt, 3 * temperature, seed)
    )


def one_seed(patch: pytest.MonkeyPatch) -> None:
    honest = engine.answer
    always = lambda pair, prompt, temperature, seed: honest(pair, prompt, temperature, 1)
    patch.setattr(engine, "answer", always)


@TAKES_LONG
@pytest.mark.parametrize(
    ("defect", "checks"),
    [
        (skipped_weights, {"one sync", "several syncs", "sleep and wake"}),
        (unused_weights, {"one sync", "several syncs", "sleep and wake"}),
        (log_probs_of_another_temperature, {"sampled log-probs"}),
        (one_seed, {"engine seeds"}),
    ],
)
def test_a_defect_of_an_engine(
    with_engine: Callable, monkeypatch: pytest.MonkeyPatch, defect: Callable, checks: set[str]
) -> None:
    defect(monkeypatch)
    assert failed(with_engine()) == checks


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, Verdict.PROVED), (0.5, Verdict.FAILED), (None, Verdict.FAILED)]
)
def test_ranks_are_compared_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, factor: float | None, verdict: Verdict
) -> None:
    """Ranks that average what they should add up have a fraction of the gradient."""
    subject = SimpleNamespace(config=parse(SFT, WORDS.split()).config)
    gradient = {"w": torch.ones(3)}
    expected, scale = Gradient(1.0, gradient), Scale(1.0, {"w": 1.0})

    def launch(subject: Any, folder: Path, stages: list[int], number: int) -> str:
        assert (stages, number) == ([0, 2, 3], 2)
        if factor is None:
            return "no such stage"
        for stage in stages:
            torch.save((1.0, {"w": factor * gradient["w"]}), folder / f"{stage}.pt")
        return ""

    monkeypatch.setattr(ranks, "launch", launch)
    monkeypatch.setattr(ranks, "DEVICE_TYPE", "cpu")
    rounding = Rounding(dtype="fp32", layers=2, longest_sum=340)
    findings = list(ranks.rank_checks(subject, tmp_path, expected, scale, rounding))
    assert [f.verdict for f in findings] == [verdict] * 3
    assert factor is not None or "no such stage" in findings[0].where


def test_a_job_of_ranks_that_takes_too_long_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "TIMEOUT", 0.01)
    told = f"it was ended after 0.01 s; the end of {tmp_path / 'log'}:"
    assert ranks.launch("no subject", tmp_path, [0], 1).startswith(told)
