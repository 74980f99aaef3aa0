"""A supervised run resumes to the last bit, and refuses a checkpoint of another run."""

import pytest
from refusals import changes

from openrlhf.backends.lr_schedule import lr_schedule
from openrlhf.config.sections import OptimConfig


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        pytest.param("--ds.zero_stage 2", 2, id="2 ranks"),
        pytest.param("--ds.zero_stage 0", 1, id="1 rank", marks=pytest.mark.slow),
        pytest.param(
            "--ds.zero_stage 2 --ds.ring_attn_size 2", 2, id="2 ranks that share rows", marks=pytest.mark.slow
        ),
        pytest.param("--train.backend torch", 1, id="1 rank, torch"),
        pytest.param("--train.backend torch", 2, id="2 ranks, torch", marks=pytest.mark.slow),
    ],
)
def test_dropout_goes_on_where_it_was(task, run_worker, layout: str, num_ranks: int) -> None:
    """A run with LoRA dropout, resumed after 2 of 6 steps, ends with the weights of the uninterrupted run.
    With more epochs it follows the learning rates of that length; with other data, batch size or learning
    rate it is refused, with a list of all differences."""
    flags = (
        f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        "--data.apply_chat_template --data.max_samples 20 --data.max_len 128 --train.batch_size 8 "
        "--train.micro_batch_size 2 --train.max_epochs 2 --adam.lr 1e-2 --lr_warmup_ratio 0 "
        f"--ds.lora.rank 4 --ds.lora.dropout 0.5 --ds.param_dtype fp32 {layout}"
    )
    reports = run_worker(
        "resume",
        num_ranks,
        flags=flags,
        longer="--train.max_epochs 4",
        other="--train.batch_size 16 --data.max_samples 18 --adam.lr 2e-2 --train.micro_batch_size 1",
    )
    whole, resumed = reports[0]["losses"]
    assert list(whole) == [str(step) for step in range(1, 7)]
    assert resumed == {step: loss for step, loss in whole.items() if step in "3456"}
    assert reports[0]["differ"] == []
    rate = lr_schedule(OptimConfig(lr_warmup_ratio=0), total_steps=12)
    expected = {str(step): pytest.approx(1e-2 * rate(step - 1)) for step in range(3, 13)}
    assert reports[0]["rates"] == expected
    for report in reports:
        head, *_ = report["refused"].splitlines()
        assert head.startswith("--ckpt.load_enable ") and "global_step2: " in head
        *differences, data = changes(report["refused"])
        assert differences == [
            ("--adam.lr", "0.01", "0.02"),
            ("--data.max_samples", "20", "18"),
            ("--train.batch_size", "8", "16"),
        ]
        assert data.name == "--data.dataset" and data.before.startswith(f"{task.sft} (20 ")
