import multiprocessing
import sys

from openrlhf.backends.rollout import EngineOptions
from openrlhf.rollout.local import LocalEngine


class Spawning:
    """An engine that spawns a process, as vLLM's does on a GPU."""

    def __init__(self, options: EngineOptions) -> None:
        self.exit_code: int | None = None

    async def start(self, free: float | None) -> None:
        process = multiprocessing.get_context("spawn").Process(target=print)
        process.start()
        process.join(60)
        self.exit_code = process.exitcode

    def shutdown(self) -> None:
        pass


def test_the_program_of_a_loop_does_not_run_again_in_processes_of_its_engine(monkeypatch, tmp_path):
    """It may be without `if __name__ == "__main__"`."""
    program, main = tmp_path / "loop.py", sys.modules["__main__"]
    program.write_text("raise SystemExit('the program runs again')")
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", str(program), raising=False)
    form = {"dtype": "fp32", "max_len": 8, "seed": 0, "transfer_backend": "gloo", "on_gpu": False}
    engine = LocalEngine(EngineOptions(engine="transformers", model="", **form), Spawning)
    engine.close()
    assert engine.engine.exit_code == 0
    assert main.__file__ == str(program)
