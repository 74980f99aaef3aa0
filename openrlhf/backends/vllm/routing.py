"""Which experts read the tokens of each request, recorded inside a worker of vLLM.

vLLM tells it by itself (`enable_return_routed_experts`) where its second model runner is, which needs Triton:
on GPUs. On a CPU without a Triton of its own there is the first one. There the experts of each step are found
by vLLM's own capturer, and this does the rest: it says whose tokens they were.
"""

from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec


class RoutingRecorder:
    """Watches every step of a model runner from now on."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.execute_model = runner, runner.execute_model
        self.capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        bind_routed_experts_capturer(runner.model, self.capturer)
        self.blocks = runner.input_batch.block_table[_group_of_all_tokens(runner.kv_cache_config)]
        num_slots = runner.kv_cache_config.num_blocks * self.blocks.block_size
        nothing = self.capturer.snapshot_routing_data(0).numpy()
        self.of_slots = np.zeros((num_slots, *nothing.shape[1:]), nothing.dtype)
        """(S, M, K) of what is in each slot of the KV cache: a request may find its first tokens there."""
        self.of_requests: dict[str, list[np.ndarray]] = {}
        """By vLLM's name of the request: of its tokens so far, in parts."""
        runner.execute_model = self._execute

    def _execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = self.execute_model(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._record(scheduler_output.total_num_scheduled_tokens)
        return output

    def _record(self, num_tokens: int) -> None:
        batch, borders = self.runner.input_batch, self.runner.query_start_loc.np
        of_step = self.capturer.snapshot_routing_data(num_tokens).numpy()
        for i, request in enumerate(batch.req_ids):
            rows = of_step[borders[i] : borders[i + 1]]
            start = int(batch.num_computed_tokens_cpu[i])
            slots = self._slots(i, start + len(rows))
            self.of_slots[slots[start:]] = rows
            parts = self.of_requests.setdefault(request, [])
            known = sum(map(len, parts))
            # A request that starts over reads tokens again; they stay with those that first read them.
            parts += [self.of_slots[slots[known:start]], rows[max(0, known - start) :].copy()]

    def _slots(self, index: int, num_tokens: int) -> np.ndarray:
        """Of the KV cache, with the first tokens of a request of the batch."""
        block, place = np.divmod(np.arange(num_tokens), self.blocks.block_size)
        return self.blocks.block_table.np[index, block] * self.blocks.block_size + place

    def take(self, name: str) -> dict[int, tuple[bytes, str, tuple[int, ...]]]:
        """Of the answers to the request that was asked for by this name, all that they have read; it is
        forgotten here. By the answer's index: bytes, type and shape of (L - 1, M, K)."""
        taken: dict[int, tuple[bytes, str, tuple[int, ...]]] = {}
        for request in [request for request in self.of_requests if name in request]:
            rows = np.concatenate(self.of_requests.pop(request))
            index = request.partition(name)[0].rstrip("_")  # with several answers `0_NAME-more`
            taken[int(index or 0)] = rows.tobytes(), str(rows.dtype), rows.shape
        return taken


def _group_of_all_tokens(config: Any) -> int:
    """Of the layers that share their blocks, those that have some for every token: no window, no state."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return next((i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), 0)
