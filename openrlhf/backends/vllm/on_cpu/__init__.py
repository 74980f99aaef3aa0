"""Features that vLLM has on GPUs and lacks on CPUs, added to its workers: attention within images,
speculative decoding, weight syncs of experts, and the routing of tokens.

They let runs with these features be tried and tested on a machine without a GPU. A worker on a GPU does not
import this package; weight_receiver.py calls `patch` in one on a CPU.
"""

from openrlhf.backends.vllm.on_cpu.experts import patch_experts
from openrlhf.backends.vllm.on_cpu.image_attention import patch_image_attention
from openrlhf.backends.vllm.on_cpu.speculation import patch_sampler


def patch() -> None:
    """Patches vLLM in this process."""
    patch_experts()
    patch_image_attention()
    patch_sampler()
