"""Records each request's routing, the experts of its tokens, inside a worker of vLLM.

vLLM's second model runner returns the routing itself (`enable_return_routed_experts`), but needs Triton,
which is often missing on CPUs. With the first model runner, vLLM's capturer records the experts of each step,
and this module assigns them to requests.
"""

from typing import Any

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec


class RoutingRecorder:
    """Records the routing in all further steps of a model runner."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.execute_model = runner, runner.execute_model
        self.capturer = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
        bind_routed_experts_capturer(runner.model, self.capturer)
        self.blocks = runner.input_batch.block_table[_group_of_all_tokens(runner.kv_cache_config)]
        num_slots = runner.kv_cache_config.num_blocks * self.blocks.block_size
        nothing = self.capturer.snapshot_routing_data(0).numpy()
        self.of_slots = np.zeros((num_slots, *nothing.shape[1:]), nothing.dtype)
        """(S, M, K) experts of the token in each KV cache slot, for requests that reuse a cached prefix. S:
        slots, M: layers, K: experts of a token."""
        self.of_requests: dict[str, list[np.ndarray]] = {}
        """Maps vLLM's request id to the routing of the request's tokens so far, in parts."""
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
            # A preempted request reads its tokens again; the routing of the first time is kept.
            parts += [self.of_slots[slots[known:start]], rows[max(0, known - start) :].copy()]

    def _slots(self, index: int, num_tokens: int) -> np.ndarray:
        """Returns the KV cache slots of the first `num_tokens` tokens of a request in the batch."""
        block, place = np.divmod(np.arange(num_tokens), self.blocks.block_size)
        return self.blocks.block_table.np[index, block] * self.blocks.block_size + place

    def take(self, name: str) -> dict[int, tuple[bytes, str, tuple[int, ...]]]:
        """Removes and returns the routing of all answers to the request `name`: answer index -> bytes, dtype
        and shape of an (L - 1, M, K) array."""
        taken: dict[int, tuple[bytes, str, tuple[int, ...]]] = {}
        for request in [request for request in self.of_requests if name in request]:
            rows = np.concatenate(self.of_requests.pop(request))
            index = request.partition(name)[0].rstrip("_")  # `0_NAME-more` with several answers
            taken[int(index or 0)] = rows.tobytes(), str(rows.dtype), rows.shape
        return taken


def _group_of_all_tokens(config: Any) -> int:
    """Returns the index of the KV cache group whose layers keep every token, unlike layers with
    sliding-window attention or a recurrent state."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return next((i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), 0)
