"""Estimates the memory of a run from plain numbers. The start of a run, `openrlhf plan` and the checks of
disk space read these estimates. Equations are per device, in bytes:

    weights        2 P in bf16, 4 P in fp32; divided by the ranks at ZeRO stage 3
    gradients      4 P / R at stages 2 and 3 (fp32), otherwise P elements of the weights' dtype
    optimizer      12 P, divided by R from stage 1 on: master weights and Adam's two moments in fp32
    activations    tokens * layers * kept + one layer recomputed
    logits         float32 logits of a chunk and the gradient of the head, see algorithms/logprobs.py
    KV cache       an engine's share of the GPU minus its weights and activations; 2 L K elements a token
    buffers        gathered weights, gradients that wait for their reduction or, in float32, for the optimizer
                   step, if these need more than the activations; buckets of a weight sync
    libraries      contexts of CUDA and NCCL, per process

P parameters, R ranks, L layers, K elements of a token's keys. Sources: ZeRO, https://arxiv.org/abs/1910.02054
(section 3 and figure 1: 16 P / R in all for mixed-precision Adam with bf16 gradients); activations,
https://arxiv.org/abs/2205.05198 (section 4), here for gated MLPs and without stored attention scores.
"""
