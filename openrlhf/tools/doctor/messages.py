"""Frequent errors of Ray, vLLM, DeepSpeed, NCCL, CUDA, transformers and the system, found by their text: what
each means here, and the remedy with our flags. `openrlhf explain TEXT` and docs/messages.md show them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

RELIEF = {
    "generate": "lower --vllm.gpu_memory_utilization",
    "logprobs": "lower --rollout.micro_batch_size or --rollout.max_tokens_per_gpu",
    "update": "lower --train.micro_batch_size or --train.max_tokens_per_gpu, or set "
    "--actor.gradient_checkpointing_enable",
    "sync": "lower --vllm.sync_bucket_mb",
}
"""Phase -> remedy with which it uses less memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """An error of a library or of the system."""

    pattern: str
    """Regular expression that finds it in a log."""
    sample: str
    """The error as the library writes it."""
    meaning: str
    remedy: str

    def is_in(self, text: str) -> bool:
        return re.search(self.pattern, text) is not None


MESSAGES: Mapping[tuple[str, str], Message] = {  # the more specific ones first
    ("CUDA", "out-of-memory"): Message(
        pattern=r"CUDA out of memory|OutOfMemoryError: (CUDA|HIP)|CUDA error: out of memory",
        sample="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total "
        "capacity of 79.11 GiB of which 1.88 GiB is free.",
        meaning="A GPU has too little memory for the next tensor. Engines, policy, critic and reference of "
        "a run may share it.",
        remedy="`openrlhf plan` with the run's flags shows which phase needs most. In "
        + "; in ".join(f"{phase}: {remedy}" for phase, remedy in RELIEF.items())
        + ". --ds.zero_stage 3 and --ds.adam_offload spread or move the states of the optimizer; "
        "--ds.enable_sleep and --vllm.enable_sleep free shared GPUs between phases.",
    ),
    ("CUDA", "device-side-assert"): Message(
        pattern=r"device-side assert triggered",
        sample="RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        meaning="A kernel was given an index out of range: mostly a token that the model's vocabulary does "
        "not have, or a position beyond its length. The line that Python names is a later one.",
        remedy="Compare tokenizer and model: do they belong together, were tokens added? Keep "
        "--data.max_len within the model's positions. CUDA_LAUNCH_BLOCKING=1 makes the traceback name the "
        "right line.",
    ),
    ("CUDA", "illegal-access"): Message(
        pattern=r"an illegal memory access was encountered|CUDA error: misaligned address",
        sample="RuntimeError: CUDA error: an illegal memory access was encountered",
        meaning="A kernel read memory that is not its own: a bug of the kernel for these shapes, or a GPU "
        "that is damaged.",
        remedy="Find the kernel: CUDA_LAUNCH_BLOCKING=1, --vllm.enforce_eager, --ds.attn_implementation "
        "sdpa. `nvidia-smi -q -d ECC` shows whether the GPU counts errors. `openrlhf verify` checks the "
        "kernels of a model.",
    ),
    ("CUDA", "no-kernel-image"): Message(
        pattern=r"no kernel image is available for execution|"
        r"is not compatible with the current PyTorch installation",
        sample="RuntimeError: CUDA error: no kernel image is available for execution on the device",
        meaning="torch, vLLM or an extension was built without code for this generation of GPU.",
        remedy="Install the builds that openrlhf pins: `openrlhf doctor` names packages with other "
        "versions. Remove extensions that were compiled on another machine.",
    ),
    ("CUDA", "driver-too-old"): Message(
        pattern=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|"
        r"provided PTX was compiled with an unsupported toolchain",
        sample="RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please "
        "update your GPU driver by downloading and installing a new version",
        meaning="The driver is older than the CUDA release that torch is built for.",
        remedy="Update the driver, on every node. `make env` names the oldest one that works.",
    ),
    ("CUDA", "no-gpu"): Message(
        pattern=r"No CUDA GPUs are available|Found no NVIDIA driver on your system|"
        r"Torch not compiled with CUDA enabled|no CUDA-capable device is detected",
        sample="RuntimeError: No CUDA GPUs are available",
        meaning="torch sees no GPU: its build is for CPUs, the container was started without GPUs, or "
        "CUDA_VISIBLE_DEVICES hides them.",
        remedy="`openrlhf doctor` tells which. `docker run --gpus all`; unset CUDA_VISIBLE_DEVICES; pip "
        'install "openrlhf[gpu]". On a CPU, --ds.param_dtype fp32 trains.',
    ),
    ("CUDA", "gpu-lost"): Message(
        pattern=r"uncorrectable ECC error|GPU has fallen off the bus|"
        r"Unable to determine the device handle for GPU|\bXid\b.*: (48|63|64|74|79|94|95),",
        sample="RuntimeError: CUDA error: uncorrectable ECC error encountered",
        meaning="The hardware of a GPU failed. No setting helps.",
        remedy="`dmesg | grep Xid` names the GPU. Reset or drain the node, and resume the run on others "
        "from its last checkpoint (--ckpt.load_enable).",
    ),
    ("CUDA", "cublas-failed"): Message(
        pattern=r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR)|"
        r"CUDNN_STATUS_(NOT_INITIALIZED|ALLOC)",
        sample="RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        meaning="A library of CUDA got no memory for itself, or an earlier kernel has failed.",
        remedy="Read the first error of the log, if there is one above. Otherwise leave more memory: see "
        "`openrlhf explain out-of-memory`.",
    ),
    ("CUDA", "cuda-after-fork"): Message(
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
        sample="RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with "
        "multiprocessing, you must use the 'spawn' start method",
        meaning="A process that already used a GPU was forked: by a reward function, an agent, or a file "
        "that is imported.",
        remedy="In files of yours, start processes with the spawn method, and touch no GPU while the file "
        "is imported.",
    ),
    ("NCCL", "nccl-timeout"): Message(
        pattern=r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ms for (recv|"
        r"send) operation",
        sample="[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, "
        "NumelOut=466119168, Timeout(ms)=600000) ran for 600004 milliseconds before timing out.",
        meaning="The ranks waited for one that did not come: it died, is much slower, or waits elsewhere. "
        "This message is a consequence; the cause is in the log of the rank that is missing.",
        remedy="Look for the first error of any rank. `openrlhf doctor RUN` shows, while the run stands, "
        "where each rank is. If a rank is only slow (storage, a long evaluation), raise "
        "--train.rank_timeout.",
    ),
    ("NCCL", "nccl-system-error"): Message(
        pattern=r"ncclSystemError|NET/(Socket|IB) ?: .*(error|fail)|ncclInternalError",
        sample="ncclSystemError: System call (e.g. socket, malloc) or external library call failed or "
        "device error.",
        meaning="NCCL could not open a connection or a memory region: a wrong network interface, InfiniBand "
        "without locked memory, or a small /dev/shm.",
        remedy="NCCL_DEBUG=INFO says which. Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, `ulimit -l "
        "unlimited`, and `docker run --shm-size 16g`; NCCL_IB_DISABLE=1 shows whether InfiniBand is the "
        "cause (docs/clusters.md).",
    ),
    ("NCCL", "nccl-unhandled-cuda"): Message(
        pattern=r"ncclUnhandledCudaError",
        sample="ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of "
        "memory'",
        meaning="A call of CUDA inside NCCL failed. The line `Last error` has the reason, most often memory.",
        remedy="Read `Last error`. Leave memory for NCCL's buffers: lower --vllm.gpu_memory_utilization, or "
        "one of the flags of `openrlhf explain out-of-memory`.",
    ),
    ("NCCL", "peer-gone"): Message(
        pattern=r"ncclRemoteError|Connection closed by peer|Connection reset by peer",
        sample="ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.",
        meaning="The process at the other end has ended. It is a consequence, not the cause.",
        remedy="Look for the first error in the logs of the other ranks and for processes that the system "
        "killed (`dmesg | grep -i killed`). Resume from the last checkpoint.",
    ),
    ("NCCL", "duplicate-gpu"): Message(
        pattern=r"Duplicate GPU detected",
        sample="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
        meaning="Two ranks of one model are on the same GPU, which NCCL refuses.",
        remedy="Start as many processes on a node as it has GPUs (torchrun --nproc_per_node), and leave "
        "CUDA_VISIBLE_DEVICES to the launcher. `--print_plan` shows where `openrlhf ppo` puts ranks.",
    ),
    ("torch", "port-in-use"): Message(
        pattern=r"EADDRINUSE|(?i:address already in use)",
        sample="torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
        "already in use",
        meaning="Another process has the port: mostly a run that still ends, or a second one on this "
        "machine.",
        remedy="End the other run, or choose another port: torchrun --master_port, `ray start --port`, "
        "--port of `openrlhf serve_rm`.",
    ),
    ("torch", "rendezvous-timeout"): Message(
        pattern=r"client socket has timed out after|RendezvousTimeoutError|DistStoreError: Timed out after",
        sample="torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while "
        "trying to connect to (10.0.0.1, 29500).",
        meaning="A rank did not reach the first one: a wrong address, a firewall, or a node that never "
        "started.",
        remedy="Give torchrun the address of node 0 that the other nodes reach, with the same port and "
        "--nnodes everywhere. On a machine with several interfaces set GLOO_SOCKET_IFNAME.",
    ),
    ("system", "shared-memory"): Message(
        pattern=r"unable to (write to file|open shared memory object|allocate shared memory)|"
        r"insufficient shared memory|/dev/shm/nccl-|creating shared memory segment",
        sample="RuntimeError: unable to write to file </torch_2213_3912346112_0>: No space left on device "
        "(28)",
        meaning="/dev/shm is full or too small; a container gets 64 MB unless told otherwise.",
        remedy="`docker run --shm-size 16g`; in Kubernetes mount memory as /dev/shm. `openrlhf doctor` "
        "measures it.",
    ),
    ("torch", "dtype-mismatch"): Message(
        pattern=r"mat1 and mat2 must have the same dtype|expected scalar type \w+ but found \w+|"
        r"to have the same dtype",
        sample="RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        meaning="A layer and its input have different precisions: in a model of your own, or in a loss that "
        "computes in another one.",
        remedy="In a loss or an algorithm of yours convert with `.to(x.dtype)`. For a model, give all of it "
        "one precision: --ds.param_dtype.",
    ),
    ("Ray", "actor-died"): Message(
        pattern=r"[Tt]he actor (is dead|died|died unexpectedly)\b|ActorDiedError|Worker unexpectedly exits",
        sample="ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        meaning="A process of the run ended. `openrlhf ppo` replaces engines that die; a rank that dies "
        "ends the run, with the code `worker-failed`.",
        remedy="The message names the log of the process: `openrlhf explain LOG`. Without an error in it, "
        "the system killed the process, mostly for memory (`dmesg | grep -i killed`).",
    ),
    ("Ray", "node-memory"): Message(
        pattern=r"node running low on memory|ray\.exceptions\.OutOfMemoryError|Memory on the node .* was",
        sample="ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        meaning="Ray killed a process, because the memory of the node (not of a GPU) was nearly full.",
        remedy="Limit what files of yours keep (--reward.memory_gb, --reward.num_workers); lower "
        "--data.dataloader_num_workers; offload less to the CPU (--ds.adam_offload, --vllm.enable_sleep). "
        "`openrlhf plan` estimates the memory.",
    ),
    ("Ray", "not-scheduled"): Message(
        pattern=r"cannot be scheduled right now|No available node types can fulfill|"
        r"Waiting for creating a placement group",
        sample="Error: No available node types can fulfill resource request {'GPU': 8.0}.",
        meaning="The cluster has too few free GPUs for what was asked for: they do not exist, are in use, "
        "or Ray does not count them.",
        remedy="`ray status` shows what is there, `--print_plan` what the run asks for. Start nodes with "
        "`ray start --num-gpus`; --train.placement_timeout ends the wait.",
    ),
    ("Ray", "no-cluster"): Message(
        pattern=r"Could not find any running Ray instance|Failed to connect to GCS|Unable to connect to GCS",
        sample="ConnectionError: Could not find any running Ray instance. Please specify the one to connect "
        "to by setting `--address` flag or `RAY_ADDRESS` environment variable.",
        meaning="Nothing answers at the address of the cluster: it ended, or the head is unreachable from "
        "here.",
        remedy="`ray status` on the head. Open its ports, 6379 first, or unset RAY_ADDRESS: then the run "
        "starts Ray on this machine.",
    ),
    ("Ray", "ray-version"): Message(
        pattern=r"Version mismatch: The cluster was started with",
        sample="RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.48.0\n    Python: "
        "3.10.14\nThis process on node 10.0.0.2 was started with:\n    Ray: 2.60.0\n    Python: 3.11.9",
        meaning="Nodes of a cluster have different versions of Ray or Python.",
        remedy="Install the same environment on all nodes, and start Ray on each with its `ray`.",
    ),
    ("Ray", "package-too-large"): Message(
        pattern=r"Package size \(.*\) exceeds the maximum size",
        sample="ray.exceptions.RuntimeEnvSetupError: Package size (612.34MiB) exceeds the maximum size of "
        "512.00MiB. You can exclude large files using the 'excludes' option",
        meaning="The working folder that a job sends to all nodes has data, models or checkpoints in it.",
        remedy="Start the job in a folder with code alone, or list the others under `excludes`. Put models "
        "and data on storage that all nodes have, and name them by absolute paths.",
    ),
    ("Ray", "runtime-env"): Message(
        pattern=r"RuntimeEnvSetupError|Failed to set up runtime environment",
        sample="ray.exceptions.RuntimeEnvSetupError: Failed to set up runtime environment.",
        meaning="A node could not prepare the folder or the packages that a job asks for.",
        remedy="Install packages on the nodes instead of in `--runtime-env-json`; name only files of the "
        "run in its working_dir. The text below the error has the node's reason.",
    ),
    ("Ray", "ray-disk-full"): Message(
        pattern=r"/tmp/ray/\S* is over \d+% full|OutOfDiskError|ObjectStoreFullError",
        sample="(raylet) file_system_monitor.cc:116: /tmp/ray/session_2026-11-02_09-30-00_123456_17 is over "
        "95% full, available space: 12.1 GB; capacity: 438.0 GB. Object creation will fail if spilling is "
        "required.",
        meaning="The disk with Ray's folder is nearly full. Old sessions stay there.",
        remedy="Remove old folders of /tmp/ray while no cluster runs, or start Ray elsewhere: `ray start "
        "--temp-dir`, or RAY_TMPDIR for a cluster that the run starts.",
    ),
    ("vLLM", "no-kv-cache"): Message(
        pattern=r"No available memory for the cache blocks|larger than the available KV cache memory",
        sample="ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        meaning="Beside the weights, the fraction of the GPU that the engine may use has no room for the "
        "keys and values of one sequence.",
        remedy="Raise --vllm.gpu_memory_utilization, or set --vllm.kv_cache_gb. With --train.colocate_all "
        "set --vllm.enable_sleep and --ds.enable_sleep. Shorter --data.max_len, more "
        "--vllm.tensor_parallel_size, or --vllm.enforce_eager need less.",
    ),
    ("vLLM", "gpu-not-free"): Message(
        pattern=r"is less than desired GPU memory utilization",
        sample="ValueError: Free memory on device cuda:0 (10.54/79.11 GiB) on startup is less than desired "
        "GPU memory utilization (0.9, 71.2 GiB). Decrease GPU memory utilization or reduce GPU memory used "
        "by other processes.",
        meaning="Another process holds memory of the GPU: a model of the run, or what an earlier run has "
        "left.",
        remedy="`nvidia-smi` shows the processes. End leftovers (`ray stop`); else lower "
        "--vllm.gpu_memory_utilization below what is free.",
    ),
    ("vLLM", "engine-core-failed"): Message(
        pattern=r"Engine core initialization failed|EngineDeadError|EngineCore encountered an issue|"
        r"EngineCore failed to start",
        sample="RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
        "{}",
        meaning="vLLM's process ended. This line is its epilogue: the cause is further up.",
        remedy="Search the log upwards for the first traceback, or give all of it to `openrlhf explain "
        "LOG`. --vllm.enforce_eager leaves out graphs and compilation; --rollout.engine transformers works "
        "without vLLM.",
    ),
    ("vLLM", "max-model-len"): Message(
        pattern=r"max_model_len \(.*\) is greater than the derived|is longer than the maximum model length",
        sample="ValueError: User-specified max_model_len (65536) is greater than the derived max_model_len "
        "(max_position_embeddings=32768.0 or model_max_length=None in model's config.json).",
        meaning="--data.max_len is longer than the positions of the model.",
        remedy="Lower --data.max_len, or stretch the model's RoPE in its config.json (docs/models.md).",
    ),
    ("vLLM", "heads-not-divisible"): Message(
        pattern=r"must be divisible by tensor parallel size|is not divisible by tensor parallel",
        sample="ValueError: Total number of attention heads (14) must be divisible by tensor parallel size "
        "(4).",
        meaning="Tensor parallelism splits attention heads, and this model's number does not divide.",
        remedy="Choose a --vllm.tensor_parallel_size that divides the heads, and more --vllm.num_engines "
        "instead.",
    ),
    ("vLLM", "architecture-not-supported"): Message(
        pattern=r"Model architectures .* are not supported for now|does not recognize this architecture",
        sample="ValueError: Model architectures ['NewModelForCausalLM'] are not supported for now.",
        meaning="The installed vLLM or transformers does not know the model, which is newer or has code of "
        "its own.",
        remedy="--rollout.engine transformers samples every model that transformers knows. A newer "
        "transformers must lie within the bounds that `openrlhf doctor` shows. Code from the hub is never "
        "run.",
    ),
    ("vLLM", "bf16-not-supported"): Message(
        pattern=r"Bfloat16 is only supported on GPUs with compute capability|bf16.* not supported on this",
        sample="ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. "
        "Your Tesla V100 GPU has compute capability 7.0.",
        meaning="The GPU is older than Ampere and does not compute in bf16.",
        remedy="--ds.param_dtype fp16, or fp32.",
    ),
    ("vLLM", "no-compiler"): Message(
        pattern=r"Failed to find C compiler|fatal error: Python\.h: No such file|Ninja is required to load|"
        r"ninja not being installed",
        sample="RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set "
        "triton.knobs.build.impl.",
        meaning="Kernels are compiled when an engine or an optimizer starts, and gcc, Python's headers or "
        "ninja are missing.",
        remedy="apt-get install gcc python3-dev, pip install ninja. `openrlhf doctor` looks for the "
        "compiler. --vllm.enforce_eager and --train.backend torch compile less.",
    ),
    ("DeepSpeed", "loss-scale-minimum"): Message(
        pattern=r"Current loss scale already at minimum",
        sample="Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting "
        "run.",
        meaning="In fp16 every step overflows: gradients or activations do not fit, or are NaN.",
        remedy="--ds.param_dtype bf16 where the GPU has it. Otherwise lower the learning rate and look at "
        "the first steps (docs/errors.md).",
    ),
    ("DeepSpeed", "batch-not-divisible"): Message(
        pattern=r"Check batch related parameters",
        sample="AssertionError: Check batch related parameters. train_batch_size is not equal to "
        "micro_batch_per_gpu * gradient_acc_step * world_size 128 != 4 * 4 * 6",
        meaning="DeepSpeed was given batch sizes that contradict the number of ranks.",
        remedy="Let openrlhf derive them: remove batch sizes from --ds.config, and set --train.batch_size "
        "and --train.micro_batch_size.",
    ),
    ("DeepSpeed", "cuda-toolkit-mismatch"): Message(
        pattern=r"CUDAMismatchException|does not match the version torch was compiled with|"
        r"CUDA_HOME does not exist|Unable to JIT load the \w+ op",
        sample="deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed "
        "CUDA version 12.1 does not match the version torch was compiled with 13.0, unable to compile "
        "cuda/cpp extensions",
        meaning="DeepSpeed compiles an optimizer or a kernel, and the CUDA toolkit is missing or of another "
        "release.",
        remedy="Leave out what needs it (--ds.adam_offload), use --train.backend torch, or install the "
        "toolkit of torch's release and point CUDA_HOME at it.",
    ),
    ("transformers", "gated-model"): Message(
        pattern=r"trying to access a gated repo|Access to model .* is restricted|401 Client Error|"
        r"GatedRepoError",
        sample="OSError: You are trying to access a gated repo.\nMake sure to have access to it at "
        "https://huggingface.co/meta-llama/Llama-3.1-8B.",
        meaning="The model or dataset needs an agreement with its authors, and an account.",
        remedy="Accept the terms on the model's page, then `hf auth login` or HF_TOKEN on each node.",
    ),
    ("transformers", "hub-unreachable"): Message(
        pattern=r"couldn't connect to 'https?://|LocalEntryNotFoundError|outgoing traffic has been disabled|"
        r"OfflineModeIsEnabled|429 Client Error",
        sample="OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
        "find them in the cached files.",
        meaning="A name is looked up on the hub, which this node does not reach, or which limits its "
        "requests.",
        remedy="Name a folder: download with `hf download NAME --local-dir FOLDER` where there is network. "
        "HF_ENDPOINT names a mirror; --use_ms reads from ModelScope. Many processes of one address need "
        "HF_TOKEN.",
    ),
    ("transformers", "not-a-model"): Message(
        pattern=r"is not a local folder and is not a valid model identifier|Repo id must (be in the form|"
        r"use alphanumeric)|does not appear to have a file named",
        sample="OSError: ckpt/sft is not a local folder and is not a valid model identifier listed on "
        "'https://huggingface.co/models'",
        meaning="The path does not exist here, so it is read as a name on the hub; or the folder lacks a "
        "file.",
        remedy="Check the path, on every node. An adapter must first be merged with `openrlhf "
        "lora_combiner`; a checkpoint folder is no model: use the one of --ckpt.output_dir or "
        "--ckpt.save_hf.",
    ),
    ("transformers", "no-chat-template"): Message(
        pattern=r"tokenizer\.chat_template is not set|does not have a chat template",
        sample="ValueError: Cannot use chat template functions because tokenizer.chat_template is not set "
        "and no template argument was passed!",
        meaning="A base model has no chat template, and a flag asks for one.",
        remedy="Give one by --data.tokenizer_chat_template, or use --data.input_template without "
        "--data.apply_chat_template.",
    ),
    ("transformers", "template-refuses-roles"): Message(
        pattern=r"[Cc]onversation roles must alternate|[Ss]ystem role not supported|"
        r"After the optional system message",
        sample="jinja2.exceptions.TemplateError: Conversation roles must alternate "
        "user/assistant/user/assistant/...",
        meaning="The model's template accepts only certain orders of roles.",
        remedy="Change the rows (a system message into the first user message), or set another template by "
        "--data.tokenizer_chat_template. --data.bad_rows skip leaves such rows out.",
    ),
    ("transformers", "remote-code"): Message(
        pattern=r"trust_remote_code=True|contains custom code which must be executed",
        sample="ValueError: The repository org/model contains custom code which must be executed to "
        "correctly load the model. Please pass the argument `trust_remote_code=True` to allow custom code "
        "to be run.",
        meaning="The model brings Python code. openrlhf never runs code from the hub.",
        remedy="Use a version of the model that transformers has built in, often named `...-hf`, or "
        "register the architecture in a package of yours.",
    ),
    ("transformers", "no-flash-attention"): Message(
        pattern=r"flash_attn seems to be not installed|FlashAttention\w* has been toggled on, but|"
        r"flash_attn\S* undefined symbol|undefined symbol: \S*flash",
        sample="ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the "
        "following error: the package flash_attn seems to be not installed.",
        meaning="A flag or a config.json asks for the package flash-attn. Packed rows do not need it: torch "
        "has the same kernel.",
        remedy="Remove --ds.attn_implementation, or set it to sdpa. Uninstall a flash-attn that was built "
        "for another torch.",
    ),
    ("transformers", "damaged-weights"): Message(
        pattern=r"[Ee]rror while deserializing header|SafetensorError|MetadataIncompleteBuffer|"
        r"HeaderTooLarge|invalid load key, 'v'",
        sample="safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        meaning="A file of weights is cut off, or is a pointer of Git LFS instead of the weights.",
        remedy="Compare sizes, delete the file from the cache and download it again: `hf download NAME`; in "
        "a clone `git lfs pull`.",
    ),
    ("transformers", "size-mismatch"): Message(
        pattern=r"size mismatch for \S+:|ignore_mismatched_sizes",
        sample="RuntimeError: Error(s) in loading state_dict:\nsize mismatch for lm_head.weight: copying a "
        "param with shape torch.Size([32000, 4096]) from checkpoint, the shape in current model is "
        "torch.Size([32064, 4096]).",
        meaning="Weights and config.json belong to different models: often a vocabulary that was extended, "
        "or an adapter for another base.",
        remedy="Take all files from one folder. For `openrlhf lora_combiner`, name the base model that the "
        "adapter was trained on.",
    ),
    ("system", "signal-in-thread"): Message(
        pattern=r"doesn't support threaded environment|signal only works in main thread",
        sample="ValueError: signal only works in main thread of the main interpreter",
        meaning="Code that limits its time by a signal, as math-verify does, ran in another thread than the "
        "main one. Agents and `Run.reward` run there; reward functions of a command run in the main thread.",
        remedy="Use `grade_answer` or `grade_response` of `openrlhf.utils`, or turn the signal off: "
        "`parse(text, parsing_timeout=None)` and `verify(gold, found, timeout_seconds=None)`.",
    ),
    ("system", "too-many-files"): Message(
        pattern=r"Too many open files",
        sample="OSError: [Errno 24] Too many open files",
        meaning="A process has reached its limit of open files and sockets: with many concurrent episodes "
        "or reward calls.",
        remedy="`ulimit -n 65536` before `ray start`; lower --rollout.max_concurrent_episodes or "
        "--reward.remote_concurrency.",
    ),
    ("system", "disk-full"): Message(
        pattern=r"No space left on device|Disk quota exceeded",
        sample="OSError: [Errno 28] No space left on device",
        meaning="The disk of a checkpoint, of the cache or of /tmp is full, or a quota is reached.",
        remedy="Free space; keep fewer checkpoints (--ckpt.max_num, --ckpt.max_mem) and rollouts "
        "(--logger.rollouts); move --data.cache_dir. The last complete checkpoint stays usable.",
    ),
    ("system", "killed"): Message(
        pattern=r"exitcode ?: -9\b|Signals\.SIGKILL|return code = -9\b|exits with return code = 137|"
        r"[Oo]ut of memory: Killed process|OOMKilled",
        sample="subprocess.CalledProcessError: Command '['python', '-m', 'openrlhf.cli.train_sft']' died "
        "with <Signals.SIGKILL: 9>.",
        meaning="The system or the cluster's scheduler ended the process, mostly because memory of the "
        "machine ran out.",
        remedy="`dmesg | grep -i killed`, or the scheduler's record, tells. Lower "
        "--data.dataloader_num_workers; keep fewer states in memory (no --ds.adam_offload, a higher "
        "--ds.zero_stage); ask for more memory.",
    ),
}
"""(library that writes the error, name that `openrlhf explain` knows) -> the error."""


def find_messages(text: str) -> Iterator[tuple[str, str]]:
    yield from (key for key, message in MESSAGES.items() if message.is_in(text))
