"""Supervised run without interruption, and the same one resumed in the middle of an epoch; reports what is
refused."""

import os
from pathlib import Path

from safetensors.torch import load_file

from openrlhf.backends.distributed import leave_distributed
from openrlhf.config.parse import parse
from openrlhf.loop.supervised.command import run
from openrlhf.loop.supervised.sft import SFTTask
from openrlhf.observability.trackers.metrics_file import read_metrics


def sft(flags: str) -> None:
    argv = flags.split()
    run(lambda: SFTTask, parse(SFTTask.command, argv).config, argv)


def main(spec: dict) -> dict:
    out, flags = Path(spec["out"]), f"{spec['flags']} --ckpt.path {spec['out']}/ckpt"
    sft(f"{flags} --ckpt.save_steps 2 --ckpt.output_dir {out}/whole --logger.run_dir {out}/whole/run")
    is_first = int(os.environ.get("RANK", 0)) == 0
    if is_first:
        (out / "ckpt" / "latest").write_text("global_step2")
    resume = f"{flags} --ckpt.load_enable --ckpt.output_dir {out}"
    resumed = f"{resume}/resumed --logger.run_dir {out}/resumed/run"
    sft(resumed)
    sft(f"{resume}/longer --logger.run_dir {out}/longer/run {spec['longer']}")
    refused = ""
    try:
        sft(f"{resumed} {spec['other']}")
    except ValueError as error:
        refused = str(error)
    report = {"refused": refused}
    if is_first:
        runs = [out / name for name in ("whole", "resumed")]
        weights = [load_file(folder / "adapter_model.safetensors") for folder in runs]
        report["differ"] = [name for name, w in weights[0].items() if not w.equal(weights[1][name])]
        report["losses"] = [
            {step: m["sft/loss"] for step, m in read_metrics(folder / "run" / "metrics.jsonl").items()}
            for folder in runs
        ]
        longer = read_metrics(out / "longer" / "run" / "metrics.jsonl")
        report["rates"] = {step: m["lr"] for step, m in longer.items()}
    leave_distributed()
    return report
