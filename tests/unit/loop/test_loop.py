"""A user's own loop: its verbs against the trainer's own losses, orders, errors and resumes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from records import record_of
from refusals import refused

import openrlhf as rl
from openrlhf.algorithms.kl import KLController
from openrlhf.config.fields import with_values
from openrlhf.config.supervised import SFTConfig, SFTDataConfig, SFTModelConfig
from openrlhf.errors import ErrorCode, RunError
from openrlhf.loop import restarts
from openrlhf.loop.lanes import Lanes
from openrlhf.loop.restarts import RESTARTS
from openrlhf.loop.settings import read_settings
from openrlhf.loop.supervised.datasets import build_train_set
from openrlhf.loop.supervised.sft import SFTTask

QUESTIONS = ["Sam has 4 limes", "Tom has 7 pears, drops 2", "Max has 9 kiwis"]


def by_length(queries: list[str], prompts: list[str], labels: list) -> list[float]:
    return [float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts, strict=True)]


def gradients(run: rl.Run) -> torch.Tensor:
    """Returns the policy's gradients as one vector, and clears them."""
    engine = run._roles.policy.workers[0].worker.model
    found = torch.cat([gradient.flatten() for _, gradient in sorted(engine.gradients().items())])
    engine.optimizer.zero_grad()
    return found


def policy_gradient(log_probs: torch.Tensor, batch: rl.Batch) -> tuple[torch.Tensor, dict]:
    """PPO's loss where the ratio is 1, as a mean over all actions."""
    ratio = (log_probs - log_probs.detach()).exp()
    return -(torch.from_numpy(batch.advantages) * ratio).mean(), {"ratio": ratio.mean()}


def test_a_function_has_the_gradient_of_the_built_in_loss(start):
    run = start()
    batch = run.batch(run.reward(run.sample(QUESTIONS), by_length)).result(60)
    built_in = run.forward_backward(batch, "ppo").result(60)
    expected = gradients(run)
    own = run.forward_backward(batch, policy_gradient).result(60)
    assert own["policy/loss"] == pytest.approx(built_in["policy/loss"], abs=1e-6)
    assert own["ratio"] == pytest.approx(1)
    assert expected.norm() > 0
    assert (gradients(run) - expected).norm() <= 1e-6 * expected.norm()


def test_the_first_step_lasts_from_the_start_of_the_run(start):
    run = start()
    began = time.monotonic()
    groups = run.reward(run.sample(QUESTIONS), by_length)
    groups.result(60)
    spent = time.monotonic() - began
    run.log({}, groups)
    (row,) = (Path(run.config.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["timing/step_total"] >= spent


def test_metrics_of_a_step_are_its_own_while_a_sync_goes_on(start, monkeypatch):
    run = start()
    begun, logged, send = Event(), Event(), run._rollout.sync

    class Sent:
        def __init__(self, policy: object, version: int) -> None:
            self.pending = send(policy, version)

        def result(self) -> dict:
            begun.set()
            assert logged.wait(60)
            return self.pending.result()

    monkeypatch.setattr(run._rollout, "sync", Sent)
    for rewards in ([1.0] * 3, [0.0] * 3):
        groups = run.reward(run.sample(QUESTIONS, n=1), lambda *_, rewards=rewards: rewards)
        metrics = run.update(run.batch(groups))
        metrics.result(60)
        synced = run.sync()
        assert begun.wait(60)
        run.log(metrics, groups)
        logged.set()
        synced.result(60)
    rows = (Path(run.config.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["rollout/reward_mean"] for row in rows] == [1, 0]


def test_a_class_is_a_loss(start):
    class Surrogate(rl.PolicyLoss):
        def __call__(self, row: rl.RowView):
            bound = torch.zeros_like(row.log_probs, dtype=torch.bool)
            return -row.log_ratio.exp() * row.advantages, bound, bound

    run = start()
    batch = run.batch(run.reward(run.sample(QUESTIONS), by_length)).result(60)
    run.forward_backward(batch, Surrogate).result(60)
    found = gradients(run)
    run.forward_backward(batch, policy_gradient).result(60)
    expected = gradients(run)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_calls_add_up_and_each_loss_has_its_own_denominator(start):
    run = start()
    groups = run.reward(run.sample(QUESTIONS), by_length).result(60)
    one, other = run.batch(groups[:1]).result(60), run.batch(groups[1:]).result(60)
    parts = []
    for batch in (one, other):
        run.forward_backward(batch).result(60)
        parts.append(gradients(run))
    run.forward_backward(one).result(60)
    run.forward_backward(other).result(60)
    two_calls = gradients(run)
    run.forward_backward(one, None, (other, "ppo")).result(60)
    one_call = gradients(run)
    for found in (two_calls, one_call):
        assert (found - sum(parts)).norm() <= 1e-6 * sum(parts).norm()


@pytest.mark.processes
def test_deepspeed_takes_one_call_a_step(start):
    norms = {}
    for backend in ("torch", "deepspeed"):
        run = start(**{"train.backend": backend, "ds.zero_stage": 2, "ckpt.output_dir": f"out-{backend}"})
        batch = run.batch(run.reward(run.sample(QUESTIONS), by_length)).result(60)
        run.forward_backward(batch, policy_gradient, (batch, "ppo")).result(60)
        norms[backend] = run.optim_step().result(60)["grad_norm"]
        run.forward_backward(batch)
        again = run.forward_backward(batch)
        if backend == "deepspeed":
            with pytest.raises(rl.UsageError, match="pass several"):
                again.result(60)
            run.optim_step().result(60)
            run.forward_backward(batch).result(60)
        run.close(cancel=True)
    assert norms["deepspeed"] == pytest.approx(norms["torch"], rel=1e-5)


def test_gradients_of_some_rows_are_not_stepped_on(start):
    class FailsLater(rl.PolicyLoss):
        calls = 0

        def __call__(self, row: rl.RowView):
            FailsLater.calls += 1
            if FailsLater.calls > 1:
                raise ValueError("a bug in the second row")
            bound = torch.zeros_like(row.log_probs, dtype=torch.bool)
            return -row.log_ratio * row.advantages, bound, bound

    run = start(**{"train.micro_batch_size": 2})
    batch = run.batch(run.reward(run.sample(QUESTIONS), by_length)).result(60)
    with pytest.raises(ValueError, match="second row"):
        run.forward_backward(batch, FailsLater).result(60)
    for verb in (run.optim_step, lambda: run.forward_backward(batch)):
        with pytest.raises(rl.RunError, match="failed midway"):
            verb().result(60)


def test_a_step_without_a_finite_gradient_changes_no_weights(start):
    run = start()
    batch = run.batch(run.sample(QUESTIONS)).result(60)
    wrong = np.full(len(batch.rollout_log_probs), np.nan, np.float32)
    batch = replace(batch, advantages=wrong, returns=wrong)
    before = run.log_probs(batch).result(60)
    run.forward_backward(batch).result(60)
    with pytest.raises(rl.RunError, match="grad_norm is nan"):
        run.optim_step().result(60)
    assert (run.log_probs(batch).result(60) == before).all()


def test_losses_of_a_call_are_one_sum_and_their_fractions_a_mean(start):
    run = start()
    batch = run.batch(run.reward(run.sample(QUESTIONS), by_length)).result(60)
    alone = [run.forward_backward(batch, loss).result(60) for loss in ("ppo", policy_gradient)]
    run.update(batch).result(60)  # the ratios are no longer 1
    changed = run.forward_backward(batch, "ppo").result(60)
    twice = run.forward_backward(batch, "ppo", (batch, "ppo")).result(60)
    assert twice["policy/ppo_kl"] == pytest.approx(changed["policy/ppo_kl"]) != 0
    assert twice["policy/loss"] == pytest.approx(2 * changed["policy/loss"])
    both = run.forward_backward(batch, policy_gradient, (batch, "ppo"), (batch, policy_gradient)).result(60)
    expected = changed["policy/loss"] + 2 * alone[1]["policy/loss"]
    assert both["policy/loss"] == pytest.approx(expected)


def test_a_critic_learns_at_its_own_rate(start):
    """In a loop of unknown length it was 1e-13: a warm-up without an end."""
    run = start(**{"algo.advantage.estimator": "gae", "critic.adam.lr": 0.01})
    batch = run.batch(run.reward(run.sample(QUESTIONS), by_length))
    assert run.update(batch).result(60)["critic/lr"] == 0.01
    with refused(ErrorCode.CONFLICT, told="--critic.lr_scheduler cosine: cosine needs the number"):
        start(**{"algo.advantage.estimator": "gae", "critic.lr_scheduler": "cosine"})


def test_the_age_of_samples_is_that_when_they_are_trained_on(start):
    """A sync before `log` made new samples old, and an update without a sync left old samples new."""
    run = start()
    groups = run.reward(run.sample(QUESTIONS), by_length).result(60)
    for _ in range(2):
        batch = run.batch(groups)
        metrics = run.update(batch)
        run.sync().result(60)
        run.log(metrics, groups)
    rows = (Path(run.config.run_dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["rollout/staleness_max"] for row in rows] == [0, 1]
    run.update(batch).result(60)
    assert (run.batch(groups).result(60).staleness == 3).all()


def test_samples_that_nothing_scores_are_told(start, capsys):
    """Their rewards are 0, of which no reward function is the cause."""
    run = start()
    groups = run.sample(QUESTIONS).result(60)
    run.log({}, groups)
    assert "unhealthy" not in "".join(capsys.readouterr())
    run.batch(groups, advantages=1.0).result(60)
    assert "scored" not in capsys.readouterr().err
    run.batch(groups).result(60)
    assert "nothing has scored these samples" in capsys.readouterr().err


def test_each_call_may_sample_with_its_own_settings(start):
    run = start(**{"eval.temperature": 1.0})
    lengths = lambda groups: {t.num_actions for group in groups for t in group.trajectories}
    whole = run.sample(QUESTIONS).result(60)
    assert max(lengths(whole)) == 6
    assert max(lengths(run.sample(QUESTIONS, max_new_tokens=2).result(60))) == 2
    assert lengths(run.sample(QUESTIONS).result(60)) == lengths(whole)
    measured = lambda **own: run.evaluate(QUESTIONS, by_length, **own).result(60)["eval/response_length_mean"]
    prompts = [rl.Prompt(prompt_id=i, text=text) for i, text in enumerate(QUESTIONS)]
    greedy = [run.evaluate(prompts, by_length, n=1, temperature=0).result(60) for _ in range(2)]
    assert greedy[0] == greedy[1] and measured(max_new_tokens=1) == 1 < measured()
    for wrong in ({"temperature": -1}, {"top_p": 2}, {"max_new_tokens": 0}, {"max_new_tokens": 1.5}):
        with refused(ErrorCode.INVALID_VALUE, flag=f"--eval.{next(iter(wrong))}"):
            run.evaluate(QUESTIONS, by_length, **wrong)


def test_numbers_are_advantages(start):
    run = start()
    groups = run.sample(QUESTIONS).result(60)
    count = sum(t.num_actions for group in groups for t in group.trajectories)
    given = np.linspace(-1, 1, count)
    batch = run.batch(groups, advantages=given).result(60)
    assert batch.advantages == pytest.approx(given)
    assert (
        batch.prompts.tolist() == np.repeat([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], batch.num_actions).tolist()
    )


def test_the_engine_samples_with_the_weights_of_the_last_sync(start):
    run = start()
    groups = run.reward(run.sample(QUESTIONS), by_length)
    batch = run.batch(groups).result(60)
    for _ in range(3):
        run.forward_backward(batch, policy_gradient)
        run.optim_step()
    assert run.sync().result(60) == 1
    batch = run.batch(run.reward(run.sample(QUESTIONS), by_length)).result(60)
    assert batch.rollout_log_probs == pytest.approx(run.log_probs(batch).result(60), abs=1e-5)
    assert batch.staleness is None  # of the newest weights
    old = run.batch(groups.result(60)).result(60)
    assert (old.staleness == 1).all()


def test_a_loop_continues_from_its_checkpoint(start, tmp_path):
    def steps(run: rl.Run, count: int) -> list[list[int]]:
        seen = []
        for _ in range(count):
            prompts = [rl.Prompt(prompt_id=i, epoch=run.step, text=text) for i, text in enumerate(QUESTIONS)]
            groups = run.reward(run.sample([*prompts, "Ann has"]), by_length).result(60)
            metrics = run.update(run.batch(groups))
            run.sync().result(60)
            run.log(metrics, groups)
            seen.append([int(x) for group in groups for t in group.trajectories for x in t.token_ids])
        return seen

    whole = start()
    steps(whole, 2)
    assert whole.save_state({"seen": 2, "note": "text"}).result(60) == "global_step2"
    rest = steps(whole, 2)
    whole.close()
    assert whole._rollout._loop.is_closed()  # else each run of a program would keep three files open
    again = start()
    again._estimator.load_state_dict = None  # not called: the estimator has saved nothing
    assert again.load_state() == {"seen": 2, "note": "text"}
    assert again.step == 2
    assert steps(again, 2) == rest
    again.close()
    starts = next(tmp_path.rglob("argv.txt")).read_text().splitlines()
    assert [line.split()[0] for line in starts] == ["#", "python"] * 2
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all("reward/mean" in row and "policy/loss" in row for row in rows)


def test_a_checkpoint_has_the_state_and_the_step_of_its_call(start, tmp_path):
    """The loop goes on with the same dict while the checkpoint waits for its turn."""
    run, go = start(**{"ckpt.path": tmp_path / "ckpt"}), Event()
    state = run.state
    state["seen"] = [1]
    run._lanes.on("models", go.wait, 10)
    saved = run.save_state()
    state["seen"].append(2)
    run.log({})
    go.set()
    assert saved.result(60) == "global_step0" and run.state is state
    run.close()
    again = start(**{"ckpt.path": tmp_path / "ckpt"})
    assert again.load_state() is again.state
    assert again.state == {"seen": [1]} and again.step == 0


def test_nothing_is_loaded_where_nothing_was_saved(start):
    assert start().load_state() is None


def test_the_export_is_a_model_with_the_trained_weights(start, tmp_path):
    from transformers import AutoModelForCausalLM

    run = start()
    groups = run.reward(run.sample(QUESTIONS), by_length)
    run.update(run.batch(groups))
    run.export(tmp_path / "policy").result(60)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    trained = run._roles.policy.workers[0].worker.model.module.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.items())


def test_an_evaluation_scores_its_own_samples(start):
    run = start(**{"eval.temperature": 1.0})
    metrics = run.evaluate(QUESTIONS, lambda queries, prompts, labels: [1.0, 0.0] * 3, n=2).result(60)
    assert metrics["eval/default_score_mean"] == 0.5
    assert metrics["eval/default_pass2"] == 1


def test_an_error_that_nobody_reads_ends_the_loop(start):
    run = start()
    run.reward(run.sample(QUESTIONS), lambda queries, prompts, labels: [1.0])
    with pytest.raises(Exception, match="1 rewards for 12 samples"):
        for _ in range(100):
            run.log_probs(run.batch(run.sample(QUESTIONS))).done()
            run._lanes.on("engines", lambda: None).result(60)


def test_an_error_that_was_read_is_over(start):
    run = start()
    with pytest.raises(Exception, match="1 rewards for 12 samples"):
        run.reward(run.sample(QUESTIONS), lambda queries, prompts, labels: [1.0]).result(60)
    assert len(run.sample(QUESTIONS).result(60)) == 3


def test_a_step_after_a_loss_that_failed_has_the_error_of_the_loss(start):
    """And not that it has no gradient: the loop reads the result of the step alone."""
    run = start()
    run.forward_backward(run.batch(run.sample(QUESTIONS)), lambda log_probs, batch: batch.advantage)
    with pytest.raises(AttributeError, match="no attribute 'advantage'") as error:
        run.log(run.optim_step())
    assert "there is no gradient" in error.value.__notes__[0]
    run.sync().result(60)  # the error was read


@pytest.mark.parametrize(
    "flags, told",
    [
        ({"lr": "fast", "rollout.temperatures": 1.0}, ["lr fast", "did you mean --rollout.temperature"]),
        ({"actor": "no/such/folder/"}, ["no/such/folder"]),
        ({"actor.num_gpus_per_node": 2}, ["one rank and one engine"]),
        ({"actor.lr_scheduler": "cosine"}, ["Run(..., steps=N)"]),
    ],
)
def test_all_problems_of_the_flags_are_told(model, flags, told):
    with pytest.raises(rl.UsageError) as error:
        rl.Run(**{"actor": model} | flags)
    assert all(text in str(error.value) for text in told)


def test_a_program_whose_own_class_a_run_imports_begins_once(start, tmp_path):
    """Each import of it began another run, without an end."""
    program = tmp_path / "own_program.py"
    program.write_text("import openrlhf as rl\nclass Mine(rl.Hook): ...\nrl.Run(actor='model')\n")
    with refused(ErrorCode.USER_CODE, told="line 3: a run begins when the file is imported; put it under"):
        start(**{"train.hooks": [f"{program}:Mine"]})


def test_another_name_of_a_model(start):
    run = start()
    batch = run.batch(run.sample(QUESTIONS)).result(60)
    with pytest.raises(rl.UsageError, match="this run has the models policy"):
        run.forward(batch, "reference").result(60)


def test_flags_of_a_loop_without_effect_are_told(start, capsys):
    start(**{"train.max_steps": 3, "train.partial_rollout_enable": True, "eval.dataset": "/gone.jsonl"})
    told = capsys.readouterr().err
    for flag in ("--train.max_steps 3", "--train.partial_rollout_enable", "--eval.dataset /gone.jsonl"):
        assert (
            f"{flag}: has no effect because the loop is a program" in told
        )  # and no other flag is asked for
    with refused(ErrorCode.CONFLICT, told="run.evaluate evaluates"):
        start(**{"eval.eval_only": True})


def test_a_batch_of_another_policy_has_no_ratio(start):
    run = start()
    groups = run.reward(run.sample(QUESTIONS), by_length)
    batch = run.batch(groups, log_probs=False)
    run.forward_backward(batch)
    run.optim_step()
    with pytest.raises(rl.UsageError, match="log_probs=False"):
        run.forward_backward(batch).result(60)
    batch = run.batch(groups)
    for _ in range(2):
        metrics = run.forward_backward(batch)
        run.optim_step()
    assert metrics.result(60)["policy/ppo_kl"] != 0  # of a ratio other than 1


def test_the_same_prompt_twice_is_refused(start):
    prompt = rl.Prompt(prompt_id=1, text="Sam")
    with pytest.raises(rl.UsageError, match="must differ"):
        start().sample([prompt, prompt]).result(60)


def test_each_call_of_prompts_has_other_epochs(start, tmp_path):
    rows = "".join(json.dumps({"input": text}) + "\n" for text in QUESTIONS)
    (tmp_path / "prompts.jsonl").write_text(rows)
    run = start()
    read = lambda: [
        p.epoch for batch in run.prompts(str(tmp_path / "prompts.jsonl"), epochs=2) for p in batch
    ]
    assert read() == [0, 0, 0, 1, 1, 1]
    assert read() == [2, 2, 2, 3, 3, 3]


def test_no_model_of_another_run_is_overwritten(start, tmp_path, model):
    run = start()
    with pytest.raises(rl.UsageError, match="this run reads the model"):
        run.export(model)
    run.export(tmp_path / "made").result(60)
    run.export(tmp_path / "made").result(60)
    run.close()
    with pytest.raises(
        rl.UsageError, match=r"^folder .*: this folder holds a model(.|\n)*set ckpt.overwrite"
    ):
        start().export(tmp_path / "made")


class TestLanes:
    def test_one_thread_does_all_work_in_its_order_if_lanes_share(self):
        """Engines and models take turns on their GPUs; an error of a piece of work is converted around it."""
        entered: list[str] = []

        @contextmanager
        def around():
            entered.append("in")
            yield

        lanes, done = Lanes(share=True, around=around), []
        for lane in ("engines", "models"):
            lanes.on(lane, done.append, lane)
        assert lanes.on_both(lambda *more: [*done, *more], 3).result(10) == ["engines", "models", 3]
        lanes.on("engines", done.append, "after").result(10)
        assert done[-1] == "after" and entered == ["in"] * 4
        lanes.close(cancel=False)

    def test_work_of_both_lanes_surrounds_a_sync(self):
        lanes, seen, go = Lanes(), [], Event()
        slow = lanes.on("engines", lambda: (go.wait(10), seen.append("sampled")))
        both = lanes.on_both(lambda: seen.append("synced"))
        later = [lanes.on(lane, seen.append, lane) for lane in ("engines", "models")]
        assert not both.done()
        go.set()
        for result in (slow, both, *later):
            result.result(10)
        assert seen[:2] == ["sampled", "synced"]
        assert sorted(seen[2:]) == ["engines", "models"]
        lanes.close(cancel=False)

    def test_lanes_work_at_the_same_time(self):
        lanes, trained = Lanes(), Event()
        sampled = lanes.on("engines", lambda: trained.wait(10))
        lanes.on("models", trained.set).result(10)
        assert sampled.result(10)
        lanes.close(cancel=False)

    def test_an_error_while_a_sync_is_submitted_holds_no_lane(self, monkeypatch):
        lanes, go = Lanes(), Event()

        def fail() -> None:
            go.wait(10)
            raise ValueError("unread")

        failing, engines = lanes.on("models", fail), lanes._threads["engines"]
        submit = engines.submit

        def submit_and_fail(work):
            go.set()
            wait([failing._future], 10)
            return submit(work)

        monkeypatch.setattr(engines, "submit", submit_and_fail)
        both = lanes.on_both(lambda: "synced")
        monkeypatch.undo()
        with pytest.raises(ValueError, match="unread"):
            lanes.on("engines", lambda: None)
        assert both.result(10) == "synced"
        assert lanes.on("engines", lambda: 1).result(10) == 1
        lanes.close(cancel=False)

    def test_a_sync_that_is_cancelled_holds_no_lane(self):
        lanes, go = Lanes(), Event()
        lanes.on("models", go.wait, 10)
        lanes.on_both(lambda: None)
        go.set()
        lanes.close(cancel=True)  # returns

    def test_results_can_be_awaited(self):
        lanes = Lanes()

        async def both() -> int:
            one, two = lanes.on("engines", lambda: 1), lanes.on("models", lambda: 2)
            return await one + await two

        assert asyncio.run(both()) == 3
        lanes.close(cancel=False)


@pytest.mark.processes
def test_the_public_names_are_loaded_when_they_are_used():
    program = (
        "import openrlhf as rl, sys\n"
        "assert 'torch' not in sys.modules\n"
        "assert rl.Prompt.__module__ == 'openrlhf.types'\n"
        "import openrlhf.api\n"
        "assert all(getattr(rl, name) for name in openrlhf.api.PUBLIC)\n"
        "try: rl.Rum\n"
        "except AttributeError as error: print(error)\n"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert made.stdout.startswith("openrlhf has no public name 'Rum'; there are AdvantageEstimator,"), made


class Told(rl.Hook):
    """Writes down the events of a loop of one's own."""

    def __post_init__(self) -> None:
        self.events: list[str] = []

    def scored(self, step: rl.Step) -> None:
        assert step.batch.log_probs is not None and step.batch.advantages is None
        self.events.append(f"scored {step.number}")

    def advantages(self, step: rl.Step) -> None:
        assert step.batch.advantages is not None
        step.metrics["of_hook"] = 3.0
        self.events.append(f"advantages {step.number}")

    def synced(self, step: rl.Step) -> None:
        self.events.append(f"synced {step.version}")

    def evaluated(self, evaluation: rl.Evaluation) -> None:
        self.events.append(f"evaluated {evaluation.step}")

    def ended(self, step: rl.Step) -> None:
        self.events.append(f"ended {step.number} {step.metrics['of_hook']}")


def test_a_loop_announces_what_its_verbs_do(start):
    run = start(**{"train.hooks": [f"{__file__}:Told"]})
    (told,) = run._hooks
    groups = run.reward(run.sample(QUESTIONS), by_length)
    run.forward_backward(run.batch(groups))
    metrics = run.optim_step()
    run.sync().result(60)
    run.log(metrics, groups)
    run.evaluate(QUESTIONS, by_length).result(60)
    assert told.events == ["scored 1", "advantages 1", "synced 0", "ended 1 3.0", "evaluated 1"]


def test_given_answers_are_those_that_supervised_training_learns(start, model, tmp_path):
    """The tokens and their mask are those of `openrlhf sft`, and the loss of a step is its loss."""
    rows = [{"input": question, "output": f"{i} limes"} for i, question in enumerate(QUESTIONS)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data.apply_chat_template": True, "data.label_key": "output"}
    run = start(**data)
    (prompts,) = run.prompts(str(file))
    groups = run.given(prompts, [prompt.label for prompt in prompts])
    learned = build_train_set(
        SFTTask(
            SFTConfig(
                model=SFTModelConfig(model_name_or_path=str(model)),
                data=SFTDataConfig(dataset=str(file), output_key="output", apply_chat_template=True),
            )
        ),
        run.tokenizer,
    )
    samples = [learned[i] for i in range(3)]
    expected = {tuple(s.token_ids.tolist()): s.action_mask.tolist() for s in samples}
    given = [t for group in groups for t in group.trajectories]
    assert {tuple(t.token_ids.tolist()): t.action_mask.tolist() for t in given} == expected
    batch = run.batch(groups, advantages=1.0, log_probs=False).result(60)
    assert batch.advantages.tolist() == [1.0] * batch.num_actions.sum()
    log_probs = run.log_probs(batch).result(60)
    loss = run.forward_backward(batch, lambda log_probs, batch: (-log_probs.mean(), {})).result(60)
    assert loss["policy/loss"] == pytest.approx(-log_probs.mean(), abs=1e-6)
    assert np.isnan(batch.rollout_log_probs).all(), "no engine sampled these tokens"
    mixed = run.batch([*groups, *run.sample(QUESTIONS[:1]).result(60)])
    mixed.result(60)
    assert run._measured[-1][1]["mismatch/abs_diff_max"] < 1e-4, "of the tokens that it sampled"
    run.config = with_values(run.config, {"algo.advantage.is_correction_enable": True})
    with refused(ErrorCode.CONFLICT, flag="--algo.advantage.is_correction_enable"):
        run.update(batch).result(60)
    run.update(replace(batch, rollout_log_probs=log_probs)).result(60)


def test_flags_may_be_a_dict_and_nested(model):
    given = {"actor": {"model_name_or_path": model, "model_kwargs": {"hidden_act": "gelu"}}, "lr": 1e-3}
    nested = {"algo": {"advantage": {"estimator": "rloo"}}, "rollout.n_samples_per_prompt": 4}
    config = read_settings(given, nested, steps=None, placement="local").config
    assert (config.actor.adam.lr, config.algo.advantage.estimator) == (1e-3, "rloo")
    assert config.actor.model_kwargs == {"hidden_act": "gelu"}
    with refused(ErrorCode.UNKNOWN_FLAG, told="--algo.advance.estimator"):
        read_settings(given, {"algo": {"advance": {"estimator": "rloo"}}}, steps=None, placement="local")
    with refused(ErrorCode.INVALID_VALUE, told="a dict of flags"):
        read_settings([model], {}, steps=None, placement="local")


def test_a_run_on_a_cluster_has_the_defaults_of_the_command(model, tmp_path):
    """One in this process has others, which start in seconds; both count ranks by the machines they have."""
    flags = {"actor": model, "rollout.n_samples_per_prompt": 4, "ckpt.output_dir": tmp_path}
    on_ray = read_settings(None, flags, steps=None, placement="ray").config
    local = read_settings(None, flags, steps=None, placement="local").config
    assert (on_ray.rollout.engine, on_ray.train.backend) == ("vllm", "deepspeed")
    assert (local.rollout.engine, local.train.backend) == ("transformers", "torch")
    assert on_ray.actor.num_gpus_per_node == local.actor.num_gpus_per_node == 1  # a machine without GPUs
    assert on_ray.actor.lr_scheduler == local.actor.lr_scheduler == "constant"
    two = flags | {"actor.num_gpus_per_node": 2, "train.batch_size": 4}
    assert read_settings(None, two, steps=3, placement="ray").config.actor.num_gpus_per_node == 2
    with refused(ErrorCode.CONFLICT, told='place on "ray"'):
        read_settings(None, two, steps=3, placement="local")


@pytest.mark.usefixtures("outlives_stops")
def test_a_signal_ends_a_loop_after_its_step_with_a_checkpoint(start, tmp_path, capfd):
    """As it ends `openrlhf ppo`: the same program goes on from there, with the loop's own state."""
    flags = {"ckpt.path": tmp_path / "ckpt", "ckpt.save_steps": 2, "train.grace_seconds": 60}
    steps: list[int] = []
    with pytest.raises(SystemExit) as ended, start(**flags) as run:
        for i in range(5):
            run.state["seen"] = i + 1
            if i == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            run.log({"loss": 0.5})
            steps.append(run.step)
    assert ended.value.code == 75 and steps == [1, 2]
    assert sorted(path.name for path in (tmp_path / "ckpt" / "_actor").glob("global*")) == [
        *("global_step2", "global_step3")
    ]
    assert "stopped after step 3; the last checkpoint is" in capfd.readouterr().err
    again = start(**flags)
    assert again.load_state() == again.state == {"seen": 3} and again.step == 3


def test_a_loop_that_lost_a_process_is_started_again(start, monkeypatch, capfd):
    """If it would continue from its checkpoint; in one process there is nothing to lose."""
    started: list[list[str]] = []
    monkeypatch.delenv(RESTARTS, raising=False)
    monkeypatch.setattr(restarts.os, "execv", lambda program, argv: started.append(argv))
    for resumes in (False, True):
        with pytest.raises(RunError, match="died"), start() as run:
            run.config = with_values(run.config, {"train.max_restarts": 1})
            if resumes:
                run.load_state()
            raise RunError(ErrorCode.WORKER_FAILED, "a rank of the policy died")
        assert ("never calls load_state" in capfd.readouterr().err) == (not resumes)
    assert started == [[sys.executable, *sys.orig_argv[1:]]]
    monkeypatch.delenv(RESTARTS)
    with refused(ErrorCode.CONFLICT) as error:
        start(**{"train.max_restarts": 1})
    assert "--train.max_restarts 1: one process has no other to lose" in str(error.value)
    start(**{"train.max_restarts": 0}).close()  # as in the config.yaml of a run


def test_the_kl_coefficient_adapts_by_episodes(start):
    """An agent that rewrites its history has several sequences in an episode."""
    kl = {"algo.kl.init_coef": 0.1, "algo.kl.target": 0.5, "algo.kl.horizon": 100}
    run = start(**kl, **{"train.batch_size": 6})
    groups = run.reward(run.sample(QUESTIONS, n=2), by_length).result(60)
    twice = [
        replace(group, trajectories=[replace(t, part=part) for t in group.trajectories for part in (0, 1)])
        for group in groups
    ]
    batch = run.batch(twice)
    run.batch(groups[:1])  # the last batch is another one
    run.update(batch).result(60)
    assert run._roles.policy.workers[0].worker.model.steps == 1  # a batch of 6 episodes, in 12 sequences
    expected = KLController(coef=0.1, target=0.5, horizon=100).update(0.0, 6)  # 3 questions, 2 answers each
    assert run.kl.coef == pytest.approx(expected.coef, rel=1e-6)
    run.update(batch.result(60).select(range(4))).result(60)
    assert run.kl.coef == pytest.approx(expected.update(0.0, 4).coef, rel=1e-6)


def test_metrics_of_a_step_are_those_of_all_its_batches(start):
    run = start()
    scored = lambda reward, n: run.reward(
        run.sample(QUESTIONS[:n], n=2), lambda queries, *_: [reward] * len(queries)
    )
    batches = [run.batch(scored(1.0, 2)), run.batch(scored(4.0, 1))]
    run.log({}, scored(1.0, 3))
    (row,) = map(json.loads, (Path(run.config.run_dir) / "metrics.jsonl").read_text().splitlines())
    sizes = [len(batch.result(60)) for batch in batches]
    assert sizes == [4, 2] and row["reward/mean"] == 2


def test_what_a_loop_passes_counts_in_place_of_turns_and_tasks(start):
    """Rewards of turns are no part of another reward, and an estimator is that of all samples."""
    run = start(**{"tasks.default.estimator": "rloo"})
    (group,) = run.sample(QUESTIONS[:1], n=2).result(60)
    earned = [replace(t, turn_rewards=np.ones(1, np.float32)) for t in group.trajectories]
    (group,) = run.reward([replace(group, trajectories=earned)], lambda *_: [0.0, 1.0]).result(60)
    assert [len(t.turn_rewards) for t in group.trajectories] == [0, 0]
    for estimator, size in ((None, 1.0), ("dr_grpo", 0.5)):
        batch = run.batch([group], advantages=estimator).result(60)
        assert np.abs(batch.advantages) == pytest.approx(size)


def test_a_batch_that_cannot_be_trained_on_is_refused(start):
    run = start(**{"rollout.max_new_tokens": 1, "rollout.mask_truncated": True})
    groups = run.reward(run.sample(QUESTIONS, n=2), by_length)
    with pytest.raises(rl.RunError, match="all 6 samples are truncated, so none is left to train on"):
        run.batch(groups).result(60)
    with pytest.raises(rl.UsageError, match="estimator gae: needs a critic"):
        run.batch(groups, advantages="gae")


def test_a_batch_without_log_probs_has_no_kl(start):
    """Its KL would count as 0: no penalty in the reward, and a coefficient that falls."""
    kl = {"algo.kl.init_coef": 0.1, "algo.kl.target": 1e-9, "algo.kl.horizon": 1, "algo.kl.estimator": "k2"}
    run = start(**kl)
    groups = run.reward(run.sample(["Sam has"]), lambda queries, prompts, labels: range(len(queries)))
    with pytest.raises(rl.UsageError, match="log_probs False: KL in the reward needs these log-probs"):
        run.batch(groups, log_probs=False)
    run.update(run.batch(groups, advantages=1.0, log_probs=False)).result(60)
    assert run.kl.coef == 0.1
    run.log({})
    batch = run.batch(groups)
    run.log({})  # metrics are taken, the KL of the batch is not
    run.update(batch).result(60)
    assert run.kl.coef == pytest.approx(0.12)  # the policy has moved, and k2 is a square


def test_checkpoints_of_a_loop_are_those_of_the_flags(start, tmp_path):
    """With copies in the format of Hugging Face, written while the loop goes on, and all rollouts on disk."""
    flags = {"ckpt.path": tmp_path / "ckpt", "ckpt.save_hf": True, "ckpt.async_save": True}
    with start(**flags) as run:
        groups = run.reward(run.sample(QUESTIONS), by_length)
        run.log(run.update(run.batch(groups)), groups)
        journal, flushed = record_of(run._observer).journal, []
        flush = journal.flush
        journal.flush = lambda: flushed.append(run.step) or flush()
        run.save_state().result(60)
        assert flushed, "the rollouts before a checkpoint are not sampled again"
        (rollouts,) = run._observer.folder.rollouts_path.glob("step*.parquet")
        assert rollouts.stat().st_size > 0
    assert (tmp_path / "ckpt" / "global_step1_hf" / "model.safetensors").exists()
    assert start(**flags).load_state() == {}
