"""Pytest plugins for mutants: one records the functions that tests run, one runs chosen tests in order."""

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest


class Coverage:
    """Records the functions of `package` that each test runs in this process, and those that fixtures run.

    A fixture may be shared by the tests after it, so its functions count for all tests of its file.
    """

    def __init__(self, package: Path) -> None:
        self.package = f"{package}/"
        self.tests: dict[str, tuple[float, list[str]]] = {}
        """Seconds and functions of each test that passed."""
        self.fixtures: set[str] = set()
        self.failed: list[str] = []
        self._codes: dict[int, CodeType] = {}  # hashing a code object takes longer than most calls

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        self._codes[id(code)] = code

    def _run(self) -> set[str]:
        codes, self._codes = self._codes.values(), {}
        return {
            f"{code.co_filename.removeprefix(self.package)}:{code.co_qualname.replace('<locals>.', '')}"
            for code in codes
            if code.co_filename.startswith(self.package) and code.co_name != "<module>"
        }

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        result = yield
        sys.settrace(None)
        threading.settrace(None)  # pyrefly: ignore[bad-argument-type]
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        functions = self._run()
        if report.when == "call" and report.passed:
            self.tests[report.nodeid] = report.duration, sorted(functions)
        else:
            self.fixtures |= functions
        if report.failed:
            self.failed.append(report.nodeid)


class FirstFailure:
    """Remembers the first test that fails."""

    failed: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Selection(FirstFailure):
    """Runs the given tests in the given order, and remembers the first that fails."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.order = {test: index for index, test in enumerate(tests)}
        self.ran = 0
        self.not_collected: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        name = lambda item: item.nodeid if item.nodeid in self.order else item.nodeid.partition("[")[0]
        items[:] = sorted(
            (item for item in items if name(item) in self.order), key=lambda item: self.order[name(item)]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        super().pytest_runtest_logreport(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_collected.append(report.nodeid)
