"""A damaged checkpoint is never loaded: an older one is taken, and the reason is told."""

import pytest

LORA = "--ds.lora.rank 4 --ds.lora.dropout 0.5"


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        pytest.param(f"{LORA} --ds.zero_stage 2", 15, id="sample"),
        pytest.param(f"{LORA} --ds.zero_stage 2", 250, id="adapters", marks=pytest.mark.slow),
        pytest.param("--ds.zero_stage 2", 250, id="all weights", marks=pytest.mark.slow),
        pytest.param("--ds.zero_stage 0", 250, id="stage 0", marks=pytest.mark.slow),
        pytest.param("--train.backend torch", 250, id="torch", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(3600)
def test_no_damage_leads_to_a_wrong_state(task, run_worker, record_property, flags: str, count: int) -> None:
    common = (
        f"--model.model_name_or_path {task.model} --data.dataset {task.sft} --data.output_key output "
        "--data.apply_chat_template --data.max_samples 24 --data.max_len 96 --train.batch_size 4 "
        "--train.micro_batch_size 4 --train.max_epochs 100 --adam.lr 1e-2 --ds.param_dtype fp32 "
    )
    (report,) = run_worker("load_damaged", 1, flags=common + flags, count=count, seed=1)
    assert len(report["damages"]) == count
    wrong = sum(not found["right"] for found in report["damages"])
    older = sum(found["tag"] == "global_step4" for found in report["damages"])
    record_property("figure", f"{count} damages: {wrong} wrong states, {older} times the older one")
    for found in report["damages"]:
        of_pointer = found["damage"].endswith(" latest")
        assert found["right"], found
        if not found["changed"]:
            assert (found["tag"], found["reasons"]) == ("global_step6", []), found
        elif not of_pointer:
            name = found["damage"].partition(" ")[2]
            assert found["tag"] == "global_step4", found
            (reason,) = found["reasons"]
            assert reason.startswith("global_step6: ") and (name in reason or name == "manifest.json"), found
        elif found["tag"] == "global_step6":
            assert found["reasons"], found
    _, reason, *_ = report["refused"].splitlines()
    assert reason.startswith("  global_step6: ") and " 0 bytes " in reason
