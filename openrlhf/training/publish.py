"""Publishes the saved model of a training command."""

from openrlhf.checkpoint.start import Config
from openrlhf.config.command import Command
from openrlhf.errors import RunError, describe, notify


def publish(config: Config, command: Command, *, base_model: str, datasets: str) -> None:
    """Writes the model card of a saved model and, with `ckpt.push_to_hub`, uploads it. A failed upload is a
    warning, because the model is complete."""
    from pathlib import Path

    from openrlhf.observability.model_card import push_to_hub, write_model_card
    from openrlhf.observability.progress import waiting
    from openrlhf.observability.run_folder import RunFolder

    folder = config.ckpt.output_dir
    write_model_card(
        folder,
        RunFolder(Path(config.run_dir)),
        command=command.name,
        method=command.summary,
        base_model=base_model,
        datasets=datasets.split(","),
    )
    print(f"model saved to {folder}", flush=True)
    if repository := config.ckpt.push_to_hub:
        try:
            with waiting(f"uploading to {repository}"):
                address = push_to_hub(folder, repository)
        except RunError as error:
            notify(f"warning: {describe(error)}")
        else:
            print(f"model uploaded to {address}", flush=True)
