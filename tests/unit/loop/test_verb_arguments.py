"""Arguments of the verbs: every natural form has its value, and mistakes are told at once."""

import json
import subprocess
import sys
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from openai.types.chat import ChatCompletionMessage
from refusals import refused

import openrlhf as rl
from openrlhf.agents.base import RewardError
from openrlhf.config.parse import to_command
from openrlhf.config.ppo_command import PPO
from openrlhf.errors import ErrorCode
from openrlhf.loop.settings import read_settings

QUESTIONS = ["Sam has 4 limes", "Tom has 7 pears, drops 2", "Max has 9 kiwis"]


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    flags = {"rollout.n_samples_per_prompt": 2, "rollout.max_new_tokens": 3, "data.max_len": 64}
    flags |= {"ds.param_dtype": "fp32", "algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0}
    with rl.Run(actor=model, lr=1e-3, **flags, **{"ckpt.output_dir": tmp_path_factory.mktemp("run")}) as run:
        yield run


@pytest.fixture(scope="module")
def groups(run):
    return run.sample(QUESTIONS).result(60)


@pytest.fixture(scope="module")
def batch(run, groups):
    rewarded = run.reward(groups, lambda queries, prompts, labels: range(6))
    return run.batch(rewarded).result(60)


def rewards(groups: list[rl.PromptGroup]) -> list[float | None]:
    return [t.reward for group in groups for t in group.trajectories]


class Judge:
    """Scores by its own state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, queries, prompts, labels):
        return self.scored(queries, prompts, labels)

    def scored(self, queries, prompts, labels):
        self.calls += 1
        return [self.calls * i for i in range(len(queries))]


async def awaited(queries, prompts, labels):
    return list(range(len(queries)))


FORMS: dict[str, Callable[..., Any]] = {
    "ints": lambda queries, prompts, labels: list(range(6)),
    "tuple": lambda queries, prompts, labels: tuple(range(6)),
    "generator": lambda queries, prompts, labels: (float(i) for i in range(6)),
    "map": lambda queries, prompts, labels: map(str, range(6)),
    "values of a dict": lambda queries, prompts, labels: dict(enumerate(range(6))).values(),
    "array": lambda queries, prompts, labels: np.arange(6)[:, None],
    "tensor": lambda queries, prompts, labels: torch.arange(6.0, dtype=torch.bfloat16, requires_grad=True),
    "scalars": lambda queries, prompts, labels: [np.float32(0), torch.tensor(1.0), 2, 3, 4, 5],
    "dict": lambda queries, prompts, labels: {"rewards": list(range(6)), "extra_logs": {"one": 1}},
    "async": awaited,
    "partial": partial(lambda queries, prompts, labels, least: [least + i for i in range(6)], least=0),
    "object": Judge(),
    "method": Judge().scored,
}


@pytest.mark.parametrize("name", FORMS)
def test_a_reward_of_any_form_has_its_values(run, groups, name):
    assert rewards(run.reward(groups, FORMS[name]).result(60)) == [0, 1, 2, 3, 4, 5]


def test_booleans_are_rewards_and_each_call_of_an_object_is_one(run, groups):
    boxed = lambda queries, prompts, labels: [i == 2 for i in range(6)]
    assert rewards(run.reward(groups, boxed).result(60)) == [0, 0, 1, 0, 0, 0]
    judge = Judge()
    for calls in (1, 2):
        assert rewards(run.reward(groups, judge).result(60)) == [calls * i for i in range(6)]


@pytest.mark.parametrize(
    "answer, told",
    [
        (None, "it is a NoneType. Return a list"),
        (1.0, "it is a float. Return a list"),
        ({1.0, 2.0}, "it is a set. Return a list"),
        ([1, 2, 3], "3 rewards for 6 samples"),
        ([0, 1, 2, None, 4, 5], r"not 'NoneType' \(sample 3 of 6\)"),
        ([0, 1, 2, 3, 4, float("nan")], r"not finite: \[nan\] \(samples 5 of 6\)"),
        ([{"reward": 1}] * 6, r"\(sample 0 of 6\).*\n.*'extra_logs'"),
    ],
)
def test_rewards_that_are_none_are_told_with_the_sample(run, groups, answer, told):
    with pytest.raises(RewardError, match=told):
        run.reward(groups, lambda queries, prompts, labels: answer).result(60)


def test_groups_of_one_prompt_are_one_group_of_all_their_samples(run):
    prompts = [rl.Prompt(prompt_id=0, text=QUESTIONS[0])]
    both = run.sample(prompts, n=2).result(60) + run.sample(prompts, n=2).result(60)
    both = run.reward(both, lambda queries, prompts, labels: [0, 1, 2, 7]).result(60)
    assert rewards(both) == [0, 1, 2, 7]
    batch = run.batch(both, advantages="dr_grpo").result(60)  # minus the mean of all four, 2.5
    firsts = batch.num_actions.cumsum() - batch.num_actions
    assert batch.advantages[firsts].tolist() == [-2.5, -1.5, -0.5, 4.5]
    again = run.batch(both[:1] + both[:1], advantages="dr_grpo").result(60)
    assert len(again) == 4 and set(again.advantages) == {-0.5, 0.5}


def test_a_reward_that_changes_a_label_changes_its_own(run):
    prompt = rl.Prompt(prompt_id=0, text=QUESTIONS[0], label=["4"])
    two = run.sample([prompt], n=2).result(60)
    for _ in range(2):
        emptied = run.reward(two, lambda queries, prompts, labels: [int(label.pop()) for label in labels])
        assert rewards(emptied.result(60)) == [4, 4]


def test_keys_that_nobody_reads_are_told(run, groups, capsys):
    run.reward(groups, lambda queries, prompts, labels: {"rewards": range(6), "accuracy": 1}).result(60)
    assert "returned accuracy, not read; metrics belong in extra_logs" in capsys.readouterr().err


def test_an_error_of_a_reward_is_raised_as_it_is(run, groups):
    with pytest.raises(KeyError, match="answer"):
        run.reward(groups, lambda queries, prompts, labels: {}["answer"]).result(60)


@pytest.mark.parametrize(
    "function, told",
    [
        (lambda completions, **columns: [1.0], r"<lambda>\(completions, \*\*columns\) cannot be called"),
        (lambda queries, prompts: [1.0], r"called as <lambda>\(queries, prompts, labels\)"),
        (lambda prompts, queries, labels: [1.0], "its prompts would be the queries"),
        (Judge, r"Judge\(\).* cannot be called"),
        ([1.0] * 6, "reward is a list, and no function"),
        ("reward.py", "reward is a str, and no function"),
    ],
)
def test_what_is_no_reward_function_is_told_before_anything_is_sampled(run, groups, function, told):
    for verb in (run.reward, run.evaluate):
        with pytest.raises(rl.UsageError, match=told):
            verb(groups, function)


PROMPT = rl.Prompt(prompt_id=0, text="Sam")


@pytest.mark.parametrize(
    "prompts, told",
    [
        ("Sam has 4 limes", "this is a str"),
        (PROMPT, "this is a Prompt"),
        ([{"input": "Sam"}], "a list with a dict"),
        ([[{"role": "user", "content": "Sam"}]], "a list with a list"),
        ({"input": ["Sam"]}, "this is a dict"),
        ([""], "a prompt has 0 tokens, and may have 1 to 63: ''"),
        (["Sam", "Sam 4 " * 100], "tokens, and may have 1 to 63: 'Sam 4 "),
    ],
)
def test_what_is_no_prompt_is_refused_and_the_engine_goes_on(run, prompts, told):
    for sample in (run.sample, partial(run.evaluate, reward=FORMS["ints"]), run.sample):
        with pytest.raises(rl.UsageError, match=told):
            sample(prompts).result(60)
    assert len(run.sample(iter(["Sam"]), n=1).result(60)) == 1


@pytest.mark.parametrize("number", [0, -1, 2.0, "2"])
def test_what_is_no_number_of_samples_is_refused_and_the_engine_goes_on(run, number):
    for verb in (run.sample, partial(run.evaluate, reward=FORMS["ints"])):
        with refused(ErrorCode.INVALID_VALUE, flag="n"):
            verb(["Sam"], n=number)
    assert [len(g.trajectories) for g in run.sample(["Sam"], n=np.int64(3)).result(60)] == [3]


@pytest.mark.parametrize("name", ["batch_size", "epochs"])
@pytest.mark.parametrize("number", [0, -1, 2.0])
def test_prompts_come_in_batches_of_at_least_one(run, name, number):
    with refused(ErrorCode.INVALID_VALUE, flag=name):
        next(run.prompts(QUESTIONS, **{name: number}))


def test_nothing_to_evaluate_with_is_told(run):
    with refused(ErrorCode.MISSING_FLAG, flag="--reward.remote_url"):
        run.evaluate(QUESTIONS)
    with refused(ErrorCode.INVALID_VALUE):
        run.evaluate([], FORMS["ints"]).result(60)


def test_an_evaluation_takes_the_result_of_a_verb(run):
    prompts = run._lanes.on("models", lambda: QUESTIONS)
    metrics = run.evaluate(prompts, lambda queries, prompts, labels: [1, 0] * 3, n=2).result(60)
    assert metrics["eval/default_score_mean"] == 0.5


ROWS = [{"prompt": text, "answer": {"number": i}} for i, text in enumerate(QUESTIONS)]


@pytest.mark.parametrize("form", ["rows", "generator", "dataset", "path"])
def test_prompts_are_read_of_rows_in_memory(start, tmp_path, form):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sources = {
        "rows": ROWS,
        "generator": (row for row in ROWS),
        "dataset": datasets.Dataset.from_list(ROWS),
        "path": file,
    }
    run = start(**{"data.input_key": "prompt", "data.label_key": "answer"})
    (found,) = run.prompts(sources[form])
    assert {p.prompt_id: (p.text, p.label) for p in found} == {
        i: (row["prompt"], row["answer"]) for i, row in enumerate(ROWS)
    }


def test_texts_and_conversations_are_prompts_with_the_template(start):
    run = start(**{"data.apply_chat_template": True})
    talks = [[{"role": "user", "content": text}] for text in QUESTIONS]
    said = ChatCompletionMessage(role="assistant", content="4")
    records = [
        [MappingProxyType({"role": "user", "content": QUESTIONS[0]})],
        ({"role": "user", "content": ({"type": "text", "text": QUESTIONS[1]},)},),
        UserDict({"input": np.array(talks[2], object)}),
    ]
    texts, chats, others = (
        [p.text for p in next(run.prompts(source))] for source in (QUESTIONS, talks, records)
    )
    assert texts == chats == others
    ((answered,),) = run.prompts([[*talks[0], said, *talks[1]]])
    assert answered.messages[1]["content"] == "4"
    assert sorted(texts) == sorted(
        run.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for talk in talks
    )


@pytest.mark.parametrize("source", [{"input": QUESTIONS}, 3, None, [3], [PROMPT]])
def test_what_is_no_dataset_is_told(run, source):
    with pytest.raises(rl.UsageError, match=r"expects a path, a list of rows|a row is a dict"):
        next(run.prompts(source))


@pytest.mark.parametrize("verb", ["reward", "batch", "log"])
def test_what_is_no_list_of_groups_is_told(run, groups, batch, verb):
    call = {
        "reward": lambda given: run.reward(given, FORMS["ints"]).result(60),
        "batch": lambda given: run.batch(given).result(60),
        "log": lambda given: run.log({}, given),
    }[verb]
    step = run.step
    for given in (QUESTIONS, groups[0], groups[0].trajectories, [groups, groups], batch):
        with pytest.raises(rl.UsageError, match="expects a list of groups"):
            call(given)
    assert run.step == step


def test_an_empty_batch_is_told(run):
    with pytest.raises(rl.UsageError, match="there are no samples"):
        run.batch([]).result(60)


def test_as_many_answers_as_prompts_are_given(run):
    (group,) = run.given(["Sam"], ["4 limes"])
    assert group.trajectories[0].prompt.text == "Sam"
    with pytest.raises(rl.UsageError, match="3 prompts and 1 answers"):
        run.given(QUESTIONS, ["4"])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_advantages_of_any_kind_are_numbers(run, groups, batch, kind):
    expected = list(range(len(batch.advantages)))
    assert run.batch(groups, advantages=kind(expected)).result(60).advantages.tolist() == expected


@pytest.mark.parametrize(
    "advantages, told",
    [
        ("group_nrm", "no estimator has this name; there are .*group_norm"),
        (rl.PolicyLoss, "class derived from AdvantageEstimator"),
        (np.ones(6), r"advantages the shape \(6,\)"),
        (float("nan"), "some are not finite"),
        (len, "expects a name, a class or numbers"),
        (["good"], "expects a name, a class or numbers"),
    ],
)
def test_advantages_that_are_none_are_told(run, groups, advantages, told):
    with pytest.raises(rl.UsageError, match=told):
        run.batch(groups, advantages=advantages).result(60)


def test_a_loss_may_return_no_metrics(run, batch):
    mean = run.log_probs(batch).result(60).mean()
    for loss in (
        lambda log_probs, batch: -log_probs.mean(),
        lambda log_probs, batch: (-log_probs.mean()[None], None),
    ):
        assert run.forward_backward(batch, loss).result(60)["policy/loss"] == pytest.approx(-mean, abs=1e-6)


def test_metrics_of_a_loss_are_numbers_of_any_kind(run, batch):
    more = {"tensor": torch.tensor(2.0, requires_grad=True), "int": 1, "array": np.float32(3), "bool": True}
    found = run.forward_backward(batch, lambda log_probs, batch: (log_probs.mean(), more)).result(60)
    assert {name: found[name] for name in more} == {"tensor": 2, "int": 1, "array": 3, "bool": 1}


LOSSES = {
    r"a Tensor of the shape \(18,\)": lambda log_probs, batch: -log_probs,
    "this one returned a NoneType": lambda log_probs, batch: None,
    "this one returned a float": lambda log_probs, batch: log_probs.mean().item(),
    "this one returned a dict": lambda log_probs, batch: {"loss": log_probs.mean()},
    "does not depend on log_probs: detach": lambda log_probs, batch: log_probs.detach().mean(),
    "does not depend on log_probs": lambda log_probs, batch: torch.ones((), requires_grad=True),
    r"write torch\.from_numpy\(batch\.advantages\)": lambda log_probs, batch: (
        -(log_probs * batch.advantages).mean()
    ),
    r"in a loss, write torch\.from_numpy": lambda log_probs, batch: -(batch.advantages * log_probs).mean(),
    r"metric r: is no number, but a Tensor of the shape \(18,\)": lambda log_probs, batch: (
        log_probs.mean(),
        {"r": log_probs},
    ),
    r"<lambda>\(log_probs\) cannot be called as <lambda>\(log_probs, batch\)": lambda log_probs: (
        log_probs.mean()
    ),
    "no policy loss has this name; there are .*ppo": "pppo",
    "a class derived from PolicyLoss; this is <class": Judge,
}


@pytest.mark.parametrize("told", LOSSES)
def test_what_is_no_loss_is_told(run, batch, told):
    with pytest.raises(rl.UsageError, match=told):
        run.forward_backward(batch, LOSSES[told]).result(60)


def test_what_is_no_batch_is_told(run, groups, batch):
    for call in (run.forward_backward, run.update, run.log_probs):
        with pytest.raises(rl.UsageError, match="expects what `batch` returns"):
            call(groups).result(60)
    with pytest.raises(rl.UsageError, match="further pairs"):
        run.forward_backward(batch, "ppo", batch)


def test_a_step_needs_a_gradient(start):
    run = start()
    batch = run.batch(run.reward(run.sample(QUESTIONS), lambda *texts: range(12))).result(60)
    with pytest.raises(rl.UsageError, match="call forward_backward before each optim_step"):
        run.optim_step().result(60)
    run.forward_backward(batch)
    assert run.optim_step().result(60)["grad_norm"] > 0
    with pytest.raises(rl.UsageError, match="there is no gradient"):
        run.optim_step().result(60)


def test_batches_are_trained_on_in_any_order_and_more_than_once(start):
    """The checks of a run compare log-probs with the current policy for batches of that policy alone."""
    run = start()
    score = lambda queries, prompts, labels: list(map(len, queries))
    one, other = (run.batch(run.reward(run.sample(QUESTIONS), score)).result(60) for _ in range(2))
    assert run.update(one).result(60)["policy/ppo_kl"] == pytest.approx(0, abs=1e-6)
    for batch in (other, one):
        assert run.update(batch).result(60)["policy/ppo_kl"] != pytest.approx(0, abs=1e-6)
    fresh = run.batch(run.reward(run.sample(QUESTIONS), score)).result(60)
    with pytest.raises(rl.RunError, match=r"log-probs|log ratio"):
        false = fresh.log_probs - 1
        last = run._origins._last
        last.append(last.pop()._replace(log_probs=lambda: false))
        run.update(replace(fresh, log_probs=false)).result(60)


def test_an_update_without_a_known_ratio_is_refused(start):
    run = start()
    groups = run.reward(run.sample(QUESTIONS), lambda *texts: range(12))
    batch = run.batch(groups, log_probs=False)
    run.update(batch).result(60)
    run.batch(groups, log_probs=False).result(60)  # another one, of the policy as it is now
    with pytest.raises(rl.UsageError, match="log_probs=False"):
        run.update(batch).result(60)


@pytest.mark.parametrize("anchor, is_refused", [("recomputed", True), ("rollout", False)])
def test_several_steps_on_a_batch_need_their_anchor(start, anchor, is_refused):
    """12 samples, 4 in an optimizer step: the second one would have the ratio 1 to itself."""
    run = start(**{"train.batch_size": 4, "algo.advantage.proximal_policy": anchor})
    groups = run.reward(run.sample(QUESTIONS), lambda *texts: range(12))
    updated = run.update(run.batch(groups, log_probs=False))
    if is_refused:
        with pytest.raises(rl.UsageError, match="log_probs=False"):
            updated.result(60)
    else:
        assert updated.result(60)["policy/ppo_kl"] != 0


@pytest.mark.parametrize(
    "metrics, told",
    [
        (None, "expects a dict of names and numbers; this is a NoneType"),
        ({"x": "high"}, "metric x: is no number, but a str"),
        ({"x": {"y": 1}}, "metric x: is no number, but a dict"),
        ({"x": 1, "step": 1}, "metric step: the run counts its steps itself"),
        ({"x": torch.ones(3)}, r"metric x: is no number, but a Tensor of the shape \(3,\)"),
    ],
)
def test_metrics_that_are_no_numbers_end_no_step(run, metrics, told):
    step = run.step
    with pytest.raises(rl.UsageError, match=told):
        run.log(metrics)
    assert run.step == step


def test_numbers_of_any_kind_are_logged(start, tmp_path):
    with start() as run:
        values = {"tensor": torch.tensor(2.0), "result": run._lanes.on("models", lambda: 3), "bool": True}
        run.log(values | {"array": np.float32(4)})
    (row,) = map(json.loads, next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines())
    assert {name: row[name] for name in (*values, "array")} == {
        "tensor": 2,
        "result": 3,
        "bool": 1,
        "array": 4,
    }


def test_a_state_that_no_checkpoint_restores_is_refused_when_it_is_saved(start):
    run = start()
    for state in ({"best": object()}, {"judge": len}, [1]):
        with refused(ErrorCode.INVALID_VALUE, flag="run.state"):
            run.save_state(state)
    run.save_state({"best": np.float64(0.5), "seen": {1, 2}}).result(60)
    assert run.load_state() == {"best": 0.5, "seen": {1, 2}}


def test_no_verb_waits_for_itself(run, groups, start):
    inner = lambda queries, prompts, labels: [run.sample(["Sam"]).result(60)] * 6
    with pytest.raises(rl.UsageError, match="cannot call verbs of its own run"):
        run.reward(groups, inner).result(60)
    judge = start()  # another run may
    scored = run.reward(
        groups,
        lambda *texts: [len(judge.sample(["Sam"], n=i + 1).result(60)[0].trajectories) for i in range(6)],
    )
    assert rewards(scored.result(60)) == [1, 2, 3, 4, 5, 6]


def test_runs_in_one_process_do_not_end_each_other(start):
    score = lambda queries, prompts, labels: list(map(len, queries))
    one, other = start(), start()
    for run in (one, other, other):
        metrics = run.update(run.batch(run.reward(run.sample(QUESTIONS), score))).result(60)
        assert metrics["grad_norm"] > 0
        one.close()
    for verb in (
        one.sync,
        one.load_state,
        one.__enter__,
        partial(one.log, {}),
        partial(one.sample, QUESTIONS),
    ):
        with pytest.raises(rl.UsageError, match="this run is closed"):
            verb()


def test_samples_of_old_weights_are_told(start, capsys):
    run = start()
    note = "the engine samples with the weights of step 0; run.sync() sends it new ones"
    for step in range(5):
        groups = run.reward(run.sample(QUESTIONS), lambda *texts: range(12)).result(60)
        assert (note in capsys.readouterr().err) == (step == 3)
        run.log(run.update(run.batch(groups)), groups)
    run.close()


def test_a_critic_that_no_step_trains_is_told(start, capsys):
    run = start(**{"algo.advantage.estimator": "gae"})
    run.forward_backward(run.batch(run.reward(run.sample(QUESTIONS), lambda *texts: range(12))))
    run.optim_step().result(60)
    assert "run.update trains the critic too" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, code, place",
    [
        ({"placement": "cluster"}, ErrorCode.INVALID_VALUE, "placement"),
        ({"steps": 0}, ErrorCode.INVALID_VALUE, "steps"),
        ({"steps": "10"}, ErrorCode.INVALID_VALUE, "steps"),
        ({"actor": None}, ErrorCode.INVALID_VALUE, "actor"),
        ({"ckpt.output_dir": None}, ErrorCode.INVALID_VALUE, "ckpt.output_dir"),
        ({"actor.adam.lr": 1e-4}, ErrorCode.CONFLICT, "lr"),
    ],
)
def test_flags_that_are_none_are_told_before_anything_starts(start, flags, code, place):
    with refused(code, flag=place):
        start(**flags)


def test_a_flag_may_be_none_where_that_is_a_value(model, tmp_path):
    flags = {"actor": model, "rollout.stop": None, "ckpt.path": None, "ckpt.output_dir": tmp_path}
    config = read_settings(None, flags, steps=None, placement="local").config
    assert config.rollout.stop is None and config.ckpt.path is None


def test_a_value_may_look_like_a_flag(model):
    flags = {"actor": model, "rollout.stop": ["--end", "."]}
    invocation = read_settings(None, flags, steps=None, placement="local")
    assert invocation.config.rollout.stop == ("--end", ".")
    assert "--rollout.stop=--end ." in to_command(PPO, {"rollout.stop": ("--end", ".")})


def test_no_folder_is_called_like_the_home_of_a_shell(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rl.UsageError, match=r"--ckpt.output_dir ~/out: only a shell expands ~"):
        start(**{"ckpt.output_dir": "~/out"})
    run = start()
    (tmp_path / "file").touch()
    for folder, told in {
        "~/out": "only a shell expands ~;",
        "${HOME}/out": r"only a shell expands \$\{HOME\};",
        "runs/$USER": r"only a shell expands \$USER;",
        tmp_path / "file": "is a file; name a folder",
        None: "folder None: is empty; name a folder",
    }.items():
        with pytest.raises(rl.UsageError, match=told):
            run.export(folder)
    assert not (tmp_path / "~").exists()


@pytest.mark.processes
def test_a_program_without_with_is_finished_and_told_its_errors(model, tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(
        "import time\n"
        "import openrlhf as rl\n"
        f"run = rl.Run(actor={str(model)!r}, **{{'ckpt.output_dir': {str(tmp_path / 'out')!r}}})\n"
        "run.log({'loss': 1.0})\n"
        "wrong = run.reward(run.sample(['Sam'], n=1), lambda queries, prompts, labels: 1 / 0)\n"
        "while not wrong.done(): time.sleep(0.05)\n"
    )
    made = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert "run.close() was never called" in made.stderr, (made.returncode, made.stdout, made.stderr)
    assert "ZeroDivisionError" in made.stderr, made.stderr
    assert len(list(tmp_path.rglob("report.html"))) == 1


def test_a_result_that_was_not_awaited_is_told(run):
    result = run.sample(["Sam"], n=1)
    for use in (lambda: result[0], lambda: list(result), lambda: result["loss"]):
        with pytest.raises(TypeError, match=r"this is a Result: result\(\) waits for its value"):
            use()
    with pytest.raises(AttributeError, match=r"no trajectories: result\(\) waits"):
        result.trajectories  # noqa: B018
    assert len(result.result(60)[0].trajectories) == 1


def test_a_loop_evaluates_at_the_temperature_of_the_flags(start, capsys):
    """Without `eval.dataset`, which its calls of `evaluate` replace."""
    run = start(**{"eval.temperature": 0, "eval.n_samples_per_prompt": 1})
    assert "without --eval.dataset" not in capsys.readouterr().err
    answers: list[str] = []
    keep = lambda queries, prompts, labels: answers.extend(queries) or [1.0]
    for _ in range(2):  # with other seeds
        run.evaluate(["Sam has 4"], keep).result(60)
    assert answers[0] == answers[1]
    with refused(ErrorCode.CONFLICT, flag="--eval.temperature"):
        run.evaluate(["Sam has 4"], keep, n=2)
