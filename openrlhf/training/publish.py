"""Publishes the saved model of a training command."""

import os
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub

from openrlhf.checkpoint.start import Config
from openrlhf.config.command import Command
from openrlhf.errors import ErrorCode, RunError, UsageError, describe, first_line, notify
from openrlhf.files import MODEL_FILES, READER_FILES
from openrlhf.observability.hooks.load import call, find_points
from openrlhf.observability.waits import waiting


def publish(config: Config, command: Command, *, base_model: str, datasets: str) -> None:
    """Has the model card of a saved model written (entry point `openrlhf.attached.model`), and with
    `ckpt.push_to_hub` uploads it. What fails is a warning, because the model is complete."""
    folder = config.ckpt.output_dir
    about = {"command": command.name, "method": command.summary}
    about |= {"base_model": base_model, "datasets": datasets.split(",")}
    for point in find_points("model"):
        try:
            call(point, folder, config.run_dir, **about)
        except UsageError as error:
            notify(f"warning: {describe(error)}")
    print(f"model saved to {folder}", flush=True)
    if repository := config.ckpt.push_to_hub:
        try:
            with waiting(f"uploading to {repository}"):
                address = push_to_hub(folder, repository)
        except RunError as error:
            notify(f"warning: {describe(error)}")
        else:
            print(f"model uploaded to {address}", flush=True)


def push_to_hub(folder: str | os.PathLike, repository: str) -> str:
    """Uploads the model in a folder and returns the address. A new repository is private. The files replace
    the model that is there. Subfolders such as checkpoints and rollouts stay here. Raises RunError if the
    upload fails."""
    api, of_models = huggingface_hub.HfApi(), (*MODEL_FILES, *READER_FILES)
    ours = [path.name for path in Path(folder).iterdir() if path.is_file()]
    matches = lambda name, pattern: fnmatch(name, pattern) and name.count("/") == pattern.count("/")
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        there = api.list_repo_files(repository)
        api.upload_folder(
            repo_id=repository,
            folder_path=str(folder),
            commit_message="Model trained with openrlhf",
            allow_patterns=[*ours, "additional_chat_templates/*"],
            delete_patterns=[name for name in there if any(matches(name, of) for of in of_models)],
        )
    except Exception as error:  # the hub, the network and the disk raise errors of many types
        raise RunError(
            ErrorCode.NOT_WRITABLE,
            f"the upload failed: {first_line(error)}\n"
            f"The model is complete in {folder}. Log in with `hf auth login`, then run\n"
            f"`hf upload {repository} {folder} --exclude '*/*'`.",
            flag="--ckpt.push_to_hub",
            value=repository,
        ) from error
    return str(address)
