"""Chats with a model (`openrlhf chat`), on a terminal or with messages from a pipe: the text that the model
continues, and the stream of its answer."""

import queue
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    DEVICE_TYPE,
    ChatConfig,
    Explicit,
    Message,
    PromptTemplate,
    SamplingParams,
    VLLMStream,
    checking,
    clean_text,
    decode,
    load_run_tokenizer,
    log_stops,
    notify,
    prompt_token_ids,
    seed_at,
    waiting,
    with_suffix,
    with_values,
)
from openrlhf.api import generate_answers as generate
from openrlhf.tools.serve.batch_inference import (
    answering_engine,
    build_sampling_params,
    check_answering_model,
    load_answering_model,
)

HELP = "type clear to start a new conversation, exit or Ctrl-D to quit; Ctrl-C stops an answer"


class Conversation:
    """A conversation: with a chat template a list of messages; without, one growing text in which each
    message stands in `input_template` on a line of its own, followed by its answer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool,
        input_template: str | None,
        start: str = "",
        suffix: str | None = None,
    ) -> None:
        """start: text before the first message; the system message with a chat template. suffix: appended to
        each message, see `with_suffix`."""
        self.template = PromptTemplate(tokenizer, apply_chat_template, input_template)
        self.start, self.suffix = start, suffix
        self.clear()

    def clear(self) -> None:
        self.messages: list[Message] = [{"role": "system", "content": self.start}] if self.start else []
        self.text = self.start
        self.num_turns = 0

    def prompt(self, message: str) -> str:
        """Returns the conversation so far with this message appended, as text. Raises UsageError if the
        chat template refuses it."""
        asked = message if self.suffix is None else with_suffix(message, self.suffix)
        if self.template.apply_chat_template:
            return self.template([*self.messages, {"role": "user", "content": asked}])
        return f"{self.text}\n{self.template(asked)}" if self.text else self.template(asked)

    def add(self, message: str, answer: str) -> None:
        self.text = self.prompt(message) + answer
        asked = message if self.suffix is None else with_suffix(message, self.suffix)
        self.messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        self.num_turns += 1


class TransformersStream:
    """A transformers model that streams one answer at a time. It generates in a thread, so that the caller
    can stop it."""

    def __init__(self, model: Any, pad_token_id: int) -> None:
        self.model, self.pad_token_id = model, pad_token_id

    def stream(self, prompt: list[int], seed: int, params: SamplingParams) -> Generator[int, None, None]:
        """Yields the tokens of the answer. Closing the generator stops the computation."""
        tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        stopped = threading.Event()

        def compute() -> None:
            try:
                generate(
                    self.model,
                    [prompt],
                    [seed],
                    params,
                    pad_token_id=self.pad_token_id,
                    on_token=tokens.put,
                    stop=stopped.is_set,
                )
                tokens.put(None)
            except BaseException as error:  # the reader of the tokens raises it
                tokens.put(error)

        thread = threading.Thread(target=compute, name="answer", daemon=True)
        thread.start()
        try:
            while (token := tokens.get()) is not None:  # bounded: the thread's error is put too
                if isinstance(token, BaseException):
                    raise token
                yield token
        finally:
            stopped.set()
            thread.join()  # bounded: it stops at its next token

    def close(self) -> None:
        pass


class PiecewiseText:
    """Incremental decoding of tokens to text, which never splits a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        """Starts an empty text. `prompt`: the tokens that precede it."""
        self.tokenizer, self.prompt = tokenizer, prompt
        self.token_ids: list[int] = []
        self.text = ""
        """Text returned so far."""

    def add(self, token_id: int) -> str:
        """Returns the text that this token completes; "" while a character is incomplete."""
        self.token_ids.append(token_id)
        text = self._decoded()
        return "" if text.endswith(_REPLACEMENT) else self._new_text(text)

    def finish(self) -> str:
        """Returns the remaining text, even if its last character is incomplete."""
        return self._new_text(self._decoded())

    def _decoded(self) -> str:
        return decode(self.tokenizer, self.token_ids, after=self.prompt)

    def _new_text(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new


_REPLACEMENT = "\ufffd"


def run(config: ChatConfig, explicit: Explicit) -> None:
    """Answers messages until `exit` or the end of the input."""
    with checking():
        check_answering_model(config, ["data.max_len"])
    tokenizer = load_run_tokenizer(config)
    config = _with_template(config, explicit, tokenizer.chat_template)
    log_stops(config, tokenizer)
    conversation = Conversation(
        tokenizer,
        apply_chat_template=config.data.apply_chat_template,
        input_template=config.data.input_template,
        start=Path(config.ta_prompt).read_text(encoding="utf-8").strip() if config.ta_prompt else "",
        suffix=config.csft.prompt if config.csft.enable else None,
    )
    with waiting("loading the model", key=f"{config.model.model_name_or_path} {config.engine}"):
        model = _load(config, tokenizer)
    with closing(model):
        print(f"{config.model.model_name_or_path}: {HELP}", file=sys.stderr, flush=True)
        while (message := _read()) is not None:
            if message == "clear":
                conversation.clear()
            elif message:
                _answer(config, tokenizer, model, conversation, message)


def _with_template(config: ChatConfig, explicit: Explicit, template: Any) -> ChatConfig:
    flag = "data.apply_chat_template"
    if flag in explicit or "data.input_template" in explicit or not template:
        return config
    model = config.model.model_name_or_path
    notify(f"note: messages are in the chat template of {model}; --{flag} false leaves it out")
    return with_values(config, {flag: True})


def _load(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> VLLMStream | TransformersStream:
    if config.engine == "transformers":
        model = load_answering_model(config).to(DEVICE_TYPE).eval()
        return TransformersStream(model, tokenizer.pad_token_id)
    return VLLMStream(answering_engine(config, config.data.max_len, enable_prefix_caching=True))


def _read() -> str | None:
    """Reads the next message; returns None at `exit` or the end of the input."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        import readline as readline  # line editing and history
    while True:
        try:
            message = input("\nUser: " if on_terminal else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print(f"\n({HELP})", end="")
            continue
        return None if message == "exit" else message


def _answer(
    config: ChatConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: VLLMStream | TransformersStream,
    conversation: Conversation,
    message: str,
) -> None:
    """Prints the answer as it is sampled. Ctrl-C stops it; the printed part stays in the conversation."""
    asked = conversation.prompt(message)
    prompt = prompt_token_ids(tokenizer, asked, is_chat=config.data.apply_chat_template)
    room = config.data.max_len - len(prompt)
    if room < 1:
        print(
            f"(the conversation has {len(prompt)} tokens, so --data.max_len {config.data.max_len} leaves no "
            "room for an answer; type clear to start a new one)"
        )
        return
    params = build_sampling_params(config, tokenizer, min(room, config.rollout.max_new_tokens or room))
    ends, seed = params.stop_token_ids or (), seed_at(config.train.seed, "chat", conversation.num_turns)
    text = PiecewiseText(tokenizer, prompt)
    if sys.stdin.isatty():
        print("Assistant: ", end="", flush=True)
    try:
        with closing(model.stream(prompt, seed, params)) as tokens:
            for token in (token for token in tokens if token not in ends):
                print(clean_text(text.add(token)), end="", flush=True)
        print(clean_text(text.finish()), flush=True)
    except KeyboardInterrupt:
        print(clean_text(text.finish()), "(stopped)", flush=True)
    conversation.add(message, text.text)
