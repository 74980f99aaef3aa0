"""Error codes: usual causes, remedies and examples. docs/errors.md and `openrlhf explain CODE` show them."""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from openrlhf.api import ErrorCode

ROW = '{"input": "1 + 1?", "output": "2"}\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Usual causes of a code, the remedy, and a command that ends with it."""

    causes: str
    remedy: str
    command: str
    message: str
    """The lines of the command's output that matter."""
    files: Mapping[str, str] | None = field(default_factory=lambda: {"rows.jsonl": ROW})
    """File name -> content, for the files that the command reads. None if it needs processes or training, so
    that no test runs it."""

    @property
    def example(self) -> str:
        files = [f"{name}: {content.strip()}" for name, content in (self.files or {}).items()]
        return "\n".join([*files, f"$ {self.command}", self.message])


SFT = "openrlhf sft --model.model_name_or_path model --data.dataset"
PPO = (
    "openrlhf ppo --actor.model_name_or_path model --data.prompt_dataset rows.jsonl --data.input_template {} "
    "--reward.remote_url http://127.0.0.1:5000/get_reward --rollout.engine transformers --train.backend torch"
)
PLAIN = "--data.input_template {} --data.output_key output"

CODES: dict[ErrorCode, Explanation] = {
    ErrorCode.UNKNOWN_FLAG: Explanation(
        causes="A slip in the name, a flag of another command, or an older spelling that has no new name.",
        remedy="The message names a similar flag. `openrlhf COMMAND --help WORD` lists the flags with a "
        "word, docs/flags.md all of them with their older spellings.",
        command=f"{SFT} rows.jsonl {PLAIN} --train.batchsize 8",
        message="error: --train.batchsize: there is no such flag; did you mean --train.batch_size",
    ),
    ErrorCode.INVALID_VALUE: Explanation(
        causes="A number outside of its range, a word that is none of the choices, or text where a number "
        "must be. An environment variable such as RAY_ADDRESS may have the wrong form too.",
        remedy="The message has the range or the choices, docs/flags.md those of every flag.",
        command=f"{SFT} rows.jsonl {PLAIN} --ds.zero_stage 7",
        message="error: --ds.zero_stage 7: must be at least 0 and at most 3 [invalid-value]",
    ),
    ErrorCode.MISSING_FLAG: Explanation(
        causes="A required flag is set neither on the command line nor in the file of --config; or a "
        "setting needs another one, as a dataset without a chat template needs the column of the response.",
        remedy="Set the flag. `openrlhf init` writes a configuration that has all that are needed.",
        command=f"openrlhf sft --data.dataset rows.jsonl {PLAIN}",
        message="error: --model.model_name_or_path: is required.",
    ),
    ErrorCode.CONFLICT: Explanation(
        causes="Two flags that exclude each other, a flag without the one that it needs, or sizes that do "
        "not divide each other: batch sizes, ranks, and the sizes of tensor and sequence parallelism.",
        remedy="Change the flag that the message names. `--print_plan` prints ranks and batches without a "
        "run.",
        command=f"{SFT} rows.jsonl {PLAIN} --ds.ring_attn_size 2",
        message="error: --ds.ring_attn_size 2: the run has 1 rank, not a multiple of the "
        "sequence-parallel size 2",
    ),
    ErrorCode.UNSUPPORTED: Explanation(
        causes="A combination that nothing implements, such as 4-bit weights and ZeRO-3; a model whose "
        "packed rows would be wrong; an engine or a backend without this ability.",
        remedy="Use the alternative that the message names. docs/models.md lists what each architecture can "
        "do, docs/clusters.md what each backend and engine can do.",
        command=f"{SFT} rows.jsonl {PLAIN} --train.backend torch --ds.zero_stage 0",
        message="error: --ds.zero_stage 0: train.backend torch always shards optimizer states and "
        "gradients; use 2 or 3, or use train.backend deepspeed [unsupported]",
    ),
    ErrorCode.MISSING_PACKAGE: Explanation(
        causes="An optional package is not installed: vLLM, DeepSpeed, a tracker, an environment. Or a "
        "package has a version that nothing was tested with.",
        remedy="Run the `pip install` of the message. `openrlhf doctor` lists every package with the "
        "version that it should have.",
        command=f"{SFT} rows.jsonl {PLAIN} --logger.trackers trackio",
        message="error: --logger.trackers trackio: needs the package trackio. [missing-package]",
    ),
    ErrorCode.NOT_FOUND: Explanation(
        causes="A slip in a path, a relative path from another folder, a file that only another node has, "
        "or a model or dataset of the hub without access to the hub.",
        remedy="Correct the path; the message lists similar names if there are any. Without network access, "
        "name the folder of a model, or download it first with `hf download`.",
        command=f"{SFT} train.jsonl {PLAIN}",
        files={},
        message="error: --data.dataset train.jsonl: does not exist [not-found]",
    ),
    ErrorCode.UNREADABLE: Explanation(
        causes="A file is empty, cut off or of another format than its name says; a URL answers with an "
        "error.",
        remedy="Repair the file or name another. A download that was cut off must be repeated.",
        command="openrlhf sft --config run.yaml",
        files={"run.yaml": "model: [1\n"},
        message="error: --config run.yaml: not YAML:",
    ),
    ErrorCode.NOT_WRITABLE: Explanation(
        causes="No permission, a full disk, a read-only file system, or a finished model that the run would "
        "replace.",
        remedy="Name another folder, free space, or set --ckpt.overwrite to replace the result.",
        command=f"{SFT} rows.jsonl {PLAIN} --ckpt.output_dir finished",
        files={"rows.jsonl": ROW, "finished/config.json": "{}"},
        message="error: --ckpt.output_dir finished: this folder holds a model, which this run would "
        "overwrite.",
    ),
    ErrorCode.MISSING_COLUMN: Explanation(
        causes="The dataset names its columns differently from the flags, whose defaults are `input` for a "
        "prompt and none for the other columns.",
        remedy="The message lists the columns of the file: name one by --data.input_key, --data.output_key "
        "or the flag that it names.",
        command=f"{SFT} rows.jsonl {PLAIN}",
        files={"rows.jsonl": '{"question": "1 + 1?", "answer": "2"}\n'},
        message="error: --data.input_key input: rows.jsonl has no such column. [missing-column]\nIts "
        "columns: question, answer",
    ),
    ErrorCode.INVALID_ROW: Explanation(
        causes="A line that is no JSON, a text that is null or a number, a conversation that does not "
        "alternate, a label that is no label.",
        remedy="Correct the row that the message names, or leave such rows out with --data.bad_rows skip, "
        "which counts them.",
        command=f"{SFT} rows.jsonl {PLAIN}",
        files={"rows.jsonl": '{"input": "1 + 1?"'},
        message="error: --data.dataset rows.jsonl:1: not JSON:",
    ),
    ErrorCode.NO_ROWS: Explanation(
        causes="The file is empty, or each row was skipped: too long for --data.max_len, without anything "
        "to learn, or invalid with --data.bad_rows skip.",
        remedy="The message counts the reasons. Raise --data.max_len, or correct the column or the template.",
        command=f"{SFT} rows.jsonl {PLAIN} --data.max_len 2",
        message="error: rows.jsonl: no sample is left of 1 row:",
    ),
    ErrorCode.TOO_LONG: Explanation(
        causes="A prompt leaves no room for an answer, a row is longer than --data.max_len, or "
        "--data.max_len is longer than the positions of the model.",
        remedy="Shorten the rows, raise the limit, or stretch the model's RoPE (docs/models.md).",
        command=f"{PPO} --data.max_len 4096",
        message="error: --data.max_len 4096: model reads at most 512 tokens. [too-long]\nUse "
        "--data.max_len 512.",
    ),
    ErrorCode.CHAT_TEMPLATE: Explanation(
        causes="The model has no chat template, the template raises an error for these messages (roles that "
        "do not alternate, a system message), or it rewrites earlier turns, which an agent of several turns "
        "cannot continue.",
        remedy="Set --data.tokenizer_chat_template, change the messages, or train without a template "
        "(--data.input_template). docs/models.md and docs/agents.md list what a template must do.",
        command=f"{SFT} rows.jsonl --data.input_key input --data.output_key output "
        "--data.apply_chat_template --data.tokenizer_chat_template '{{ messages'",
        message="error: rows.jsonl:1: the chat template refuses the messages: unexpected end of template,",
    ),
    ErrorCode.INVALID_MODEL: Explanation(
        causes="A folder without config.json, weights or tokenizer; an adapter where a model must be; files "
        "that were cut off or are pointers of Git LFS; a reward model without a head; two models with "
        "different tokens.",
        remedy="Name the folder of a complete model. Merge an adapter with `openrlhf lora_combiner`.",
        command="openrlhf sft --model.model_name_or_path rows --data.dataset rows/rows.jsonl " + PLAIN,
        files={"rows/rows.jsonl": ROW},
        message="error: --model.model_name_or_path rows: no model configuration could be loaded from it:",
    ),
    ErrorCode.USER_CODE: Explanation(
        causes="A file of yours cannot be imported, has no class or function of the name, or returned "
        "something else than its contract says.",
        remedy="Correct the line of the file that the message names. `openrlhf check` tries reward "
        "functions, agents and classes with a few samples, without a run.",
        command=f"{SFT} rows.jsonl {PLAIN} --train.hooks hook.py:Hook",
        files={"rows.jsonl": ROW, "hook.py": "import a_module_that_does_not_exist\n"},
        message="error: --train.hooks hook.py:Hook: line 1: ModuleNotFoundError: No module named "
        "'a_module_that_does_not_exist' [user-code]",
    ),
    ErrorCode.RESOURCES: Explanation(
        causes="The flags ask for more GPUs than the cluster has, for an engine that spans nodes, or for "
        "models that do not fit beside each other.",
        remedy="`--print_plan` shows the placement, `openrlhf plan` the memory and what would fit. Lower "
        "the numbers of GPUs and engines, or share GPUs with --train.colocate_all.",
        command=f"{PPO} --data.max_len 512 --train.batch_size 4096 --rollout.batch_size 4096 "
        "--actor.num_gpus_per_node 4096",
        message="error: --actor.num_nodes x --actor.num_gpus_per_node = 4096: the cluster has",
    ),
    ErrorCode.CLUSTER: Explanation(
        causes="No cluster answers at RAY_ADDRESS, Ray has another version or needs its token, a port is in "
        "use, or the machine's name resolves to an address of another one.",
        remedy="Compare `ray status` on the node of the run; unset RAY_ADDRESS to start Ray on this "
        "machine. docs/clusters.md has each way to start a cluster.",
        command="RAY_ADDRESS=10.0.0.1:6379 openrlhf ppo --config run.yaml",
        message="error: RAY_ADDRESS 10.0.0.1:6379: no Ray cluster answers at this address. [cluster]",
        files=None,
    ),
    ErrorCode.IN_USE: Explanation(
        causes="A run that still trains, or a process that hangs, has the same --ckpt.output_dir or run "
        "folder.",
        remedy="End the process that the message names, wait for it, or name another folder. The lock of a "
        "process that has ended holds nobody up.",
        command="openrlhf sft --config run.yaml    # while the same command runs",
        message="in use by process 4711 on node-1, since 2026-11-02 09:30:00 UTC.",
        files=None,
    ),
    ErrorCode.OTHER_RUN: Explanation(
        causes="A flag, the data, a model or a file of yours has changed since the checkpoint was saved, so "
        "that continuing would be neither the old run nor a new one.",
        remedy="Restore the settings that the message lists. To change them on purpose, fork the checkpoint "
        "(--ckpt.fork_from), or start over in another folder.",
        command="openrlhf sft --config run.yaml --ckpt.load_enable --adam.lr 1e-4",
        message="this checkpoint belongs to another run:\n  --adam.lr was 5e-06, is 0.0001",
        files=None,
    ),
    ErrorCode.DAMAGED_CHECKPOINT: Explanation(
        causes="A disk that was full, a copy that was interrupted, or a file that was changed: its size or "
        "SHA-256 differs from the manifest.",
        remedy="Resume from an older checkpoint: a run does so by itself if there is one. Copy the "
        "checkpoint again, if a complete one exists elsewhere.",
        command="openrlhf sft --config run.yaml --ckpt.load_enable",
        message="error: --ckpt.load_enable: ckpt/checkpoints has no checkpoint that this run can resume "
        "from: [damaged-checkpoint]",
        files=None,
    ),
    ErrorCode.REWARDS_FAILED: Explanation(
        causes="The reward function raises an error or returns NaN, a call takes longer than "
        "--reward.timeout, or no reward server answers.",
        remedy="The message quotes the most common error. Correct the function; `openrlhf check` calls it "
        "with samples. --reward.max_failed_ratio is the part of a step's samples that may fail.",
        command="openrlhf ppo --config run.yaml",
        message="error: --reward.max_failed_ratio 0.5: step 3: 96 of 128 samples failed. 96 of them "
        "with:\nreward.py, line 7: ZeroDivisionError: division by zero",
        files=None,
    ),
    ErrorCode.EPISODES_FAILED: Explanation(
        causes="The agent or its environment raises an error or takes too long, or dynamic filtering leaves "
        "too few groups: each prompt is always solved, or never.",
        remedy="The message quotes the most common error, or counts the groups. `openrlhf agent try` plays "
        "an episode. Choose prompts of another difficulty if all scores of a group are equal.",
        command="openrlhf ppo --config run.yaml --algo.dynamic_filtering_enable",
        message="step 1: dynamic filtering kept 3 of 64 groups, and the step needs 16.",
        files=None,
    ),
    ErrorCode.BROKEN_INVARIANT: Explanation(
        causes="A bug in openrlhf or in a library below it: the log-probs of equal weights differ, two "
        "samples have one seed, a sum has another value than it must have.",
        remedy="Please report it with the message and `openrlhf doctor RUN --report`. OPENRLHF_SELFTEST=0 "
        "trains without these checks.",
        command="openrlhf ppo --config run.yaml",
        message="This is a bug in openrlhf or in a library below it, not in your flags: please report it",
        files=None,
    ),
    ErrorCode.NOT_FINITE: Explanation(
        causes="A learning rate that is too high, fp16 with large values, a loss of your own that divides "
        "by zero, or rewards out of range.",
        remedy="Lower the learning rate, lengthen the warm-up or use bf16, and resume from the last "
        "checkpoint, which was saved before. --train.on_nonfinite skip_step leaves out single steps.",
        command="openrlhf sft --config run.yaml --adam.lr 10",
        message="after optimizer step 4, model.layers.0.mlp.down_proj.weight is not finite on rank 0.",
        files=None,
    ),
    ErrorCode.ENGINE_FAILED: Explanation(
        causes="An engine ran out of memory, was killed by the system, cannot run the model, or does not "
        "answer. Engines that die are replaced; this error comes when they die too often.",
        remedy="The message has the engine's last lines: `openrlhf explain` finds many of them. Lower "
        "--vllm.gpu_memory_utilization, or try --vllm.enforce_eager, and resume.",
        command="openrlhf ppo --config run.yaml",
        message="the vLLM engine did not start: ValueError: No available memory for the cache blocks.",
        files=None,
    ),
    ErrorCode.WORKER_FAILED: Explanation(
        causes="A rank was killed because memory ran out, crashed in a library, or waits longer than "
        "--train.rank_timeout for another rank.",
        remedy="The message has the path of the process's log: `openrlhf explain LOG` explains what it "
        "knows of it. `openrlhf doctor RUN` names the rank that is late. Resume from the last checkpoint.",
        command="openrlhf ppo --config run.yaml",
        message="process 4711 on 10.0.0.2 was killed (out of memory?) or crashed.",
        files=None,
    ),
    ErrorCode.WRONG_WEIGHTS: Explanation(
        causes="An engine does not compute with the weights that it received: a transfer was damaged, a "
        "kernel of this machine is wrong, or vLLM loads this architecture otherwise.",
        remedy="`openrlhf verify` finds the part that differs. Try --vllm.sync_backend gloo, "
        "--vllm.enforce_eager or another attention kernel, and report it with the message.",
        command="openrlhf ppo --config run.yaml",
        message="weight sync 1: inference engine 0 does not compute with the weights that the trainer sent.",
        files=None,
    ),
}


def meanings() -> dict[ErrorCode, str]:
    """Returns the meaning of each code: the sentences below it in its class."""
    (declared,) = ast.parse(inspect.getsource(ErrorCode)).body
    found = {}
    for line, below in pairwise(declared.body if isinstance(declared, ast.ClassDef) else ()):
        match line, below:
            case ast.Assign(value=ast.Constant(value=str(code))), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[ErrorCode(code)] = " ".join(text.split())
    return found
