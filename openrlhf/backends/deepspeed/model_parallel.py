"""The mesh of a model's ranks as a model-parallel unit of Megatron, the interface that DeepSpeed reads."""

import torch.distributed as dist

from openrlhf.backends.distributed import ProcessMesh


class ModelParallelUnit:
    """The tensor-parallel and data-parallel groups of a model, with Megatron's method names, which DeepSpeed
    expects. DeepSpeed needs them to reduce gradients, partition optimizer states and compute gradient norms
    correctly under tensor parallelism."""

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
