"""Weight transfer through the engines' control plane and Ray's object store."""

from openrlhf.backends.weight_sync.buckets import as_json
from openrlhf.backends.weight_sync.client import EngineClient, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import WeightSource, filled_buckets


class RayTransfer:
    """Passes buckets to the engines' control plane, which puts each into Ray's object store once. This is
    slow, but needs no connection between trainer and engines."""

    def __init__(self, source: WeightSource, client: EngineClient, meeting: Rendezvous) -> None:
        self.source, self.client, self.meeting = source, client, meeting

    def send_weights(self) -> None:
        if self.meeting.rank != 0:  # takes part in the gathers only
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        for bucket, buffer in filled_buckets(self.source, self.meeting.bucket_bytes):
            update = {"tensors": as_json(bucket.tensors), "data": buffer.numpy().tobytes()}
            self.client.update_weights(update)
        self.client.finish_weight_update()


def open_ray(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    if meeting.rank == 0:
        client.init_weight_transfer_engine({})
    return RayTransfer(source, client, meeting)
