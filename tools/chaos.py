"""Injects many faults into jobs, and prints a table of the outcomes: `make chaos`.

    python tools/chaos.py [--only damages kills-sft ...] [--kills 50] [--rl-kills 3] [--stops 200]

Every row of the table is a test, which `make test` runs with smaller numbers. Exits with 1 if one fails. On
two cores the defaults take about 40 minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
JOBS = "tests/e2e/test_chaos.py::test_a_disturbed_job_ends_as_one_that_was_left_alone"
DISK = "tests/e2e/test_chaos.py::test_a_full_disk_costs_no_checkpoint_and_no_model"
DAMAGES = "tests/e2e/test_damaged_checkpoints.py::test_no_damage_leads_to_a_wrong_state"
NAN = "tests/e2e/test_not_finite.py"


class Member(NamedTuple):
    """A row of the table."""

    target: str
    """Number of the row in the list of targets."""
    what: str
    tests: tuple[str, ...]


MEMBERS = {
    "kills-sft": Member("T2", "kill -9 of SFT, resumed", (f"{JOBS}[sft]",)),
    "kills-dpo": Member("T2", "kill -9 of DPO, resumed", (f"{JOBS}[dpo]",)),
    "kills-rm": Member("T2", "kill -9 of a reward model, resumed", (f"{JOBS}[rm]",)),
    "kills-later": Member("T2", "kill -9 of SFT with --ckpt.async_save", (f"{JOBS}[sft saving later]",)),
    "kills-ppo": Member("T2", "kill -9 of PPO, resumed", (f"{JOBS}[ppo]",)),
    "kills-async": Member("T2", "kill -9 of asynchronous PPO, resumed", (f"{JOBS}[async ppo]",)),
    "stops": Member("T3", "SIGTERM to SFT, resumed", (f"{JOBS}[stop]",)),
    "disk": Member(
        "T4", "a full disk in a save or an export", (f"{DISK}[deepspeed-100]", f"{DISK}[torch-100]")
    ),
    "damages": Member(
        "T5",
        "a damaged file of a checkpoint",
        tuple(f"{DAMAGES}[{name}]" for name in ("adapters", "all weights", "stage 0", "torch")),
    ),
    "fuzz": Member(
        "T12",
        "a command with mistakes",
        ("tests/contracts/test_fuzz.py::test_a_mistake_is_refused_in_words[10000]",),
    ),
    "nan": Member("T13", "NaN in each kind of tensor of a step", (NAN,)),
}


def main() -> None:
    options = _options()
    environment = os.environ | {
        "CHAOS_KILLS": str(options.kills),
        "CHAOS_RL_KILLS": str(options.rl_kills),
        "CHAOS_STOPS": str(options.stops),
    }
    print("| target | fault | figure | test | seconds |\n|---|---|---|---|---|", flush=True)
    failed = False
    for name in options.only or MEMBERS:
        member = MEMBERS[name]
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, f"--junit-xml={report}", "--timeout=7200", *member.tests],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
            )
            cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
        seconds = sum(float(case.get("time", 0)) for case in cases)
        print(f"| {member.target} | {member.what} | {_figure(cases)} | {name} | {seconds:.0f} |", flush=True)
        if done.returncode:
            failed = True
            print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr, flush=True)
    sys.exit(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Injects faults in numbers.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MEMBERS, help=f"of {', '.join(MEMBERS)}")
    parser.add_argument("--kills", type=int, default=50, help="kills of each supervised job (default: 50)")
    parser.add_argument("--rl-kills", type=int, default=3, help="kills of each RL job (default: 3)")
    parser.add_argument("--stops", type=int, default=200, help="SIGTERMs (default: 200)")
    return parser.parse_args()


def _figure(cases: list[ET.Element]) -> str:
    """Returns the figures that the tests recorded, or the number of tests that passed."""
    figures = [
        p.get("value", "") for case in cases for p in case.iter("property") if p.get("name") == "figure"
    ]
    wrong = sum(case.find(kind) is not None for case in cases for kind in ("failure", "error"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    verdict = f"{wrong} of {len(cases)} tests FAILED" if wrong else f"{len(cases) - skipped} tests passed"
    return "; ".join([*figures, verdict, *([f"{skipped} skipped"] if skipped else [])])


if __name__ == "__main__":
    main()
