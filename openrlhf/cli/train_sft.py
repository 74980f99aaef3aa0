"""Supervised fine-tuning: `python -m openrlhf.cli.train_sft`, or the same under torchrun or deepspeed."""

import sys
from collections.abc import Sequence

from openrlhf.config.commands import SFT
from openrlhf.config.parse import parse
from openrlhf.config.supervised import SFTConfig


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    config = parse(SFT, argv).config
    from openrlhf.cli.errors import short_errors

    with short_errors():
        run(config, argv)
        from openrlhf.engine.distributed import leave_distributed

        leave_distributed()


def run(config: SFTConfig, argv: Sequence[str] = ()) -> None:
    """Train, and write the model to `ckpt.output_dir`. On every rank, which stays in its process group."""
    check(config)
    from openrlhf.engine.deepspeed_engine import DeepSpeedEngine
    from openrlhf.engine.distributed import init_distributed, seed_everything
    from openrlhf.models.loading import load_causal_lm, load_tokenizer
    from openrlhf.models.policy import PolicyModel
    from openrlhf.objectives.sft import SFTObjective
    from openrlhf.trainer.checkpoints import CheckpointFolder
    from openrlhf.trainer.supervised import SupervisedTrainer

    init_distributed()
    seed_everything(config.train.seed, config.train.full_determinism_enable)
    tokenizer = load_tokenizer(
        config.model.model_name_or_path,
        flag="--model.model_name_or_path",
        use_fast=not config.data.disable_fast_tokenizer,
        chat_template=config.data.tokenizer_chat_template,
    )
    train_set, eval_set = build_datasets(config, tokenizer)
    windows = _windows(config, train_set, batch_size=config.train.batch_size, shuffle=True)
    engine = DeepSpeedEngine(
        lambda: PolicyModel(
            load_causal_lm(
                config.model.model_name_or_path,
                flag="--model.model_name_or_path",
                dtype=config.ds.param_dtype,
                attention=config.ds.attn_implementation,
                experts=config.ds.experts_implementation,
            )
        ),
        optim=config,
        ds=config.ds,
        total_steps=len(windows) * config.train.max_epochs,
        gradient_checkpointing=config.model.gradient_checkpointing_enable,
        reentrant=config.model.gradient_checkpointing_reentrant,
    )
    trainer = SupervisedTrainer(
        config=config,
        engine=engine,
        objective=SFTObjective(),
        windows=windows,
        eval_rows=_eval_rows(config, eval_set),
        checkpoints=CheckpointFolder(config.ckpt.path, config.ckpt),
        observer=None,
    )
    tag = trainer.checkpoints.latest() if config.ckpt.load_enable else None
    if tag is not None:
        trainer.resume(tag)
    if engine.rank == 0:
        trainer.observer = _observer(config, argv, resume_step=None if tag is None else trainer.step)
        trainer.observer.start(len(windows) * config.train.max_epochs, done=trainer.step)
        trainer.observer.message(
            f"{len(train_set)} samples, {sum(train_set.lengths)} tokens, {len(windows)} steps an epoch; "
            f"run folder {config.run_dir}"
        )
    try:
        trainer.fit()
    finally:
        if trainer.observer:
            trainer.observer.close()
    engine.export(config.ckpt.output_dir)
    if engine.rank == 0:
        tokenizer.save_pretrained(config.ckpt.output_dir)
        print(f"model saved to {config.ckpt.output_dir}", flush=True)


def check(config: SFTConfig) -> None:
    """Everything that can be wrong with files, before anything is loaded."""
    from openrlhf.datasets.sources import check_columns
    from openrlhf.models.loading import check_model

    check_model(config.model.model_name_or_path, "--model.model_name_or_path")
    columns = _columns(config)
    check_columns(
        config.data.dataset, flag="--data.dataset", required_columns=columns, split=config.data.dataset_split
    )
    if config.eval.dataset:
        check_columns(
            config.eval.dataset, flag="--eval.dataset", required_columns=columns, split=config.eval.split
        )


def build_datasets(config: SFTConfig, tokenizer):
    """The training set, and the evaluation set or None."""
    from openrlhf.datasets.sft import build_sft_samples
    from openrlhf.datasets.sources import load_rows

    def build(spec: str, flag: str, split: str, probs: str | None, max_samples: int | None):
        rows = load_rows(
            spec,
            flag=flag,
            required_columns=_columns(config),
            probs=probs,
            split=split,
            max_samples=max_samples,
            seed=config.train.seed,
        )
        return build_sft_samples(
            rows,
            tokenizer,
            input_key=config.data.input_key,
            output_key=config.data.output_key,
            apply_chat_template=config.data.apply_chat_template,
            input_template=config.data.input_template,
            multiturn=config.data.multiturn,
            pretrain=config.model.pretrain_mode_enable,
            max_len=config.data.max_len,
            bad_rows=config.data.bad_rows,
        )

    data, evaluation = config.data, config.eval
    train_set = build(
        data.dataset, "--data.dataset", data.dataset_split, data.dataset_probs, data.max_samples
    )
    if not evaluation.dataset:
        return train_set, None
    return train_set, build(
        evaluation.dataset, "--eval.dataset", evaluation.split, None, evaluation.max_samples
    )


def _columns(config: SFTConfig) -> dict[str, str | None]:
    return {"--data.input_key": config.data.input_key, "--data.output_key": config.data.output_key}


def _windows(config: SFTConfig, dataset, *, batch_size: int, shuffle: bool):
    import torch.distributed as dist

    from openrlhf.datasets.batches import Windows
    from openrlhf.types import PackedRow

    dynamic = config.train.dynamic_batch_enable
    return Windows(
        dataset,
        PackedRow.of,
        batch_size=batch_size,
        micro_batch_size=None if dynamic else config.train.micro_batch_size,
        max_tokens=config.train.max_tokens_per_gpu if dynamic else None,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        seed=config.train.seed,
        shuffle=shuffle,
    )


def _eval_rows(config: SFTConfig, eval_set):
    """The whole evaluation set as one batch."""
    if eval_set is None:
        return []
    (rows,) = _windows(config, eval_set, batch_size=len(eval_set), shuffle=False).epoch(0)
    return rows


def _observer(config: SFTConfig, argv: Sequence[str], resume_step: int | None):
    from openrlhf.config.parse import to_yaml
    from openrlhf.observe.observer import Observer
    from openrlhf.observe.run_folder import RunFolder

    folder = RunFolder.create(
        config.run_dir,
        config_yaml=to_yaml(config),
        argv=["python", "-m", "openrlhf.cli.train_sft", *argv],
        resume=resume_step is not None,
    )
    return Observer(folder, config.logger, resume_step=resume_step)


if __name__ == "__main__":
    main()
