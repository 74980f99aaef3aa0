"""The output file of batch inference: it grows row by row, survives a kill, and ends up complete and sorted.

Rank 0 appends to the file itself, rank N to `FILE.rankN.jsonl`. `merge` brings them together. Scored answers
become rows {"input", "output", "reward", ...} for the next round of training.
"""

import glob
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from openrlhf.api import ErrorCode, UsageError, write_atomically

Row = dict[str, Any]
Key = tuple[int, int]
"""(prompt_id, sample_index)"""


class ResultFile(AbstractContextManager["ResultFile"]):
    """The file that one rank appends to."""

    def __init__(self, path: str | Path, rank: int = 0) -> None:
        """Drops a half-written last line, which a killed run leaves."""
        path = Path(path)
        self._path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        self._file.truncate(_whole_lines(self._path))

    def append(self, rows: Iterable[Row]) -> None:
        """Appends rows and flushes them to the operating system."""
        self._file.write("".join(_line(row) for row in rows).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def finished(path: str | Path) -> dict[Key, Row]:
    """Returns the rows of all ranks so far, by key. Raises UsageError for a line that is not such a row."""
    rows: dict[Key, Row] = {}
    for file in _files(Path(path)):
        whole = file.read_bytes()[: _whole_lines(file)]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                rows[row["prompt_id"], row["sample_index"]] = row
            except (ValueError, TypeError, KeyError) as error:
                text = "not a row that batch_inference wrote. Remove the line, or the file."
                raise UsageError(ErrorCode.INVALID_ROW, text, value=file, row=number) from error
    return rows


def merge(path: str | Path) -> list[Row]:
    """Merges the rows of all ranks into one sorted file, removes the others' files, and returns the rows."""
    path = Path(path)
    rows = [row for _, row in sorted(finished(path).items())]
    write_rows(path, rows)
    for file in _files(path)[1:]:
        file.unlink()
    return rows


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Replaces the file by these rows atomically: a killed process leaves the file as it was."""
    write_atomically(Path(path), map(_line, rows))


def check_origin(path: str | Path, meta_path: str | Path, origin: Mapping[str, Any]) -> None:
    """Raises UsageError if the file at `path` has another origin. `origin`: name -> JSON value, for
    everything that determines the rows."""
    error = partial(UsageError, ErrorCode.OTHER_RUN, flag="--output_path", value=path)
    if not Path(meta_path).exists():
        if _files(Path(path)):
            raise error(
                f"the file exists, but {meta_path}, which records how its rows were made,\ndoes not. "
                "Name another file, or remove this one."
            )
        return
    before = json.loads(Path(meta_path).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(origin))
    changed = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]
    if changed:
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        raise error(
            f"was made with other flags or rows: {'; '.join(changed[:3])}{more}.\n"
            f"Repeat that command to continue it, name another file, or remove it and {meta_path}."
        )


def write_origin(meta_path: str | Path, origin: Mapping[str, Any]) -> None:
    Path(meta_path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(meta_path), [json.dumps(origin, indent=1), "\n"])


def _files(path: Path) -> list[Path]:
    others = sorted(path.parent.glob(f"{glob.escape(path.name)}.rank*.jsonl"))
    return ([path] if path.exists() else []) + others


def _whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def keep_best(rows: Sequence[Row]) -> list[Row]:
    """Rejection sampling: returns each input's answer with the highest reward, the first of equal ones."""
    return [max(group, key=_reward) for group in _by_input(rows)]


def write_rewards(rows: Sequence[Row], template: str, *, normalize: bool) -> list[Row]:
    """Conditional SFT: replaces every input by `template` with `{input}` and `{reward}` filled in, the reward
    with two decimals.

    normalize: rewards become z-scores over all rows, (reward - mean) / std with the population standard
    deviation; where all are equal they become 0.
    """
    rewards = [_reward(row) for row in rows]
    if normalize:
        mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
        rewards = [(reward - mean) / std if std else 0.0 for reward in rewards]
    return [
        row | {"input": _written(template, row["input"], reward), "reward": reward}
        for row, reward in zip(rows, rewards, strict=True)
    ]


def num_truncated(rows: Iterable[Row]) -> int:
    """Returns the number of answers that their token limit cut off."""
    return sum(row.get("finish_reason") == "length" for row in rows)


def best_and_worst(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """Iterative DPO: returns the best and the worst answer to each input, the first of equal ones, and the
    number of inputs dropped because their rewards are all equal."""
    pairs: list[Row] = []
    groups = _by_input(rows)
    for group in groups:
        best, worst = max(group, key=_reward), min(group, key=_reward)
        if _reward(best) > _reward(worst):
            asked = _asked(best)
            pairs.append(
                {
                    "prompt": asked.pop("input"),
                    "chosen": best["output"],
                    "chosen_reward": best["reward"],
                    "rejected": worst["output"],
                    "rejected_reward": worst["reward"],
                }
                | asked
            )
    return pairs, len(groups) - len(pairs)


def _by_input(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(_asked(row)), []).append(row)
    return list(groups.values())


def _asked(row: Row) -> Row:
    """Returns the input of a row, and its tools if it has some."""
    of_answer = ("output", "reward", "finish_reason", "prompt_id", "sample_index")
    return {key: value for key, value in row.items() if key not in of_answer}


_reward = itemgetter("reward")


def _written(template: str, prompt: Any, reward: float) -> str:
    if not isinstance(prompt, str):
        text = "inputs are messages, and a reward can only be written into text.\nUse prompts that are text."
        raise UsageError(ErrorCode.CONFLICT, text, flag="--post_processor", value="csft")
    two_decimals = f"{round(reward, 2) + 0.0:.2f}"  # never -0.00
    return prompt.join(piece.replace("{reward}", two_decimals) for piece in template.split("{input}"))
