"""What every training command does once it knows its data and before it loads a model: it takes its folders
for itself and settles what it resumes from."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from openrlhf.config.command import Command
from openrlhf.config.fields import values_of
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.supervised import SupervisedConfig
from openrlhf.files import holds_model

if TYPE_CHECKING:
    from openrlhf.training.checkpoints import CheckpointFolder
    from openrlhf.training.origin import Origin
    from openrlhf.training.ppo import PPOTrainer
    from openrlhf.training.supervised import SupervisedTrainer

Config = PPOConfig | SupervisedConfig


def origin_of(
    config: Config, command: Command, models: Mapping[str, Sequence[str]], more: Mapping[str, str]
) -> "Origin":
    """`models`: flag -> the paths that it names; `more`: what else is compared, see Origin.contents."""
    from openrlhf.models.loading import model_fingerprint
    from openrlhf.training.origin import Origin

    prints = {
        flag: f"checksum {' '.join(model_fingerprint(path, flag)[:16] for path in paths)}"
        for flag, paths in models.items()
    }
    return Origin.of(command.name, config, {**prints, **more})


def check_output(config: Config, *, resumes: bool) -> None:
    """Raises ValueError where the run would write over a finished model, unless it goes on with the run that
    wrote it. Never may it write over a model that it reads: an adapter would take its base's place."""
    ckpt = config.ckpt
    folders = {"--ckpt.output_dir": ckpt.output_dir}
    if isinstance(config, PPOConfig) and config.uses_critic and config.critic.save_value_network:
        folders["--critic.save_value_network"] = config.critic_output_dir
    for flag, folder in folders.items():
        for key, path in _models(config):
            if Path(path).exists() and Path(path).resolve() == Path(folder).resolve():
                raise ValueError(
                    f"{flag} {folder}: is the model of --{key}.\nName another --ckpt.output_dir."
                )
        if not (resumes or ckpt.overwrite) and holds_model(folder):
            raise ValueError(
                f"{flag} {folder}: holds a model, which this run would write over.\nName another "
                "--ckpt.output_dir, go on with its run by --ckpt.load_enable, or write over it with "
                "--ckpt.overwrite."
            )


def _models(config: Config) -> list[tuple[str, str]]:
    """Lists the flags that name models, with each name."""
    flags = {key: value for key, value in values_of(config).items() if key.endswith("model_name_or_path")}
    return [(key, path) for key, value in flags.items() if value for path in value.split(",")]


def begin(config: Config, checkpoints: "CheckpointFolder", held: ExitStack) -> str | None:
    """Take the run's folders until `held` ends, say what there is to resume from, and return its tag. On the
    one rank that speaks for a run. ValueError where a living run has a folder, or where the checkpoint is of
    another run."""
    from openrlhf.observability.lock import locked

    if config.ckpt.is_used:
        held.enter_context(locked(config.ckpt.folder, flag="--ckpt.path"))
    held.enter_context(locked(config.run_dir, flag="--logger.run_dir"))
    tag, lines = checkpoints.choose()
    check_output(config, resumes=tag is not None)
    for line in lines:
        print(line, flush=True)
    return tag


def make_room(config: Config, checkpoints: "CheckpointFolder", tag: str | None) -> None:
    """Just before a run from the beginning trains: checkpoints of another run move aside where it will write
    its own."""
    if tag is None and config.ckpt.save_steps > 0:
        for line in checkpoints.set_aside():
            print(line, flush=True)


def position(trainer: "PPOTrainer | SupervisedTrainer") -> str:
    """In which step a run that ends here is, and how to go on."""
    step, total = trainer.step, trainer.total_steps
    where = f"in step {step + 1} of {total}" if step < total else f"after step {step}, the last one"
    return f"{where}; {trainer.checkpoints.standing()}"
