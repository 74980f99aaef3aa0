"""What only a CUDA device shows: flash attention over packed rows, half-precision heads, weights by IPC."""

import shlex
from pathlib import Path

import pytest
import torch

from openrlhf.algos.logprobs import linear_log_probs
from openrlhf.models.loading import load_causal_lm
from openrlhf.models.policy import PolicyModel
from openrlhf.observe.trackers import read_metrics
from openrlhf.tasks.prepare import prepare
from openrlhf.types import PackedRow, Sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_flash_attention_keeps_sequences_apart(tmp_path: Path) -> None:
    """A packed row in bf16 scores every sequence as a row of its own does."""
    task = prepare(tmp_path, num_pretrain=8, num_sft=8, num_prompts=8, num_eval=8)
    model = PolicyModel(
        load_causal_lm(str(task.model), flag="--model", dtype="bf16", attention="auto")
    ).cuda()
    random = torch.Generator().manual_seed(0)
    samples = []
    for length in (5, 130, 64, 2, 33):
        mask = torch.ones(length, dtype=torch.bool)
        mask[0] = False
        samples.append(Sample(token_ids=torch.randint(3, 300, (length,), generator=random), action_mask=mask))
    with torch.no_grad():
        packed = model(PackedRow.of(samples).to("cuda")).log_probs
        alone = torch.cat([model(PackedRow.of([s]).to("cuda")).log_probs for s in samples])
    torch.testing.assert_close(packed, alone, atol=2e-2, rtol=0)


def test_log_probs_of_a_half_precision_head() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 1000, (300,), device="cuda")
    log_probs, entropy = linear_log_probs(hidden, weight, targets, with_entropy=True, chunk=64)
    (log_probs.mean() + entropy.mean()).backward()
    wide_hidden, wide_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    reference = (wide_hidden @ wide_weight.T).log_softmax(-1)
    wanted = reference.gather(-1, targets[:, None])[:, 0], -(reference.exp() * reference).sum(-1)
    (wanted[0].mean() + wanted[1].mean()).backward()
    torch.testing.assert_close(log_probs, wanted[0], atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(hidden.grad.float(), wide_hidden.grad, atol=2e-3, rtol=5e-2)
    torch.testing.assert_close(weight.grad.float(), wide_weight.grad, atol=2e-3, rtol=5e-2)


@pytest.mark.parametrize("stage", [2, 3])
def test_hybrid_engine_on_one_gpu(tmp_path: Path, stage: int) -> None:
    """Trainer and engine share the GPU, sleep in turns, and weights go by IPC."""
    from openrlhf.cli.train_ppo_ray import run
    from openrlhf.config.commands import PPO
    from openrlhf.config.parse import parse

    task = prepare(tmp_path / "task", num_pretrain=8, num_sft=8, num_prompts=32, num_eval=8)
    argv = shlex.split(
        f"--actor.model_name_or_path {task.model} --data.prompt_dataset {task.prompts} "
        f"--data.label_key label --data.apply_chat_template --data.max_len 96 "
        f"--reward.remote_url {task.reward} --rollout.max_new_tokens 16 "
        f"--algo.advantage.estimator reinforce --rollout.batch_size 8 --rollout.n_samples_per_prompt 2 "
        f"--train.batch_size 16 --train.max_steps 2 --train.colocate_all --actor.num_gpus_per_node 1 "
        f"--vllm.enable_sleep --vllm.enforce_eager --vllm.gpu_memory_utilization 0.3 --ds.enable_sleep "
        f"--ds.zero_stage {stage} --ckpt.output_dir {tmp_path / 'policy'} --logger.run_dir {tmp_path / 'run'}"
    )
    run(parse(PPO, argv).config, argv)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for step in (1, 2):
        assert metrics[step]["mismatch/abs_diff_mean"] < 2e-2
