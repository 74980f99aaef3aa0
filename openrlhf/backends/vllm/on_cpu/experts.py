"""Makes weight syncs reach the experts of vLLM's CPU layers."""

from typing import TYPE_CHECKING

from torch import Tensor
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def patch_experts() -> None:
    """Patches vLLM to repack the experts of CPU layers on every load. By itself vLLM packs them only on the
    first load."""
    first_setup = UnquantizedFusedMoEMethod._setup_kernel

    def setup(self: UnquantizedFusedMoEMethod, layer: "RoutedExperts", w13: Tensor, w2: Tensor) -> None:
        is_reload = self.moe_kernel is not None
        first_setup(self, layer, w13, w2)
        if is_reload:
            assert self.moe_kernel is not None  # created by the setup
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = setup
