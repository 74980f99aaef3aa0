"""Injects many faults into jobs, and prints a table of the outcomes: `make chaos`.

    python tools/chaos.py [--only damages kills-sft ...] [--kills 50] [--rl-kills 3] [--stops 200]

Every row of the table is a test, which `make test-all` runs with smaller numbers. `--all` adds rows whose
numbers are fixed in their tests. The exit status is 1 if a test fails."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
JOBS = "tests/e2e/test_chaos.py::test_a_disturbed_job_ends_as_one_that_was_left_alone"
DISK = "tests/e2e/test_chaos.py::test_a_full_disk_costs_no_checkpoint_and_no_model"
DAMAGES = "tests/e2e/test_damaged_checkpoints.py::test_no_damage_leads_to_a_wrong_state"
FUZZ = "tests/contracts/test_fuzz.py::test_a_mistake_is_refused_in_words"
NAN = "tests/e2e/test_not_finite.py"
ENGINES = "tests/e2e/test_lost_engines.py"
DISPATCH = "tests/unit/rollout/test_dispatch.py"
LOST_CALLS = "test_of_lost_requests_and_answers_every_prompt_comes_back_once"
REWARDS = "tests/e2e/test_rl.py::test_a_faulty_reward_function_fails_the_samples_it_fails_on_and_no_others"
TARGETS = "tests/e2e/test_targets.py"


class Member(NamedTuple):
    """A row of the table."""

    target: str
    """Number of the row in the list of targets."""
    what: str
    """Description of the fault."""
    tests: tuple[str, ...]
    side_by_side: bool = False
    """Whether each test runs in a process of its own, all at the same time."""


MEMBERS = {
    "kills-sft": Member("T2", "kill -9 of SFT, resumed", (f"{JOBS}[sft]",)),
    "kills-dpo": Member("T2", "kill -9 of DPO, resumed", (f"{JOBS}[dpo]",)),
    "kills-rm": Member("T2", "kill -9 of a reward model, resumed", (f"{JOBS}[rm]",)),
    "kills-later": Member("T2", "kill -9 of SFT with --ckpt.async_save", (f"{JOBS}[sft saving later]",)),
    "kills-ppo": Member("T2", "kill -9 of PPO, resumed", (f"{JOBS}[ppo]",)),
    "kills-async": Member("T2", "kill -9 of asynchronous PPO, resumed", (f"{JOBS}[async ppo]",)),
    "stops": Member("T3", "SIGTERM to SFT, resumed", (f"{JOBS}[stop]",)),
    "disk": Member(
        "T4", "a full disk in a save or an export", (f"{DISK}[deepspeed-many]", f"{DISK}[torch-many]")
    ),
    "damages": Member(
        "T5",
        "a damaged file of a checkpoint",
        tuple(f"{DAMAGES}[{name}]" for name in ("adapters", "all weights", "stage 0", "torch")),
    ),
    "fuzz": Member(
        "T12",
        "a command with mistakes",
        (f"{FUZZ}[many]", f"{FUZZ}[as many again]"),
        side_by_side=True,
    ),
    "nan": Member("T13", "NaN in each kind of tensor of a step", (NAN,)),
}
MORE = {
    "engines": Member("T1", "kill -9 of an engine, 20 times", (f"{ENGINES}::test_twenty_deaths",)),
    "hangs": Member("T6", "SIGSTOP of an engine and of a rank", ("tests/e2e/test_hanging.py",)),
    "long-answers": Member(
        "T7",
        "an answer of an hour",
        ("tests/unit/cluster/test_watchdog.py::test_a_long_generation_is_never_given_up",),
    ),
    "lost-calls": Member("T8", "lost requests and lost answers", (f"{DISPATCH}::{LOST_CALLS}",)),
    "rewards": Member("T9", "a reward function that fails, hangs, dies or returns NaN", (REWARDS,)),
    "reward-servers": Member(
        "T10", "reward servers that stall or die", ("tests/unit/rewards/test_remote_reward.py",)
    ),
    "rows": Member("T11", "datasets with mistakes", ("tests/contracts/test_bad_input.py",)),
    "growth": Member(
        "T14", "steps of one run, whose memory must not grow", (f"{TARGETS}::test_a_long_run_does_not_grow",)
    ),
    "endings": Member(
        "T15",
        "ends of a run, which leave no process",
        ("tests/e2e/test_endings.py", "tests/e2e/test_head.py"),
    ),
    "resume": Member(
        "T16",
        "start of a resumed run",
        (f"{TARGETS}::test_a_resume_starts_as_soon_as_a_run_from_the_beginning",),
    ),
    "syncs": Member(
        "T22",
        "weights that get lost or changed in a sync",
        (
            "tests/e2e/test_faulty_syncs.py",
            "tests/unit/backends/test_weight_sync.py",
            "tests/unit/backends/test_stored_weights.py",
        ),
    ),
}
"""Rows that run only if `--only` names them, or with `--all`."""


def main() -> None:
    options = _options()
    environment = os.environ | {
        "CHAOS_KILLS": str(options.kills),
        "CHAOS_RL_KILLS": str(options.rl_kills),
        "CHAOS_STOPS": str(options.stops),
        "CHAOS_STEPS": str(options.steps),
        "CHAOS_SAVES": str(options.saves),
        "CHAOS_MISTAKES": str(options.mistakes),
    }
    print("| target | fault | figure | test | seconds |\n|---|---|---|---|---|", flush=True)
    failed = False
    members = MEMBERS | MORE
    for name in options.only or (members if options.all else MEMBERS):
        member = members[name]
        started = time.monotonic()
        groups = [(test,) for test in member.tests] if member.side_by_side else [member.tests]
        with ThreadPoolExecutor(len(groups)) as pool:
            found = list(pool.map(partial(_run, environment=environment), groups))
        cases = [case for of_group, _ in found for case in of_group]
        seconds = time.monotonic() - started
        print(f"| {member.target} | {member.what} | {_figure(cases)} | {name} | {seconds:.0f} |", flush=True)
        for error in filter(None, (error for _, error in found)):
            failed = True
            print(error, file=sys.stderr, flush=True)
    sys.exit(failed)


def _run(tests: Sequence[str], environment: Mapping[str, str]) -> tuple[list[ET.Element], str]:
    """Runs tests in one process. Returns their cases, and the end of the output if one fails."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"--junit-xml={report}", f"--basetemp={folder}/files", "--timeout=7200", *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    return cases, done.stdout[-6000:] + done.stderr[-2000:] if done.returncode else ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Injects many faults into jobs.")
    names = [*MEMBERS, *MORE]
    only = f"rows to run: {', '.join(names)} (default: {', '.join(MEMBERS)})"
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=only)
    parser.add_argument("--all", action="store_true", help=f"run all rows, also {', '.join(MORE)}")
    parser.add_argument("--kills", type=int, default=50, help="kills of each supervised job (default: 50)")
    parser.add_argument("--rl-kills", type=int, default=3, help="kills of each RL job (default: 3)")
    parser.add_argument("--stops", type=int, default=200, help="SIGTERMs to a job (default: 200)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of the row growth (default: 2000)")
    parser.add_argument(
        "--saves", type=int, default=100, help="saves to a full disk for each backend (default: 100)"
    )
    parser.add_argument(
        "--mistakes", type=int, default=10_000, help="commands with mistakes (default: 10000)"
    )
    return parser.parse_args()


def _figure(cases: list[ET.Element]) -> str:
    """Formats the figures that the tests recorded, and the numbers of tests by outcome."""
    figures = [
        p.get("value", "") for case in cases for p in case.iter("property") if p.get("name") == "figure"
    ]
    wrong = sum(case.find(kind) is not None for case in cases for kind in ("failure", "error"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    verdict = f"{wrong} of {len(cases)} tests FAILED" if wrong else f"{len(cases) - skipped} tests passed"
    return "; ".join([*figures, verdict, *([f"{skipped} skipped"] if skipped else [])])


if __name__ == "__main__":
    main()
