"""Weights by the control plane of engines, which lays each bucket into Ray's object store."""

from openrlhf.backends.weight_sync.client import EngineClient, Rendezvous, Transfer
from openrlhf.backends.weight_sync.source import WeightSource, as_json, filled


class RayTransfer:
    """Hands buckets to the engines' control plane, which lays each into Ray's object store once: slow, but
    trainer and engines need no connection of their own."""

    def __init__(self, source: WeightSource, client: EngineClient, meeting: Rendezvous) -> None:
        self.source, self.client, self.meeting = source, client, meeting

    def send_weights(self) -> None:
        if self.meeting.rank != 0:  # only join the gathers
            for _ in self.source:
                pass
            return
        self.client.start_weight_update()
        for bucket, buffer in filled(self.source, self.meeting.bucket_bytes):
            update = {"tensors": as_json(bucket.tensors), "data": buffer.numpy().tobytes()}
            self.client.update_weights(update)
        self.client.finish_weight_update()


def open_ray(source: WeightSource, client: EngineClient, meeting: Rendezvous) -> Transfer:
    if meeting.rank == 0:
        client.init_weight_transfer_engine({})
    return RayTransfer(source, client, meeting)
