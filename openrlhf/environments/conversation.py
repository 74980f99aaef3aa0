"""A policy that is spoken to: one stream of tokens in its own chat template."""

from typing import TYPE_CHECKING

from openrlhf.agents.base import Engine
from openrlhf.agents.openai import BadRequest, Message, Session
from openrlhf.completions import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Conversation:
    """What the policy is told are user messages, as its template writes them; what it sampled stays as it was
    sampled."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: "PreTrainedTokenizerBase",
        sampling_params: SamplingParams,
        max_length: int,
        max_turns: int | None = None,
    ) -> None:
        """`max_length`: of the whole stream. `max_turns`: answers, None: as many as have room."""
        self.session = Session(engine, tokenizer, sampling_params, max_length, max_turns=max_turns)
        self.messages: list[Message] = []
        self.token_ids: list[int] = []
        """The stream up to the last answer."""
        self.action_ranges: list[tuple[int, int]] = []
        """Where in it the answers are."""
        self.is_cut = False
        """Whether the last answer ran out of tokens."""

    async def answer(self, told: str) -> str | None:
        """Without its end-of-turn token. None: there is no further turn, no room for it, or the engine gave
        it up."""
        if self.session.turns_left == 0:
            return None
        self.messages.append({"role": "user", "content": told})
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
