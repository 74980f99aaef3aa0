"""Commands with random mistakes: each is accepted, or refused in words with exit code 2 (0 for help)."""

import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_bad_input import COMMANDS, MAINS, files, good_flags  # noqa: F401  the fixture

from openrlhf.config import commands
from openrlhf.config.fields import list_flags
from openrlhf.config.parse import parse

pytestmark = pytest.mark.processes
ODD = (
    *("", " ", "-1", "0", "1e400", "nan", "inf", "-inf", "1e-400", "9" * 20, "9" * 5000, "0x10", "1_000"),
    *("True", "none", "null", "[]", "{}", "[1,2]", "a,b", "../../etc/passwd", "/dev/null", "/", ".", "~"),
    *("$(touch owned)", "`id`", "; rm -rf x", "x" * 100_000, "x" * 200 + "/" + "y" * 200, "\u202eabc"),
    *("\x1b[31mred", "\ufffd", "💥", "--", "-", "-h", "=", "a=b", "!!python/object/apply:os.system ['id']"),
    *("http://", "http://[", "hf://x", "file:///etc/passwd", "0.5,0.5", "1.5", "-0.0", "1/3", "{}{}", "%s%n"),
    *("a\nb", "3.0", "true", "False", "fp8", "\ud800", "~nobody_of_this_name/x", "@", "a@b@c", ",", ",,"),
    *("reasoning_gym:", "reasoning_gym:x?size=-1", "\x00", "a" * 300 + ".jsonl"),
)
YAML = (
    *("- 1\n- 2\n", "a: &a [x]\nb: *a\n", "a: &a [*a]\n", "\x00", "{" * 2000, "a: 1\na: 2\n"),
    *("\ufeffmodel: 1\n", "&x [*x, *x]", "!!python/object/apply:os.system ['touch owned']\n"),
    *("5", "", "null", ": :", "- " * 5000),
    "a:\n" + "".join(" " * k + "a:\n" for k in range(1, 300)),
)


MANY = int(os.environ.get("CHAOS_MISTAKES", 1000))
"""Number of commands of the exhaustive test. `make chaos` sets it by an environment variable."""


class Accepted(BaseException):
    """Raised where a command would start to load data and models."""


@pytest.fixture
def stopped_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def accept(*args: object, **options: object) -> None:
        raise Accepted

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # "~" as a dataset: a folder of millions of files takes minutes
    monkeypatch.setattr("openrlhf.loop.supervised.run.SupervisedRun", accept)
    monkeypatch.setattr("openrlhf.loop.rl_command.run", accept)
    monkeypatch.setattr("openrlhf.rewards.function.check_reward_file", lambda *args, **options: "")


def mistaken(rng: random.Random, good: Sequence[str], keys: Sequence[str], folder: Path) -> list[str]:
    """Returns the words of a command with one to three mistakes."""
    argv = list(good)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        flags = [i for i, word in enumerate(argv) if word.startswith("--") and len(word) > 3]
        i, key = rng.choice(flags or [0]), rng.choice(keys)
        match rng.choice(("add", "add", "add", "value", "drop", "repeat", "swap", "yaml", "typo", "join")):
            case "add":
                argv += [f"--{key}", *([rng.choice(ODD)] if rng.random() < 0.9 else [])]
            case "value":
                argv[min(i + 1, len(argv) - 1)] = rng.choice(ODD)
            case "drop":
                argv.pop(rng.randrange(len(argv)))
            case "repeat":
                argv += argv[i : i + 2]
            case "swap":
                j, k = rng.randrange(len(argv)), rng.randrange(len(argv))
                argv[j], argv[k] = argv[k], argv[j]
            case "typo":
                word, k = argv[i], rng.randrange(1, max(2, len(argv[i])))
                argv[i] = word[:k] + rng.choice("abcxyz._-=") + word[k + rng.randrange(2) :]
            case "join":
                argv[i : i + 2] = ["=".join(argv[i : i + 2])]
            case "yaml":
                value = rng.choice(ODD)[:200]
                section, _, name = key.partition(".")
                own = (
                    f"{key}: {value}\n",
                    f"{section}:\n  {name or 'x'}: {value!r}\n",
                    f"{key}: [1, {{b: 2}}]\n",
                )
                kinds = (f"{key}: 2026-01-01\n", f"{key}: !!binary aGVsbG8=\n", f"{key}: 0o17\n")
                text = rng.choice((*YAML, *own, *kinds))
                (folder / "mistaken.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
                argv += ["--config", str(folder / "mistaken.yaml")]
    return argv


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(150, 0, id="few"),
        pytest.param(MANY // 2, 1, marks=pytest.mark.slow, id="many"),
        pytest.param(MANY // 2, 2, marks=pytest.mark.slow, id="as many again"),
    ],
)
def test_a_mistake_is_refused_in_words(
    files,  # noqa: F811
    stopped_early,
    tmp_path,
    capsys,
    count,
    seed,
    record_property,
) -> None:
    output = ["--ckpt.output_dir", f"{tmp_path}/out", "--logger.run_dir", f"{tmp_path}/run"]
    good = {name: [*good_flags(name, files), *output] for name in COMMANDS}
    types = {command.name: command for command in commands.COMMANDS}
    keys = {name: list(list_flags(type(parse(types[name], good[name]).config))) for name in COMMANDS}
    for name in COMMANDS:
        with pytest.raises(Accepted):
            MAINS[name](good[name])
    rng = random.Random(int(os.environ.get("FUZZ_SEED", seed)))
    capsys.readouterr()
    wrong: list[str] = []
    for _ in range(count):
        name = rng.choice(COMMANDS)
        argv = mistaken(rng, good[name], keys[name], tmp_path)
        changed = [word[:80] for word in argv if word not in good[name]]
        started, code = time.process_time(), None
        try:
            MAINS[name](argv)
        except Accepted:
            pass
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"[:200]
        took = time.process_time() - started
        out, err = capsys.readouterr()
        right = code in (None, 0, 2) and (code == 2) == ("error: " in err)
        clean = "Traceback" not in err and "\x1b" not in out + err and len(err) < 20_000
        if not (right and clean and took < 1):
            wrong.append(
                f"{name} {changed}: code {code}, {took:.1f} s of CPU, {len(err)} characters: {err[:300]!r}"
            )
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    record_property("figure", f"{count - len(wrong)} of {count} in words, exit 0 or 2")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:40]])
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["x" * 100_000, "\ud800"], ids=["long", "surrogate"])
@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("config", SystemExit),
        ("ckpt.output_dir", SystemExit),
        ("model.model_name_or_path", (SystemExit, Accepted)),  # it may be a name on the hub
        ("data.dataset", (SystemExit, Accepted)),
    ],
)
def test_a_name_that_no_file_can_have_is_no_crash(
    files,  # noqa: F811
    stopped_early,
    key,
    error,
    name,
    capsys,
) -> None:
    with pytest.raises(error) as end:
        MAINS["sft"]([*good_flags("sft", files), f"--{key}", name])
    if error is SystemExit:
        assert end.value.code == 2 and f"error: --{key} " in capsys.readouterr().err


def test_open_brackets_are_refused_before_the_parser_counts_them(
    files,  # noqa: F811
    stopped_early,
    tmp_path,
    capsys,
) -> None:
    (tmp_path / "deep.yaml").write_text("{" * 100_000)
    with pytest.raises(SystemExit) as end:
        MAINS["sft"]([*good_flags("sft", files), "--config", str(tmp_path / "deep.yaml")])
    assert end.value.code == 2 and "100 brackets" in capsys.readouterr().err
