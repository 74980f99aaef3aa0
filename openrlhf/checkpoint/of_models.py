"""The origin of a run's checkpoints, and the space that they need, both from its models."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.checkpoint.folder import CheckpointFolder
from openrlhf.checkpoint.run_fingerprint import BUT_GENERATION, RunFingerprint
from openrlhf.checkpoint.start import DAY, Config
from openrlhf.config.command import Command
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.files import nearest
from openrlhf.memory.sizes import ITEM_BYTES, trained_item
from openrlhf.memory.training import state_bytes
from openrlhf.models.configurations import model_fingerprint
from openrlhf.models.ends import GENERATION
from openrlhf.models.sizes import learner_size
from openrlhf.text import Calendar


def build_run_fingerprint(
    config: Config, command: Command, models: Mapping[str, Sequence[str]], more: Mapping[str, str]
) -> RunFingerprint:
    """Builds the fingerprint of a run. `models`: flag -> paths of models; `more`: further entries of
    `RunFingerprint.contents`."""

    def checksum(flag: str, paths: Sequence[str], **options: Any) -> str:
        return f"checksum {' '.join(model_fingerprint(path, flag, **options)[:16] for path in paths)}"

    fingerprints = {flag: checksum(flag, paths) for flag, paths in models.items()}
    fingerprints |= {
        flag + BUT_GENERATION: checksum(flag, paths, without=(GENERATION,)) for flag, paths in models.items()
    }
    return RunFingerprint.of(command.name, config, {**fingerprints, **more, DAY: str(Calendar.today)})


class _Sizes(NamedTuple):
    """Bytes that one model of a run writes."""

    state: int
    """Its part of a checkpoint to resume from."""
    export: int
    """Hugging Face model, or the adapter alone."""


def check_space(config: Config, checkpoints: CheckpointFolder, total_steps: int) -> None:
    """Raises UsageError if a disk is too small for the final model, for the checkpoints that the run keeps,
    with their Hugging Face copies, and for the one that it is writing."""
    ckpt, sizes = config.ckpt, _sizes(config)
    policy = sizes["policy"]
    checkpoint = sum(size.state for size in sizes.values()) * (not ckpt.disable_ds)
    checkpoint += policy.export * ckpt.save_hf
    count = min(ckpt.max_num + 1, total_steps // ckpt.save_steps) if ckpt.save_steps > 0 else 0
    count += bool(count) and config.keeps_best
    final = sum(size.export for size in list(sizes.values())[: len(config.exports)])
    needs = {"--ckpt.path": (ckpt.folder, count * checkpoint), "--ckpt.output_dir": (ckpt.output_dir, final)}
    disks = {flag: nearest(folder).stat().st_dev for flag, (folder, _) in needs.items()}
    for flag, (folder, needed) in needs.items():
        if not needed:
            continue
        needed = sum(bytes_ for other, (_, bytes_) in needs.items() if disks[other] == disks[flag])
        free = shutil.disk_usage(nearest(folder)).free
        if disks[flag] == disks["--ckpt.path"]:
            free += checkpoints.num_bytes()
        if needed > free:
            kept = f"{count} checkpoints of about {checkpoint / 1e9:.2g} GB, counting the one being written, "
            text = (
                f"the run needs room for {(kept + 'and ') * bool(count)}a final model of about "
                f"{final / 1e9:.2g} GB, and {free / 1e9:.2g} GB are free.\nFree space, lower --ckpt.max_num, "
                "or name another folder."
            )
            raise UsageError(ErrorCode.NOT_WRITABLE, text, flag=flag, value=folder)


def _sizes(config: Config) -> dict[str, _Sizes]:
    """Returns the sizes of the policy or the only model, and of the critic if there is one."""
    ds, backend = config.ds, config.train.backend
    each = trained_item(ds, backend) + state_bytes(ds, backend)
    sizes = {}
    for role in config.trained_models:
        size = learner_size(config, role)
        trained = size.trained(ds)
        average = 4 * trained * (role == "policy" and config.averages)
        export = ITEM_BYTES[ds.param_dtype] * (trained if ds.lora.rank else size.parameters)
        sizes[role] = _Sizes(each * trained + average, export)
    return sizes
