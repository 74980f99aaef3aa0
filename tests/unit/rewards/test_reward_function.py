import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop
from records import trajectory
from refusals import refused

from openrlhf.agents.base import Reward, RewardError
from openrlhf.errors import ErrorCode
from openrlhf.observability.rollout_metrics import rollout_metrics
from openrlhf.rewards import process
from openrlhf.rewards.function import RewardFunction, check_reward_file
from openrlhf.user_file import ImportTimeout, UserFiles

pytestmark = pytest.mark.processes


def reward(value, score=None, **logs):
    return Reward(reward=value, score=value if score is None else score, extra_logs=logs)


@pytest.fixture
def function_of(tmp_path):
    """Returns function_of(source, **options) for a file reward.py; the functions are closed after a test."""
    path, made = tmp_path / "reward.py", []

    def make(source, **options):
        path.write_text(source)
        made.append(RewardFunction(str(path), **{"timeout": 30.0} | options))
        return made[-1]

    yield make
    for function in made:
        function.close()


def ask(function, labels, query="x"):
    """Sends texts of 0, 1, ... characters together; returns the rewards, or the errors in their place."""

    async def together():
        calls = [function(query * i, "", label) for i, label in enumerate(labels)]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


def ask_in_turn(function, count) -> list:
    """Sends one sample after the other; returns the rewards, or the errors in their place."""

    async def in_turn():
        answers = []
        for i in range(count):
            answers += await asyncio.gather(function(f"query {i}", "prompt", ""), return_exceptions=True)
        return answers

    return asyncio.run(in_turn())


def test_every_machine_has_the_function_of_the_one_where_the_run_started(tmp_path):
    """A machine may have another file of that name, or none."""
    path = tmp_path / "ours.py"
    path.write_text(source := "def reward_func(queries, prompts, labels):\n    return [1.0]\n")
    files = UserFiles.of(str(path), None)
    assert files.here(str(path)) == str(path)
    path.write_text("def reward_func(queries, prompts, labels):\n    return [0.0]\n")
    copy = files.here(str(path))
    assert copy != str(path) and Path(copy).name == "ours.py" and Path(copy).read_text() == source
    path.unlink()
    assert files.here(str(path)) == copy
    function = RewardFunction(copy, timeout=60)
    assert asyncio.run(function("", "", None)) == reward(1.0)
    function.close()


def test_the_program_of_a_loop_does_not_run_again(function_of, monkeypatch, tmp_path):
    """It may be without `if __name__ == "__main__"`; multiprocessing runs it in each new process."""
    program, main = tmp_path / "loop.py", sys.modules["__main__"]
    program.write_text("raise SystemExit('the program runs again')")
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(program), raising=False)
    function = function_of("def reward_func(queries, prompts, labels):\n    return [2.0]\n")
    assert ask(function, [""]) == [reward(2.0)]
    assert main.__file__ == str(program)


USER_FILE = """
import numpy, os, sys, time
from openrlhf.agents.base import RewardError

class Unpicklable(Exception):
    def __init__(self, one, two):
        self.lock = open(os.devnull)

def reward_func(queries, prompts, labels):
    fate = labels[0]
    if fate == "hang":
        time.sleep(60)
    if fate == "crash":
        os._exit(7)
    if fate == "exit":
        sys.exit("enough")
    if fate == "raise":
        raise KeyError("no such answer")
    if fate == "unpicklable":
        raise Unpicklable(1, 2)
    if fate == "refuse":
        raise RewardError("the judge is out")
    if fate == "nan":
        return [float("nan")]
    if fate == "lazy":
        return (1 / 0 for query in queries)
    if fate == "array":
        return {"rewards": [1.0], "extra_logs": numpy.ones(2)}
    if fate == "two":
        return [1.0, 2.0]
    return {"rewards": [len(queries[0]) - len(prompts[0])], "extra_logs": {"pid": os.getpid()}}
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "user_reward.py"
    path.write_text(USER_FILE)
    function = RewardFunction(str(path), timeout=1)
    yield function
    function.close()


def call(function, label, query="prompt and answer", prompt="prompt"):
    async def ask():
        return await function(query, prompt, label)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("fate", "text"),
    [
        ("raise", r"^reward_func raised KeyError: 'no such answer'\nTraceback(.|\n)*user_reward.py"),
        ("unpicklable", "^reward_func raised Unpicklable: "),
        ("exit", "^reward_func raised SystemExit: enough\n"),
        ("refuse", "^the judge is out$"),
        ("hang", r"user_reward.py: reward_func took longer than --reward.timeout 1 s"),
        ("crash", r"user_reward.py: reward_func's process died with exit code 7"),
        ("nan", r"rewards that are not finite: \[nan\]"),
        ("two", "2 rewards for 1 samples"),
        ("lazy", r"^reward_func raised ZeroDivisionError: division by zero\nTraceback(.|\n)*user_reward.py"),
        ("array", r"^reward_func returned extra_logs that are not a dict: \[1.0, 1.0\]"),
    ],
)
def test_a_call_fails_alone(function, fate, text):
    with pytest.raises(RewardError, match=text):
        call(function, fate)
    assert call(function, "fine").reward == len(" and answer")


def test_calls_side_by_side(function_of):
    """There are two workers; the failure of one call does not touch the others."""
    fates = ["fine", "hang", "fine", "raise", "fine"]
    answers = ask(function_of(USER_FILE, timeout=1, num_workers=2), fates)
    found = [a.reward if isinstance(a, Reward) else type(a) for a in answers]
    assert found == [0.0, RewardError, 2.0, RewardError, 4.0]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import no_such_package\ndef reward_func(queries, prompts, labels): return [1.0]",
            r"line 1: ModuleNotFoundError: .*no_such_package",
        ),
        ("def reward_func(queries, prompts, labels, *, limit): return [limit]", r"required .*'limit'"),
    ],
)
def test_each_call_of_a_file_that_cannot_be_used_is_told_why(function_of, source, text):
    function = function_of(source)
    for _ in range(2):
        with pytest.raises(RewardError, match=text):
            call(function, "")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def reward(queries): pass\nLIMIT = 3", "the file has no reward_func (its functions: reward)"),
        ("", "the file has no reward_func (its functions: none)"),
        ("reward_func = 3", "the file has no reward_func"),
        ("x = 1\ndef reward_func(queries:\n    return", "line 2: SyntaxError: '(' was never closed"),
        ("x = 1\nimport no_such_package", "line 2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import json\n\njson.loads('{')", "line 3: JSONDecodeError: Expecting property name"),
        ("raise SystemExit(3)", "line 1: SystemExit: 3"),
        ("import os\nos._exit(3)", "the process that imported the file died with exit code 3"),
        ("def reward_func(queries, prompts): pass", "reward_func(queries, prompts) cannot be called"),
        ("def reward_func(q, p, l, *, limit): pass", "argument: 'limit'"),
        # in another order, and those of other libraries: each argument would silently be another one
        ("def reward_func(prompts, queries, l): pass", "its prompts would be the queries"),
        (
            "def reward_func(completions, **kwargs): pass",
            "has arguments of TRL or ms-swift; here query.remove",
        ),
        ("def reward_func(data_source, solution_str, ground_truth, extra_info=None): pass", "of verl; here"),
        ("def reward_func(queries, labels, prompts): pass", "its labels would be the prompts"),
    ],
)
def test_files_that_cannot_be_reward_files(tmp_path, monkeypatch, source, text):
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(source)
    with refused(ErrorCode.USER_CODE, flag="--reward.remote_url", value="reward.py") as error:
        check_reward_file("reward.py", "--reward.remote_url")
    assert text in str(error.value)
    assert len(str(error.value).splitlines()) <= 2
    if "reward_func" in text:
        assert "reward_func(queries, prompts, labels)" in str(error.value)


def test_a_file_that_takes_long_to_import_is_remarked_upon(tmp_path):
    """A run waits for it, with its model and all that it has started."""
    path, alive = tmp_path / "reward.py", tmp_path / "alive"
    path.write_text(f"import pathlib, time\ntime.sleep(1)\npathlib.Path({str(alive)!r}).touch()\n")
    remark = check_reward_file(str(path), "--reward.remote_url", limit=0.3)
    assert remark.startswith(f"--reward.remote_url {path}: ") and "0.3 s" in remark
    time.sleep(0.6)
    assert not alive.exists()  # the function's process has ended


def test_an_import_that_does_not_end_ends_the_run(function_of, tmp_path, monkeypatch):
    """The error is no RewardError, which would be a sample's own."""
    monkeypatch.setattr(process, "IMPORT_DEADLINE", 0.3)
    function = function_of("import time\ntime.sleep(60)\n")
    with pytest.raises(ImportTimeout, match=rf"^{tmp_path}/reward.py: .* 0.3 s"):
        call(function, "")


@pytest.mark.parametrize(
    "source",
    [
        "def reward_func(queries, prompts, labels, **kwargs): return [len(kwargs)]",
        "def reward_func(queries, prompts, labels, *, limit=0): return [limit]",
        "def reward_func(*args): return [len(args) - 3]",
        "async def reward_func(queries, prompts, labels): return [0]",
        "reward_func = lambda queries, prompts, labels: [0]",
        "from elsewhere import judge as reward_func",
        "from elsewhere import *",
        "import asyncio\nasync def reward_func(q, p, l):\n    await asyncio.sleep(0)\n    return [0]",
        "import torch\ndef reward_func(queries, prompts, labels): return torch.zeros(1)",
    ],
)
def test_functions_of_every_form_are_called_with_three_lists(tmp_path, monkeypatch, function_of, source):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "elsewhere.py").write_text("def judge(q, p, l): return [0]\nreward_func = judge")
    function = function_of(source)
    assert check_reward_file(str(tmp_path / "reward.py"), "--reward.remote_url") == ""
    assert call(function, "") == reward(0.0)


LOGGING_FILE = """
import numpy, torch

def reward_func(queries, prompts, labels):
    numbers = [float(label) for label in labels]
    return {
        "rewards": torch.tensor(numbers)[:, None],
        "extra_logs": {
            "scalar": 2,
            "flag": True,
            "list": numbers,
            "tensor": torch.tensor(numbers),
            "column": torch.tensor(numbers)[:, None],
            "array": numpy.array(numbers),
            "truths": [number > 1 for number in numbers],
            "no_dimension": torch.tensor(5),
            "one_for_all": torch.tensor([6.0]),
        },
    }
"""


def test_extra_logs_of_every_form_become_metrics_over_samples(function_of):
    rewards = ask(function_of(LOGGING_FILE, batch_size=3), range(4))  # batches of 3 and 1
    trajectories = [
        trajectory(r.reward, prompt_id=i, score=r.score, extra_logs=r.extra_logs)
        for i, r in enumerate(rewards)
    ]
    assert [t.reward for t in trajectories] == [0, 1, 2, 3]
    assert [t.extra_logs["truths"] for t in trajectories] == [0, 0, 1, 1]
    metrics = rollout_metrics(trajectories, version=0)
    means = {"scalar": 2, "flag": 1, "truths": 0.5, "no_dimension": 5, "one_for_all": 6}
    means |= dict.fromkeys(("list", "tensor", "column", "array"), 1.5)
    assert {name: metrics[f"rollout/{name}"] for name in means} == means


BATCH_FILE = """
import os, signal, sys, time

def reward_func(queries, prompts, labels):
    with open(LOG, "a") as log:
        log.write(f"{len(queries)}\\n")
    if "hang" in labels:
        time.sleep(60)
    if "kill" in labels:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in labels:
        raise KeyError("no such answer")
    if "short" in labels:
        return [1.0] * (len(queries) - 1)
    nan = float("nan")
    rewards = [nan if label == "nan" else len(query) for query, label in zip(queries, labels)]
    return {"rewards": rewards, "extra_logs": {"batch": len(queries), "pid": os.getpid()}}
"""


@pytest.fixture
def ask_batches(function_of, tmp_path):
    """Returns ask_batches(fates, **options) -> the answers of BATCH_FILE and the sizes of calls."""
    log = tmp_path / "calls.txt"

    def asked(fates, **options):
        function = function_of(BATCH_FILE.replace("LOG", repr(str(log))), **{"timeout": 1.0} | options)
        return ask(function, fates), [int(line) for line in log.read_text().splitlines()]

    return asked


@pytest.mark.parametrize(("options", "sizes"), [({}, [1] * 10), ({"batch_size": 4}, [4, 4, 2])])
def test_samples_that_finish_together_are_handed_over_in_calls_of_the_batch_size(ask_batches, options, sizes):
    answers, asked = ask_batches([""] * 10, **options)
    assert [a.reward for a in answers] == list(range(10))
    assert asked == sizes
    assert [a.extra_logs["batch"] for a in answers] == [size for size in sizes for _ in range(size)]


def test_samples_that_finish_while_the_function_works_wait_and_go_together(function_of):
    function = function_of(
        "import time\n"
        "def reward_func(queries, prompts, labels):\n"
        "    time.sleep(0.3)\n"
        "    return {'rewards': [0] * len(queries), 'extra_logs': {'batch': len(queries)}}\n",
        batch_size=16,
    )

    async def late():
        first = asyncio.create_task(function("first", "", ""))
        while not function._processes[0]._pipe:  # the worker is busy
            await asyncio.sleep(0.01)
        later = []
        for _ in range(5):
            later.append(asyncio.create_task(function("later", "", "")))
            await asyncio.sleep(0.01)  # longer than the window
        return [await task for task in (first, *later)]

    assert [a.extra_logs["batch"] for a in asyncio.run(late())] == [1, 5, 5, 5, 5, 5]


@pytest.mark.parametrize(
    ("fate", "text"),
    [
        ("hang", "took longer than --reward.timeout 1 s"),
        ("kill", "process died with exit code -9"),
        ("raise", "KeyError: 'no such answer'"),
        ("nan", "not finite: [nan]"),
    ],
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_one_bad_sample_of_a_batch_fails_alone(ask_batches, fate, text, num_workers):
    fates = ["", "", "", "", "", fate, "", ""]
    answers, sizes = ask_batches(fates, batch_size=8, num_workers=num_workers)
    bad = answers.pop(5)
    assert isinstance(bad, RewardError) and text in str(bad)
    assert [a.reward for a in answers] == [0, 1, 2, 3, 4, 6, 7]
    alone = fate in ("hang", "kill")  # each further one would take another time limit, or another start
    assert sorted(sizes, reverse=True) == ([8, *[1] * 8] if alone else [8, 4, 4, 2, 2, 1, 1])


def test_values_of_another_number_than_the_samples_fail_the_call(ask_batches):
    """Halving would find a call that they fit, and give the values of others to its samples."""
    answers, sizes = ask_batches(["", "", "", "short", ""], batch_size=4)
    assert [str(a) for a in answers[:4]] == ["reward_func returned 3 rewards for 4 samples"] * 4
    assert answers[4].reward == 4 and sizes == [4, 1]


def test_a_function_prints_what_the_output_cannot_encode(function_of, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    source = "def reward_func(queries, prompts, labels):\n    print('\\u4f60')\n    return [1.0]\n"
    function = function_of(source)
    assert asyncio.run(function("", "", None)) == reward(1.0)


def test_a_function_may_empty_its_lists(function_of):
    function = function_of("""
def reward_func(queries, prompts, labels):
    rewards = []
    while queries:
        rewards.append(float(queries.pop(0) == labels.pop(0)))
    return rewards
""")
    assert asyncio.run(function("a", "", "a")) == reward(1.0)


def test_a_call_that_needs_too_much_memory_fails_alone(function_of):
    function = function_of(
        "def reward_func(queries, prompts, labels):\n"
        "    return [float(len(bytearray(int(label)))) for label in labels]\n",
        memory_gb=0.5,
        batch_size=4,
    )
    answers = ask(function, ("1", "2", str(10**9), "3"))
    assert "MemoryError" in str(answers.pop(2))
    assert [a.reward for a in answers] == [1, 2, 3]


def test_a_function_that_normalises_over_a_call_is_told_which_flag_fills_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # this process imports the file, and adds its folder
    path = tmp_path / "reward.py"
    path.write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels):\n"
        "    rewards = torch.tensor([float(len(query)) for query in queries])\n"
        "    return (rewards - rewards.mean()) / (rewards.std() + 1e-8)\n"
    )
    function, runner = process.load_reward_func(str(path)), asyncio.Runner()
    with runner:
        alone = process._call(function, "reward_func", ["a"], [""], [None], runner)
        several = process._call(function, "reward_func", ["a", "abc"], [""] * 2, [None] * 2, runner)
    assert "[nan]" in alone and "one sample" in alone
    assert "--reward.batch 64" in alone
    assert [r.reward for r in several] == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize(("batch_size", "samples"), [(1, 200), (16, 60)])
def test_deaths_fail_nobody_else(ask_batches, batch_size, samples):
    """There are two workers; one sample of twenty kills the process that works on it."""
    fates = ["kill" if i % 20 == 7 else "" for i in range(samples)]
    answers, _ = ask_batches(fates, num_workers=2, batch_size=batch_size, timeout=30)
    failed = [i for i, a in enumerate(answers) if isinstance(a, RewardError)]
    assert failed == list(range(7, samples, 20))
    assert all("exit code -9" in str(answers[i]) for i in failed)
    assert all(a.reward == i for i, a in enumerate(answers) if i not in failed)


def test_deaths_and_hangs_among_each_other(ask_batches):
    fates = [{3: "hang", 11: "kill", 17: "nan"}.get(i % 20, "") for i in range(80)]
    answers, _ = ask_batches(fates, num_workers=4, timeout=4)
    kinds = {"hang": "longer than", "kill": "exit code -9", "nan": "not finite"}
    for i, (fate, answer) in enumerate(zip(fates, answers, strict=True)):
        assert kinds[fate] in str(answer) if fate else answer.reward == i


def test_a_worker_that_is_killed_while_idle_costs_nothing(function_of):
    function = function_of("import os\ndef reward_func(q, p, l): return [os.getpid()]")
    pid = int(call(function, "").reward)
    os.kill(pid, signal.SIGKILL)
    while function._processes[0]._process.is_alive():
        time.sleep(0.01)
    assert call(function, "").reward not in (pid, 0)


def test_a_file_that_kills_its_process_is_told_of(function_of, tmp_path):
    function = function_of("import os\nos._exit(3)\ndef reward_func(q, p, l): return [1.0]", batch_size=4)
    errors = ask(function, [""] * 4)
    told = f"{tmp_path}/reward.py: the process that imported the file died with exit code 3"
    assert [str(error) for error in errors] == [told] * 4
    assert len({id(error) for error in errors}) == 4


def test_what_a_hanging_call_started_is_killed_with_it(function_of, tmp_path):
    pid_file = tmp_path / "pid"
    function = function_of(
        "import pathlib, subprocess\n"
        "def reward_func(queries, prompts, labels):\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        f"    pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "    child.wait()\n",
        timeout=0.5,
    )
    with pytest.raises(RewardError, match="took longer"):
        call(function, "")
    function.close()
    status, deadline = Path("/proc", pid_file.read_text(), "status"), time.monotonic() + 10
    while is_alive(status) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(status)


def is_alive(status):
    return status.exists() and "State:\tZ" not in status.read_text()


def test_closing_frees_those_who_wait(function_of):
    function = function_of("import time\ndef reward_func(q, p, l): time.sleep(60)", timeout=60)

    async def close():
        calls = [asyncio.create_task(function("", "", "")) for _ in range(3)]
        while not function._processes[0]._pipe:
            await asyncio.sleep(0.01)
        function.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [type(answer) for answer in asyncio.run(close())] == [asyncio.CancelledError] * 3


def test_an_asynchronous_function_keeps_what_belongs_to_its_loop(function_of):
    function = function_of(
        "import asyncio\n"
        "loops = []\n"
        "async def reward_func(queries, prompts, labels):\n"
        "    loops.append(asyncio.get_running_loop())\n"
        "    return [len({id(loop) for loop in loops})]\n"
    )
    assert [answer.reward for answer in ask_in_turn(function, 3)] == [1, 1, 1]


def test_a_file_is_a_module_like_any_other(function_of):
    """Dataclasses look their module up, pickle too, and an enum may name a log."""
    function = function_of(
        "from __future__ import annotations\n"
        "import pickle\n"
        "from dataclasses import dataclass\n"
        "from enum import StrEnum\n"
        "class Log(StrEnum):\n"
        "    LENGTH = 'length'\n"
        "@dataclass\n"
        "class Verdict:\n"
        "    value: float\n"
        "def reward_func(queries, prompts, labels):\n"
        "    verdict = pickle.loads(pickle.dumps(Verdict(0.5)))\n"
        "    return {'rewards': [verdict.value], 'extra_logs': {Log.LENGTH: len(queries[0])}}\n"
    )
    assert ask_in_turn(function, 1) == [reward(0.5, length=7.0)]


def test_a_death_is_noticed_though_a_child_lives_on(function_of):
    """The child has the pipe too, so its end is not the end of the pipe."""
    function = function_of(
        "import os, signal, time\n"
        "def reward_func(queries, prompts, labels):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        timeout=50.0,
    )
    (error,) = ask_in_turn(function, 1)
    assert isinstance(error, RewardError) and "exit code -9" in str(error)


def test_a_worker_whose_import_fails_does_not_get_all_the_work(function_of, tmp_path):
    function = function_of(
        "import os\n"
        f"os.mkdir({str(tmp_path / 'only_once')!r})\n"
        "def reward_func(queries, prompts, labels):\n"
        "    return [1.0]\n",
        num_workers=2,
    )
    answers = ask_in_turn(function, 8)
    assert [isinstance(answer, RewardError) for answer in answers] == [False, True] * 4


def test_nothing_survives_a_parent_that_is_killed(tmp_path):
    """A call that never ends does not survive either."""
    file, pid = tmp_path / "reward.py", tmp_path / "pid"
    file.write_text(
        "import os\n"
        "def reward_func(queries, prompts, labels):\n"
        f"    open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "    while True: pass\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import asyncio\n"
        "from openrlhf.rewards.function import RewardFunction\n"
        "async def main():\n"
        f"    await RewardFunction({str(file)!r}, timeout=500.0)('query', 'prompt', '')\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)])
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = Path(f"/proc/{pid.read_text()}/status")
    assert is_alive(status)
    process.kill()
    process.wait()
    while is_alive(status) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(status)


ECHO_FILE = """
def reward_func(queries, prompts, labels):
    if labels[0] == "raise":
        raise ValueError(prompts[0])
    return {"rewards": [len(query) for query in queries], "extra_texts": {"judge": prompts}}
"""


@pytest.mark.parametrize(
    ("size", "loop"),
    [
        (1_000, uvloop.new_event_loop),
        (300_000, uvloop.new_event_loop),
        (300_000, asyncio.new_event_loop),
        (30_000_000, uvloop.new_event_loop),
        pytest.param(30_000_000, asyncio.new_event_loop, marks=pytest.mark.slow),
    ],
)
def test_calls_of_any_size_are_answered_in_the_loops_of_engines(function_of, size, loop):
    """vLLM's processes run uvloop, which makes non-blocking whatever it watches. Texts: of a request, of a
    judge, of an exception."""
    function, text = function_of(ECHO_FILE, timeout=60, batch_size=2), "x" * size

    async def large():
        answers = [await function(text, "", ""), await function("", text, "")]
        with pytest.raises(RewardError) as raised:
            await function("", text, "raise")
        return [*answers, *await asyncio.gather(function(text, "a", ""), function("x", text, ""))], raised

    with asyncio.Runner(loop_factory=loop) as runner:
        answers, raised = runner.run(large())
    assert [a.reward for a in answers] == [size, 0, size, 1]
    assert [a.extra_texts["judge"] for a in answers] == ["", text, "a", text]
    assert f"ValueError: {text}\n" in str(raised.value)


def test_the_time_limit_holds_while_a_large_call_is_sent(function_of):
    function = function_of(ECHO_FILE, timeout=1)

    async def stopped():
        await function("", "", "")
        process = function._processes[0]._process
        os.kill(process.pid, signal.SIGSTOP)  # reads nothing any more
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"took longer than --reward.timeout 1 s"):
            await function("x" * 10_000_000, "", "")
        return time.monotonic() - began, await function("x" * 10_000_000, "", "")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seconds, answer = runner.run(stopped())
    assert seconds >= 1 and answer.reward == 10_000_000


WRITES_TO_THE_PIPE = """
import inspect, time
from openrlhf.rewards import process

def reward_func(queries, prompts, labels):
    if queries == ["query 1"]:
        pipe = inspect.currentframe().f_back.f_back.f_locals["pipe"]
        WRITE
    return [1.0]
"""
HALF_AN_ANSWER = "pipe.sendall(process._message(2, 'x' * 10_000_000)[:-1]); time.sleep(60)"
ANOTHER_ANSWER = "pipe.sendall(process._message(1, [process.Reward(reward=7.0, score=7.0)]))"


@pytest.mark.parametrize(
    ("write", "text"),
    [(HALF_AN_ANSWER, "took longer than --reward.timeout 2 s"), (ANOTHER_ANSWER, "answered another call")],
)
def test_half_an_answer_and_an_answer_to_another_call_are_refused(function_of, write, text):
    """The time limit holds while a large answer is received, and the numbers of call and answer must be the
    same, whatever writes to the pipe."""
    function = function_of(WRITES_TO_THE_PIPE.replace("WRITE", write), timeout=2.0)
    first, second, third = ask_in_turn(function, 3)
    assert (first.reward, third.reward) == (1, 1)
    assert isinstance(second, RewardError) and text in str(second)


FORKS = [
    ("os.fork() or sys.exit(3)", 1),
    ("os.fork() or sys.exit(3)", 4),
    ("os.fork()", 1),
    ("os.fork()", 4),
    ("os.fork() or int('x')", 1),
    ("assert os.waitstatus_to_exitcode(os.waitpid(os.fork() or sys.exit(3), 0)[1]) == 3", 1),
    ("[os.fork() for _ in range(3)]", 4),
    ("os.fork() or time.sleep(0.1)", 1),
]


@pytest.mark.parametrize(("fork", "batch_size"), FORKS)
def test_only_the_process_that_was_asked_answers(function_of, fork, batch_size):
    """A child of the function ends where the function ends, so each sample has its own reward."""
    function = function_of(
        "import os, sys, time\n"
        "def reward_func(queries, prompts, labels):\n"
        f"    {fork}\n"
        "    return [float(query) for query in queries]\n",
        timeout=20,
        batch_size=batch_size,
    )

    async def in_fours():
        answers = []
        for start in range(0, 12, 4):
            calls = [function(str(i), "", "") for i in range(start, start + 4)]
            answers += await asyncio.wait_for(asyncio.gather(*calls), 30)
        return [answer.reward for answer in answers]

    assert asyncio.run(in_fours()) == list(range(12))


def test_a_child_that_the_import_leaves_behind_takes_no_calls(function_of):
    source = "import os\nown = os.fork()\ndef reward_func(q, p, l): return [own and float(q[0][6:])]"
    assert [answer.reward for answer in ask_in_turn(function_of(source), 4)] == [0, 1, 2, 3]


POOLS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def score(text):
    return float(len(text))

def reward_func(queries, prompts, labels):
    with ProcessPoolExecutor(1) as pool:
        first = list(pool.map(score, queries))
    with multiprocessing.get_context(labels[0]).Pool(1) as pool:
        return {"rewards": first, "scores": pool.map(score, queries)}
"""


@pytest.mark.parametrize("method", [None, "forkserver"])
def test_a_function_uses_pools_of_processes(function_of, method):
    assert call(function_of(POOLS, timeout=60), method, query="four") == reward(4.0)
