"""Lists all problems of a training run before it starts (`openrlhf check`)."""

import argparse
import asyncio
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    DEVICE_TYPE,
    TEMPLATE,
    USE_TEMPLATE,
    CheckpointFolder,
    Command,
    ErrorCode,
    Invocation,
    PPOConfig,
    Prompt,
    Reward,
    RewardError,
    RewardFunction,
    Sample,
    TemplateProblem,
    UsageError,
    build_prompt_datasets,
    build_trackers,
    build_train_set,
    check_hooks,
    check_output,
    check_places,
    check_space,
    check_stops,
    checked_supervised_task,
    counted,
    decode,
    describe,
    encode_prompts,
    final_answer,
    load_run_tokenizer,
    missing_template,
    readable,
    rl_data_notes,
    stop_token_ids,
    supervised_data_notes,
    with_values,
)
from openrlhf.api import check_rl_files as check_files
from openrlhf.api import probe_template as probe
from openrlhf.tools.command_line.installation import mismatches, own_address
from openrlhf.tools.command_line.run_files import find_task_type
from openrlhf.tools.command_line.terminal import shows_colours
from openrlhf.tools.plan.batches import count_training_rows
from openrlhf.tools.plan.estimate import Assumed, plan_run
from openrlhf.tools.plan.hardware import Cluster
from openrlhf.tools.plan.preview import Preview, list_sequences
from openrlhf.tools.plan.view import batch_lines, binding_lines

ROWS = 64
"""Number of rows that are read from each dataset."""
SAMPLES = 3
"""Number of samples that are shown."""


@dataclass
class Check:
    """A run that is checked, and what was found so far."""

    command: Command
    config: Any
    screen: Preview
    assumed: Assumed
    """Facts about the data; those that were not given come from the rows."""
    problems: list[Exception] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Probable mistakes, with which the run can start."""
    reward_flag: str = "--reward.remote_url"
    subject: str = ""
    """Beginning of the notes at the end, if only a part of the run has them."""

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Prints a title. A ValueError inside is kept for `_verdict`, and ends only this part."""
        self.screen.line(f"\n{title}")
        before = len(self.problems)
        try:
            yield
        except ValueError as error:
            if str(error) not in map(str, self.problems):
                self.problems.append(error)
        for problem in self.problems[before:]:
            self.say(f"wrong, see the end: {getattr(problem, 'flag', '')}".removesuffix(": "))

    def say(self, text: str) -> None:
        self.screen.line(f"  {text}")

    def note(self, *texts: str) -> None:
        self.notes += (self.subject + text for text in texts)
        for text in texts:
            self.say(f"note: {text}")

    def ask(self, flag: str, check: Callable[..., object], /, *args: Any, **options: Any) -> None:
        """Calls a check of a flag unless the flag already has a problem."""
        if any(getattr(problem, "flag", "") == flag for problem in self.problems):
            return
        try:
            check(*args, **options)
        except ValueError as error:
            self.problems.append(error)


def run(command: Command, invoked: Invocation, cluster: Cluster, options: argparse.Namespace) -> int:
    """Prints all checks. Returns 0 if nothing is wrong, else 1."""
    config, coloured = invoked.config, not options.no_color and shows_colours()
    check = Check(command, config, Preview(sys.stdout, coloured=coloured), Assumed.of(options))
    with check.part("versions"):
        check.problems += mismatches()
        check.say("packages that are not named here have the versions that every change is tested with")
    with check.part("files and models"):
        _files(check)
    if isinstance(config, PPOConfig):
        _rl_data(check)
    else:
        _supervised_data(check)
    with check.part("disks"):
        ckpt = config.ckpt
        check_places(config)
        check_space(config, CheckpointFolder.of(config), (ckpt.max_num + 1) * max(1, ckpt.save_steps))
        check.say(f"room for {ckpt.output_dir} and the checkpoints of {ckpt.folder}")
    with check.part("ports"):
        check.say(f"{socket.gethostname()} is {own_address()}, with free ports")
    with check.part(f"plan for {cluster}"):
        _plan(check, cluster)
    check.notes += invoked.remarks
    return _verdict(check)


def _verdict(check: Check) -> int:
    count = len(check.problems)
    if not count:
        check.screen.line("\nthe run can start, but:" if check.notes else "\nnothing is wrong")
        for note in check.notes:
            check.say(note)
        return 0
    check.screen.line(f"\n{'one problem' if count == 1 else f'{count} problems'}:")
    for problem in check.problems:
        check.screen.line(readable(f"error: {describe(problem)}"))
    return 1


def _files(check: Check) -> None:
    config = check.config
    check.ask("--ckpt.output_dir", check_output, config, resumes=config.ckpt.load_enable)
    if isinstance(config, PPOConfig):
        check.ask("--logger.trackers", build_trackers, config.logger)
        check.ask("--train.hooks", check_hooks, config.train.hooks, config.train.verify_steps)
        check_files(config, check.ask, on_cpu=DEVICE_TYPE == "cpu")
    else:
        checked_supervised_task(partial(find_task_type, check.command.name), _few_rows(check))


def _few_rows(check: Check) -> Any:
    return with_values(
        check.config,
        {"data.max_samples": min(ROWS, check.config.data.max_samples), "data.cache_enable": False},
    )


def _task(check: Check) -> Any:
    return find_task_type(check.command.name)(_few_rows(check))


def _supervised_data(check: Check) -> None:
    config, assumed, tokenizer, dataset = check.config, check.assumed, None, ()
    is_chat = getattr(config.data, "apply_chat_template", False)
    with check.part("samples: tokens with a loss are green, or in brackets"):
        tokenizer = load_run_tokenizer(config)
        check.screen.first_tokens(tokenizer, is_chat=is_chat)
        dataset = build_train_set(_task(check), tokenizer)
        for i in range(min(SAMPLES, len(dataset))):
            check.screen.item(i + 1, dataset[i], tokenizer)
        response = assumed.response or round(fmean(dataset.sequence_lengths))
        check.assumed = replace(
            assumed, response=response, rows=(rows := assumed.rows or count_training_rows(config))
        )
        check.note(
            *supervised_data_notes(config, rows or config.train.batch_size * (config.train.max_steps or 1))
        )
    if tokenizer is not None and _task(check).learns_ends:
        with check.part("stop tokens"):
            _stops(check, tokenizer, config.model.model_name_or_path, learns=True)
            _early_ends(check, dataset, tokenizer)


def _early_ends(check: Check, dataset: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Notes samples whose answers go on behind a stop token."""
    ids = stop_token_ids(check.config.model.model_name_or_path, tokenizer)
    ends = [decode(tokenizer, [number]) for number in ids]
    found = [
        i
        for i in range(len(dataset))
        for sequence in list_sequences(dataset[i], tokenizer)
        for end, more in pairwise(sequence.spans)
        if end.learned and end.text.endswith((*ends,)) and more.learned and more.text.strip()
    ]
    if found:
        check.note(
            f"{len({*found})} of the first {counted(len(dataset), 'sample')}, such as {found[0] + 1}, learn "
            "text behind a stop token, where sampling ends. Take the stop token out of the answers"
        )


def _rl_data(check: Check) -> None:
    config, tokenizer, prompts = check.config, None, {}
    is_chat = config.data.apply_chat_template
    with check.part("prompts: their tokens have no loss, those of responses do"):
        tokenizer = load_run_tokenizer(config)
        check.screen.first_tokens(tokenizer, is_chat=is_chat)
        prompts = _show_prompts(check, tokenizer)
    if tokenizer is not None:
        with check.part("stop tokens"):
            _stops(check, tokenizer, config.actor.model_name_or_path, learns=False)
        if is_chat:
            with check.part("chat template: answers stay as they were sampled when the chat goes on"):
                _keeps_answers(check, tokenizer)
    tasks = {task: name for name in ("agent", "reward") for task in config.task_values(name)}
    firsts = {source if source in tasks else "": prompt for source, prompt in prompts.items()} or {"": None}
    for task, prompt in sorted(firsts.items()):
        flag = f"--tasks.{task}.{tasks[task]}" if task else check.reward_flag
        subject = f"{flag}: " * bool(tasks)
        of_task = replace(check, config=config.for_source(task), reward_flag=flag, subject=subject)
        with check.part(f"rewards of {task or 'other prompts'}" if tasks else "rewards"):
            _rewards(of_task, prompt, tokenizer)


def _show_prompts(check: Check, tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    """Returns the first prompt of each source."""
    config, assumed = check.config, check.assumed
    most = {"data.max_samples": min(ROWS, config.data.max_samples), "eval.max_samples": ROWS}
    found, evaluation, _ = build_prompt_datasets(with_values(config, most))
    prompts = list(found.without_images[:SAMPLES])
    is_chat = config.data.apply_chat_template
    encoded = encode_prompts((prompt.text for prompt in prompts), tokenizer, is_chat=is_chat)
    for number, token_ids in enumerate(encoded, start=1):
        mask = torch.zeros(len(token_ids), dtype=torch.bool)
        check.screen.item(number, Sample(token_ids=torch.tensor(token_ids), action_mask=mask), tokenizer)
    if missing := missing_template(config, tokenizer, found):
        check.note(f"{TEMPLATE}: {missing}; {USE_TEMPLATE}")
    tokens = fmean(prompt.num_tokens for prompt in found.without_images)
    rows = assumed.rows or count_training_rows(config)
    check.assumed = replace(assumed, prompt=assumed.prompt or round(tokens), rows=rows)
    enough = config.rollout.batch_size * (config.train.max_steps or 1)
    check.note(*rl_data_notes(config, rows or enough, found, evaluation))
    return {prompt.source: prompt for prompt in reversed([*found.without_images])}


def _stops(check: Check, tokenizer: PreTrainedTokenizerBase, path: str, *, learns: bool) -> None:
    ids = stop_token_ids(path, tokenizer)
    check.say(", ".join(f"{number} {decode(tokenizer, [number])!r}" for number in ids) or "none")
    check_stops(check.config, tokenizer, learns=learns)


def _keeps_answers(check: Check, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        remarks = probe(tokenizer, with_tools=False)
    except TemplateProblem as problem:
        if not check.config.train.agent:  # a run without one samples a single answer, so this is no problem
            check.say(f"not for agents of several turns: {problem}")
            return
        raise UsageError(ErrorCode.CHAT_TEMPLATE, str(problem), flag="--train.agent_func_path") from problem
    for remark in remarks or ["yes"]:
        check.say(remark)


# ---- rewards


def _rewards(check: Check, prompt: Prompt | None, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Calls the reward function with possible answers to the prompt; with batches, in both orders."""
    config = check.config
    if config.train.agent:
        check.say("not tried: the agent gives the rewards. `openrlhf agent try` plays one of its episodes")
        return
    if servers := config.reward.servers:
        for url in servers:
            _reach(check, url)
        return
    if not config.reward_function:
        check.say("not tried: reward models or a teacher give the rewards, and no model is loaded here")
        return
    if prompt is None:
        check.say("not tried: there are no prompts")
        return
    asked = prompt.messages[-1].get("content") if prompt.messages else None
    answers = _answers("" if prompt.label is None else str(prompt.label))
    answers["copied"] = asked if isinstance(asked, str) else prompt.text
    end = tokenizer.eos_token if tokenizer is not None and tokenizer.eos_token else ""
    in_order = [answer + end for answer in answers.values()]
    batches = [in_order, in_order, in_order[::-1]] if config.reward.batch > 1 else [in_order]
    rewards, *others = asyncio.run(_called(check, prompt, batches))
    for (name, answer), reward in zip(answers.items(), rewards, strict=True):
        check.say(f"{name:<12} {reward.reward:<8g} {answer if len(answer) < 60 else answer[:56] + ' ...'!r}")
    *found, copied = [reward.reward for reward in rewards]
    best, best_right, limit = max(found), max(found[:-2], default=None), config.rollout.max_new_tokens
    if min(found) == best:
        check.note(
            "all answers have the same reward. This is a problem unless a right answer must look different "
            "from the label."
        )
    elif best_right is not None and max(found[-2:]) >= best_right:
        check.note(f"no right answer has a larger reward ({best_right:g}) than a wrong one")
    elif best_right is not None and copied >= best_right:
        check.note(
            f"an answer that only repeats the question has the reward {copied:g}, as a right one: a policy "
            "learns to copy. Read the answer where the response gives it, such as in a box"
        )
    elif tokenizer is not None and limit:
        texts = [answer for answer, r in zip(answers.values(), found, strict=False) if r == best]
        if (least := min(len(tokenizer.tokenize(text)) for text in texts)) > limit:
            check.note(f"the right answer has {least} tokens, more than --rollout.max_new_tokens {limit}")
    if others:
        _compare(check, rewards, *others)


def _compare(
    check: Check, once: Sequence[Reward], again: Sequence[Reward], backwards: Sequence[Reward]
) -> None:
    """Notes rewards that change with the order of a batch. A function that collects results as they come, or
    sorts them, gives samples the rewards of others."""
    first, second, reordered = ([reward.reward for reward in batch] for batch in (once, again, backwards))
    if first != second:
        check.note(
            f"the same answers got the rewards {first} in a first call and {second} in a second one. "
            "The function is random, or does not return rewards in the order of the answers."
        )
    elif first != reordered[::-1]:
        check.note(
            f"the same answers got the rewards {first} in one order and {reordered[::-1]} in the "
            "opposite one. Unless the function compares the answers of a batch, it does not return rewards "
            "in the order of the answers."
        )


def _answers(label: str) -> dict[str, str]:
    truth, wrong = final_answer(label), "I do not know."
    if not truth:
        return {"wrong": wrong, "empty": ""}
    if re.fullmatch(r"[-+$]?[\d.,/]+%?", truth):
        wrong = "The answer is {}.".format(re.sub("[0-9]", r"1\g<0>", truth, count=1))
    right = {"right": f"The answer is {truth}.", "right, boxed": f"\\boxed{{{truth}}}", "right, alone": truth}
    return right | {"wrong": wrong, "empty": ""}


async def _called(check: Check, prompt: Prompt, batches: Sequence[Sequence[str]]) -> list[list[Reward]]:
    """Calls the reward function with each batch of answers. Raises UsageError if a call fails."""
    function, reward = str(check.config.reward_function), check.config.reward
    limits = {"timeout": reward.timeout, "memory_gb": reward.memory_gb}
    source = RewardFunction(function, batch_size=max(map(len, batches)), **limits)
    try:
        found = []
        for answers in batches:
            calls = (source(prompt.text + answer, prompt.text, prompt.label) for answer in answers)
            found.append(list(await asyncio.gather(*calls)))
        return found
    except RewardError as error:
        raise UsageError(ErrorCode.USER_CODE, str(error), flag=check.reward_flag, value=function) from error
    finally:
        source.close()


def _reach(check: Check, url: str) -> None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), timeout=3).close()
    except OSError as error:
        text = f"the reward server does not answer: {error}.\nStart it before the run."
        check.problems.append(UsageError(ErrorCode.NOT_FOUND, text, flag=check.reward_flag, value=url))
    else:
        check.say(f"{url} accepts connections")


# ---- the machine


def _plan(check: Check, cluster: Cluster) -> None:
    plan = plan_run(check.command, check.config, cluster, check.assumed)
    lines = [*batch_lines(plan), *binding_lines(plan)]
    for line in lines:
        check.say(line)
    if not plan.fits:
        text = f"the run does not fit on {cluster}; `openrlhf plan` shows why.\n{lines[-1]}"
        raise UsageError(ErrorCode.RESOURCES, text)
