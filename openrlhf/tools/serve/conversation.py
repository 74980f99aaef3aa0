"""Renders a growing conversation as the text that a model continues."""

from transformers import PreTrainedTokenizerBase

from openrlhf.api import Message, PromptTemplate, with_suffix


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
        """Appends a finished turn: a message and its answer."""
        self.text = self.prompt(message) + answer
        asked = message if self.suffix is None else with_suffix(message, self.suffix)
        self.messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        self.num_turns += 1
