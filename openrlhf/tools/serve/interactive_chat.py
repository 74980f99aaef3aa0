"""Chats with a model (`openrlhf chat`), on a terminal or with messages from a pipe."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.api import (
    DEVICE_TYPE,
    MODEL_FLAG,
    ChatConfig,
    EngineOptions,
    Explicit,
    VLLMStream,
    checking,
    clean_text,
    load_run_tokenizer,
    log_stops,
    notify,
    prompt_token_ids,
    seed_at,
    waiting,
    with_values,
)
from openrlhf.tools.serve.batch_inference import (
    build_sampling_params,
    check_answering_model,
    load_answering_model,
)
from openrlhf.tools.serve.conversation import Conversation
from openrlhf.tools.serve.streaming import PiecewiseText, TransformersStream

HELP = "type clear to start a new conversation, exit or Ctrl-D to quit; Ctrl-C stops an answer"


def run(config: ChatConfig, explicit: Explicit) -> None:
    """Answers messages until `exit` or the end of the input."""
    with checking():
        check_answering_model(config, ["data.max_len"])
    tokenizer = load_run_tokenizer(config)
    config = _with_template(config, explicit, tokenizer.chat_template)
    log_stops(config, tokenizer)
    conversation = _conversation(config, tokenizer)
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
    """Turns the tokenizer's chat template on if no flag says how messages become text."""
    flag = "data.apply_chat_template"
    if flag in explicit or "data.input_template" in explicit or not template:
        return config
    model = config.model.model_name_or_path
    notify(f"note: messages are in the chat template of {model}; --{flag} false leaves it out")
    return with_values(config, {flag: True})


def _conversation(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> Conversation:
    return Conversation(
        tokenizer,
        apply_chat_template=config.data.apply_chat_template,
        input_template=config.data.input_template,
        start=Path(config.ta_prompt).read_text(encoding="utf-8").strip() if config.ta_prompt else "",
        suffix=config.csft.prompt if config.csft.enable else None,
    )


def _load(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> VLLMStream | TransformersStream:
    """Loads the model in the selected engine, for streamed answers."""
    if config.engine == "transformers":
        model = load_answering_model(config).to(DEVICE_TYPE).eval()
        return TransformersStream(model, tokenizer.pad_token_id)
    return VLLMStream(
        EngineOptions.of(
            config,
            model=config.model.model_name_or_path,
            model_flag=MODEL_FLAG,
            max_len=config.data.max_len,
            on_gpu=DEVICE_TYPE == "cuda",
            enable_prefix_caching=True,
        )
    )


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
    seed = seed_at(config.train.seed, "chat", conversation.num_turns)
    text = PiecewiseText(tokenizer, prompt)
    if sys.stdin.isatty():
        print("Assistant: ", end="", flush=True)
    try:
        with closing(model.stream(prompt, seed, params)) as tokens:
            for token in tokens:
                print(clean_text(text.add(token)), end="", flush=True)
        print(clean_text(text.finish()), flush=True)
    except KeyboardInterrupt:
        print(clean_text(text.finish()), "(stopped)", flush=True)
    conversation.add(message, text.text)
