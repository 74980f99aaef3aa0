"""The ranks of a model as DeepSpeed wants to be told of them."""

import torch.distributed as dist

from openrlhf.backends.distributed import ProcessMesh


class ModelParallelUnit:
    """The ranks that share a model's matrices, in Megatron's words, which are those of DeepSpeed: with it
    DeepSpeed reduces gradients, partitions optimizer states and counts norms as it has to."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self.mesh, self.at = mesh, mesh.coordinates(mesh.rank)

    def get_model_parallel_rank(self) -> int:
        return self.at.tensor

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tensor

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self.mesh.tensor_group

    def get_data_parallel_rank(self) -> int:
        return self.mesh.copy

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.copies

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.mesh.copies_group
