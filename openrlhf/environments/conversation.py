"""Conversations with the policy as one token stream in its chat template."""

from typing import TYPE_CHECKING

from openrlhf.agents.base import Engine
from openrlhf.agents.openai import BadRequest, Message, Session
from openrlhf.completions import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """Sends texts to the policy as user messages, rendered by its chat template, and keeps answers as
    sampled."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        sampling_params: SamplingParams,
        max_length: int,
        max_turns: int | None = None,
    ) -> None:
        """`max_length`: tokens of the whole stream. `max_turns`: number of answers; None: as many as fit."""
        self.session = Session(engine, tokenizer, sampling_params, max_length, max_turns=max_turns)
        self.messages: list[Message] = []
        self.token_ids: list[int] = []
        """Tokens of the stream, including the last answer."""
        self.action_ranges: list[tuple[int, int]] = []
        """Ranges [start, end) of the answers in `token_ids`."""
        self.is_cut = False
        """True if the last answer ran out of tokens."""

    async def answer(self, text: str) -> str | None:
        """Returns the policy's answer without its end-of-turn token; None if no turn is left, no room is
        left, or the engine aborted the request."""
        if self.session.turns_left == 0:
            return None
        self.messages.append({"role": "user", "content": text})
        try:
            found = await self.session.complete({"messages": self.messages})
        except BadRequest as error:
            if self.session.num_turns and error.code == "context_length_exceeded":
                return None
            raise
        (choice,) = found["choices"]
        start = len(found["prompt_token_ids"])
        self.token_ids = [*found["prompt_token_ids"], *choice["token_ids"]]
        self.action_ranges.append((start, len(self.token_ids)))
        self.is_cut = choice["finish_reason"] == "length"
        self.messages.append(choice["message"])
        return None if choice["finish_reason"] == "abort" else choice["message"]["content"]
