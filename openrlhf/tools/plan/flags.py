"""The flags of commands that come before a run, and the run that they describe."""

import argparse
import inspect
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openrlhf.api import (
    PPO,
    Command,
    ErrorCode,
    Invocation,
    PPOConfig,
    UsageError,
    catch_signals,
    choose_hub,
    notify,
    parse,
    resolve,
    short_errors,
)
from openrlhf.api import resource_demands as demands
from openrlhf.tools.command_line.arguments import ArgumentParser, positive, run, whole
from openrlhf.tools.command_line.run_files import SUPERVISED, TRAINING, command_and_flags
from openrlhf.tools.plan.hardware import Cluster, parse_cluster, this_machine, with_measured


def parser(prog: str, description: str | None) -> ArgumentParser:
    """Returns the parser of the options that describe the hardware and the data."""
    made = ArgumentParser(
        prog=prog,
        description=description,
        usage=f"{prog} RUN.yaml|COMMAND [flags of the run] [--cluster NODESxGPUSxKIND] [...]",
        allow_abbrev=False,
    )
    made.add_argument(
        "--cluster",
        metavar="NODESxGPUSxKIND",
        help="cluster, such as 8x8xH100-80GB or 8xA100-40GB (default: this machine)",
    )
    made.add_argument("--prompt_tokens", type=positive, metavar="N", help="mean tokens of a prompt")
    made.add_argument(
        "--response_tokens",
        type=positive,
        metavar="N",
        help="mean tokens of a response, or of a sequence in supervised learning (default: half the maximum)",
    )
    made.add_argument("--rows", type=positive, metavar="N", help="rows of the dataset (default: counted)")
    made.add_argument(
        "--rates", type=Path, metavar="FILE", help="measured rates: gpu_report.json of benchmarks/gpu.py"
    )
    return made


def parsed(own: ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Command, list[str]]:
    """Separates the options of `own` from the run's command and its flags. Without any, prints the help."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if words[0] in ("--help", "-h"):
        own.print_help()
        sys.exit()
    options, rest = own.parse_known_args(words)
    return options, *command_and_flags(rest, own.prog)


def invocation(command: Command, flags: Sequence[str], cluster: Cluster) -> Invocation:
    """Parses the flags of a run on a cluster. Supervised commands have one rank per device."""
    if command.name != PPO.name:
        with _launched(cluster.devices):
            return parse(command, flags)
    choose = lambda config, explicit, _: resolve(config, explicit, cluster.gpus)
    return parse(command, flags, resolve=choose)


@contextmanager
def _launched(ranks: int) -> Iterator[None]:
    """Sets WORLD_SIZE, the number of ranks, as a launcher does, unless it is set already."""
    if "WORLD_SIZE" in os.environ:
        yield
        return
    os.environ["WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["WORLD_SIZE"]


def cluster_of_options(options: argparse.Namespace) -> Cluster:
    cluster = parse_cluster(options.cluster) if options.cluster else this_machine()
    return with_measured(cluster, options.rates) if options.rates else cluster


def plan_parser() -> ArgumentParser:
    own = parser("openrlhf plan", plan.__doc__)
    own.add_argument("--json", action="store_true", help="print the plan as JSON")
    return own


def plan(argv: Sequence[str] | None = None) -> None:
    """Predicts placement, batches, memory and time of a training run from its configuration, without weights,
    GPUs or Ray. Takes what the run takes: a command with its flags, or a YAML file of flags."""
    with short_errors():
        options, command, flags = parsed(plan_parser(), argv)
        cluster = cluster_of_options(options)
        config = invocation(command, flags, cluster).config
        choose_hub(config.use_ms)
        sys.exit(run("openrlhf.tools.plan.view:run", command, config, cluster, options))


def check_parser() -> ArgumentParser:
    own = parser("openrlhf check", check.__doc__)
    own.add_argument(
        "--no_color", action="store_true", help="mark tokens with a loss by brackets instead of colour"
    )
    return own


def check(argv: Sequence[str] | None = None) -> None:
    """Checks a training run before it starts, and lists all problems: versions, files, models, stop tokens,
    the chat template, the reward function, disks, ports and memory. Shows in colour which tokens have a loss.
    Takes what the run takes: a command with its flags, or a YAML file of flags."""
    with short_errors():
        options, command, flags = parsed(check_parser(), argv)
        cluster = cluster_of_options(options)
        invoked = invocation(command, flags, cluster)
        choose_hub(invoked.config.use_ms)
        sys.exit(run("openrlhf.tools.plan.check:run", command, invoked, cluster, options))


def rehearse_parser() -> ArgumentParser:
    own = parser("openrlhf rehearse", rehearse.__doc__)
    own.add_argument("--json", action="store_true", help="print the result as JSON")
    own.add_argument("--keep", action="store_true", help="keep the folder with the logs and the models")
    return own


def rehearse(argv: Sequence[str] | None = None) -> None:
    """Rehearses a training run on the CPU cores of this machine in minutes: the same flags, data and reward
    function, with shrunk models and few ranks. Tries losses, weight sync, checkpoint, resume, evaluation and
    export. Takes what the run takes: a command with its flags, or a YAML file of flags."""
    with short_errors():
        options, command, flags = parsed(rehearse_parser(), argv)
        catch_signals()
        is_named = options.cluster is not None
        config, cluster = run_on(command, flags, cluster_of_options(options), is_named=is_named)
        choose_hub(config.use_ms)
        sys.exit(run("openrlhf.tools.plan.rehearsal.report:run", command, config, cluster, options))


def run_on(
    command: Command, flags: Sequence[str], cluster: Cluster, *, is_named: bool
) -> tuple[Any, Cluster]:
    """Returns the configuration of the real run, and its hardware. If no cluster is named and this machine
    has no GPU, the hardware is as many H100 as the flags of an RL run ask for, or two for a supervised
    command."""
    if is_named or cluster.kind.on_gpu:
        return invocation(command, flags, cluster).config, cluster
    if command.name != PPO.name:
        cluster = _gpus(2)
        return invocation(command, flags, cluster).config, cluster
    config = invocation(command, flags, cluster).config
    needed = sum(demands(config).values())
    return config, _gpus(needed) if needed > 1 else cluster


def _gpus(count: int) -> Cluster:
    cluster = parse_cluster(f"{math.ceil(count / 8)}x{min(count, 8)}xH100")
    notify(f"note: the run is planned for {cluster}; set --cluster for other hardware")
    return cluster


EPILOG = """
Every flag of `openrlhf ppo` is accepted and has the same meaning, for example --rollout.max_new_tokens,
--rollout.temperature, --data.max_len, --data.apply_chat_template and --train.max_turns.
"""


def agent_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="openrlhf agent")
    commands = parser.add_subparsers(required=True, metavar="try|record")
    form = {"epilog": EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    trying = commands.add_parser("try", description=inspect.getdoc(agent), **form)
    trying.add_argument("file", metavar="FILE", help="Python file with the class AgentExecutor")
    trying.add_argument("--prompt", required=True, help="text of the prompt")
    trying.add_argument("--label", default="", help="ground truth for the reward (default: empty)")
    trying.add_argument(
        "--samples", type=positive, default=1, metavar="N", help="episodes to play (default: 1)"
    )
    usage = "openrlhf agent record --model MODEL [--tool_parser NAME] [flags of ppo] -- PROGRAM ..."
    recording = commands.add_parser("record", usage=usage, description=inspect.getdoc(record), **form)
    for each in (trying, recording):
        each.add_argument("--model", required=True, help="policy: a Hugging Face name or a folder")
    recording.add_argument(
        "--tool_parser",
        metavar="NAME",
        help="vLLM's parser of the model's tool calls, such as hermes (default: tools are refused)",
    )
    return parser


def agent(argv: Sequence[str] | None = None) -> None:
    """Plays episodes of an agent with a model and prints them turn by turn, to test the agent before
    training."""
    with short_errors():
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] == ["record"]:
            sys.exit(record(words))
        options, flags = agent_parser().parse_known_args(words)
        sys.exit(_played("openrlhf.tools.plan.agent:run", options, flags))


def record(words: Sequence[str]) -> int:
    """Records the requests of a program that reaches a model by the API of OpenAI or Anthropic: runs it with
    the addresses and keys of its clients in the environment (OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ...), then
    prints turn by turn which tokens a training run would learn from, and where a rewritten history begins
    another segment. Ends with the program's status."""
    place = words.index("--") if "--" in words else len(words)
    own, program = words[:place], words[place + 1 :]
    options, flags = agent_parser().parse_known_args(own)
    if not program:
        text = "names no program; put it behind `--`, as in `-- python agent.py`"
        raise UsageError(ErrorCode.MISSING_FLAG, text, flag="openrlhf agent record")
    if shutil.which(program[0]) is None:
        raise UsageError(ErrorCode.NOT_FOUND, "there is no such program", flag="--", value=program[0])
    options.file, options.samples, options.prompt = RECORDER, 1, shlex.join(program)
    options.label = json.dumps({"program": program, "tool_parser": options.tool_parser})
    return _played("openrlhf.tools.plan.recording:run", options, flags)


RECORDER = "openrlhf.tools.plan.recording:AgentExecutor"


def _played(function: str, options: argparse.Namespace, flags: Sequence[str]) -> int:
    with TemporaryDirectory() as folder:
        config = config_of_agent(options, flags, Path(folder))
        choose_hub(config.use_ms)
        return run(function, config)


def config_of_agent(options: argparse.Namespace, flags: Sequence[str], folder: Path) -> PPOConfig:
    row = folder / "prompt.jsonl"
    row.write_text(json.dumps({"input": options.prompt, "label": options.label}) + "\n")
    given = [
        *("--actor.model_name_or_path", options.model, "--train.agent_func_path", options.file),
        *("--data.prompt_dataset", str(row), "--data.input_key", "input", "--data.label_key", "label"),
        *("--rollout.n_samples_per_prompt", str(options.samples), "--ckpt.output_dir", str(folder)),
    ]
    return parse(PPO, [*flags, *given]).config


USAGE = f"""\
usage: openrlhf data preview {"|".join(SUPERVISED)} [--samples N] [--no_color] [flags of that command]

Prints the first N samples (default: 3) as the command trains on them, with tokens that have a loss marked.
Then prints the first packed rows, and counts and lengths of the whole dataset. Loads the tokenizer, but no
model."""


def data_parser() -> ArgumentParser:
    prog, about = "openrlhf data preview", data.__doc__
    parser = ArgumentParser(prog=prog, description=about, add_help=False, allow_abbrev=False)
    parser.add_argument("--samples", type=whole(0), default=3, help="number of samples (default: 3)")
    parser.add_argument("--no_color", "--no-color", action="store_true", help="no colours")
    return parser


def data(argv: Sequence[str] | None = None) -> None:
    """Previews the training data of a supervised command: `openrlhf data preview COMMAND`."""
    with short_errors():
        match list(sys.argv[1:] if argv is None else argv):
            case [] | ["--help" | "-h", *_] | ["preview"] | ["preview", "--help" | "-h"]:
                print(USAGE)
            case ["preview", name, *flags] if name in SUPERVISED:
                options, rest = data_parser().parse_known_args(flags)
                config = parse(next(each for each in TRAINING if each.name == name), rest).config
                choose_hub(config.use_ms)
                run("openrlhf.tools.plan.preview:preview", name, config, options.samples, options.no_color)
            case ["preview", name, *_]:
                raise _unknown("data preview", name, f"it previews {', '.join(SUPERVISED)}")
            case [name, *_]:
                raise _unknown("data", name, "there is `openrlhf data preview`")


def _unknown(command: str, name: str, remedy: str) -> UsageError:
    text = f"there is no such command; {remedy}"
    return UsageError(ErrorCode.UNKNOWN_FLAG, text, flag=f"openrlhf {command}", value=repr(name))
