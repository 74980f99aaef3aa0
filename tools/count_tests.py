"""Counts the tests in the reports of several runs of pytest: the last line of `make test`."""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def main() -> None:
    print(f"all tests: {total([Path(path) for path in sys.argv[1:]])}")


def total(reports: list[Path]) -> str:
    """Adds up reports in JUnit's format, as `pytest --junit-xml` writes them."""
    found = Counter()
    for report in reports:
        for suite in ElementTree.parse(report).iter("testsuite"):
            found.update(
                {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
            )
    failed = found["failures"] + found["errors"]
    passed = found["tests"] - failed - found["skipped"]
    return f"{passed} passed, {failed} failed, {found['skipped']} skipped"


if __name__ == "__main__":
    main()
