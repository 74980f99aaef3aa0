"""Agent of one turn whose first episode puts a fault into the engine's process, so that the engine's copy of
the weights goes wrong after a right beginning. Tests replace FAULT by the name of the fault.

`roll` and `stale` change what is stored from the second weight sync on, after its checksum was taken; `unused
adapter` removes adapters that were sent from all requests, from the start.
"""

import sys

import cloudpickle

from openrlhf.agents.base import AgentExecutorBase
from openrlhf.backends.vllm.engine import VLLMEngine

FAULT = "FAULT"
PARTS = {"roll": "layers.1.self_attn.o_proj", "stale": "layers.0.mlp"}


class AgentExecutor(AgentExecutorBase):
    is_installed = False

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if FAULT in PARTS and not self.is_installed:
            AgentExecutor.is_installed = True
            await llm_engine._engine.llm.collective_rpc(change_later_syncs)
        ids = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = (await llm_engine.generate(ids, sampling_params)).outputs[0]
        return {"reward": len(set(answer.token_ids)) / len(answer.token_ids)}


def change_later_syncs(worker) -> None:
    """Runs in vLLM's worker: weights after the next sync are not stored as they were sent."""
    engine, held = worker.weight_transfer_engine, {}
    load = engine._load

    def faulty(tensors):
        changed, add = [], engine.checksum.add
        for name, tensor in tensors:
            add(name, tensor)
            if PARTS[FAULT] in name and name in held:
                tensor = tensor.roll(1, 0) if FAULT == "roll" else held[name]
            elif PARTS[FAULT] in name:
                held[name] = tensor.clone()
            changed.append((name, tensor))
        engine.checksum.add = lambda name, tensor: None
        try:
            return load(changed)
        finally:
            del engine.checksum.add

    engine._load = faulty


cloudpickle.register_pickle_by_value(sys.modules[__name__])
if FAULT == "unused adapter":
    setattr(VLLMEngine, "adapter", property(lambda self: None, lambda self, adapter: None))  # noqa: B010
