"""Forks Ray's workers from a process that has done their imports, on a machine without a GPU.

Importing torch, transformers, DeepSpeed and vLLM takes 9 s of CPU in every process: in each rank, each engine
and each engine's core. A server imports them once, while the run is checked and Ray starts, and forks a
process for each worker in a fraction of a second. The processes share the memory of the imported code.

It serves small runs on few cores, which the tests and the demo are. Until its first step, a run of
`benchmarks/start.py` on two idle cores takes 26 s of CPU instead of 37, and 17 to 20 s instead of 28
(benchmarks/README.md); on two busy ones 30 instead of 48. A run on GPUs does not use it.

No module of a command imports this folder: the entry point of the group `openrlhf.attached.cluster` names it,
and cluster/launch.py starts what such entry points name. `OPENRLHF_WARM_WORKERS=0` turns it off.
"""
