"""Computes steps of a recorded run with the code of two commits, and compares the results."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from openrlhf.api import ErrorCode, RunError, UsageError
from openrlhf.tools.replay.compare import Bisection, bisect
from openrlhf.tools.replay.rerun import PLACES, Rerun

PACKAGE = "openrlhf"
"""Folder of a commit that is unpacked and imported."""
ENTRY = f"{PACKAGE}/cli/replayed.py"
"""Program of a commit that computes steps again."""
GIT_TIMEOUT = 120.0
"""Maximum seconds that git may take to find a commit or to write its files."""


@dataclass(frozen=True)
class Commit:
    """A commit of the repository."""

    name: str
    """Name that the user gave: a hash, a branch, a tag or HEAD~3."""
    sha: str
    subject: str
    """First line of its message."""

    def __str__(self) -> str:
        known = self.sha[:12]
        return f"{known if self.sha.startswith(self.name) else f'{self.name} ({known})'}: {self.subject}"


@dataclass(frozen=True)
class Repository:
    """A clone of this package's repository. Nothing in it changes."""

    path: Path
    """The clone's folder `.git`. From a subfolder of the working tree, git would write only the subfolder's
    files."""

    @classmethod
    def around(cls, folder: Path | None) -> "Repository":
        """Returns the repository of a folder. `folder`: None for the folder of this package. Raises
        UsageError if there is no repository or git is not installed."""
        place = folder or Path(__file__).resolve().parents[2]
        if shutil.which("git") is None:
            text = "git, which reads the code of a commit, is not on PATH; install git"
            raise UsageError(ErrorCode.MISSING_PACKAGE, text, flag="--commits")
        if not place.is_dir():
            raise UsageError(ErrorCode.NOT_FOUND, "there is no such folder", flag="--repository", value=place)
        found = _git(place, "rev-parse", "--absolute-git-dir")
        if found.returncode:
            text = f"not in a readable git repository ({_last_line(found)}); name a clone of {PACKAGE}"
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="--repository", value=place)
        return cls(Path(found.stdout.rstrip("\n")))

    def commit(self, name: str) -> Commit:
        """Returns a commit. Raises UsageError if it is unknown, or if its code cannot compute steps again."""
        found = _git(self.path, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
        if found.returncode:
            text = f"{self.path} has no such commit (a shallow clone needs `git fetch --unshallow`)"
            raise UsageError(ErrorCode.NOT_FOUND, text, flag="--commits", value=name)
        sha = found.stdout.strip()
        if _git(self.path, "cat-file", "-e", f"{sha}:{ENTRY}").returncode:
            text = f"the commit is too old to compute steps again: it has no {ENTRY}"
            raise UsageError(ErrorCode.UNSUPPORTED, text, flag="--commits", value=name)
        subject = _git(self.path, "show", "--no-patch", "--format=%s", sha).stdout.strip()
        return Commit(name, sha, subject)

    def unpack(self, commit: Commit, folder: Path) -> None:
        folder.mkdir(parents=True)
        archive = folder / "package.tar"
        words = ["--format=tar", f"--prefix={PACKAGE}/", f"--output={archive}", f"{commit.sha}:{PACKAGE}"]
        made = _git(self.path, "archive", *words)
        if made.returncode:
            text = f"git could not write the commit's files: {_last_line(made)}"
            raise RunError(ErrorCode.UNREADABLE, text, flag="--commits", value=commit.name)
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        archive.unlink()


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=GIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        text = f"`git {words[0]}` did not end within {GIT_TIMEOUT:g} s"
        raise RunError(ErrorCode.UNREADABLE, text, flag="--repository", value=folder) from None


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    return answer.stderr.strip().rpartition("\n")[2]


def bisect_commits(reruns: Sequence[Rerun], commits: Sequence[Commit], repository: Repository) -> Bisection:
    """Computes the steps with the code of each commit, and compares the two results. Raises RunError, which
    names the commit, if a commit cannot compute the steps."""
    for rerun, commit in zip(reruns, commits, strict=True):
        assert rerun.code is not None  # the folder to which the code is written
        repository.unpack(commit, rerun.code)
        print(f"steps {rerun.start + 1} to {rerun.step} with {commit}", file=sys.stderr, flush=True)
        try:
            rerun.compute()
        except RunError as error:
            raise RunError(error.code, error.text, flag="--commits", value=commit.name) from error
    found = bisect(*(rerun.result for rerun in reruns))
    other = {name: values for name, values in found.settings.other.items() if name[2:] not in PLACES}
    computed = [stage for stage in found.equal if stage.step > reruns[0].start]
    return replace(found, settings=replace(found.settings, other=other), equal=computed)
