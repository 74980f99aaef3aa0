"""Streams an answer of a transformers model, and decodes its tokens to text incrementally."""

import queue
import threading
from collections.abc import Generator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.api import SamplingParams, decode
from openrlhf.api import generate_answers as generate


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
        return decode(self.tokenizer, self.token_ids, after=self.prompt, skip_special_tokens=True)

    def _new_text(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new


_REPLACEMENT = "\ufffd"
