"""Conversations with the policy as one token stream in its chat template."""

from openrlhf.api import BadRequest, Session
from openrlhf.api import ChatMessage as Message


class Conversation:
    """Sends texts to the policy as user messages, rendered by its chat template, and keeps answers as
    sampled."""

    def __init__(self, session: Session) -> None:
        self.session = session
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
