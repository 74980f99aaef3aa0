"""Saves checkpoints and models while the system refuses files above a random number of bytes, as a full disk
does; reports what is left of each save."""

import random
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from openrlhf.backends.distributed import leave_distributed
from openrlhf.config.parse import parse
from openrlhf.errors import RunError
from openrlhf.loop.supervised.command import run
from openrlhf.loop.supervised.run import SupervisedRun
from openrlhf.loop.supervised.sft import SFTTask


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def error_within(num_bytes: int, call: Callable[[], object]) -> tuple[str, str]:
    """Returns the error's code and text, or the name of its class, if no file may be larger than
    `num_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        call()
    except RunError as error:
        return error.code, error.text
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", ""


def main(spec: dict) -> dict:
    out, flags, rng = Path(spec["out"]), spec["flags"].split(), random.Random(spec["seed"])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    places = ["--ckpt.output_dir", f"{out}/model", "--ckpt.path", f"{out}/sound"]
    first = [*flags, *places, "--ckpt.save_steps", "2", "--train.max_steps", "2"]
    run(lambda: SFTTask, parse(SFTTask.command, first).config)
    argv = [*flags, *places, "--ckpt.load_enable", "--train.max_steps", "100"]
    loaded = SupervisedRun(SFTTask(parse(SFTTask.command, argv).config), argv, ExitStack())
    checkpoints, report = loaded.checkpoints, []
    loaded.engine.load_checkpoint(f"{out}/sound", "global_step2")

    def save() -> None:
        with checkpoints.saving("global_step4") as folder:
            loaded.engine.save_checkpoint(str(folder), "global_step4", {"step": 4})

    for i in range(spec["count"]):
        place, call = (
            (out / "sound", save) if i % 4 else (out / "model", lambda: loaded.export(f"{out}/model"))
        )
        before = files_in(place)
        largest = max(len(content) for content in before.values())
        num_bytes = rng.randrange(largest) if i % 2 else int(largest ** rng.random())
        code, text = error_within(num_bytes, call)
        report.append(
            {
                "bytes": num_bytes,
                "code": code,
                "text": text,
                "is_unchanged": files_in(place) == before,
                "tag": checkpoints.find(),
            }
        )
    leave_distributed()
    return {"saves": report}
