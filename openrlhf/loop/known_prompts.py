"""The prompts that a loop passes to the verbs: rows of a dataset, and texts, which get numbers of their
own."""

import threading
from collections.abc import Sequence
from functools import cached_property
from itertools import count

from transformers import PreTrainedTokenizerBase

from openrlhf.config.ppo import ACTOR_FLAG, PPOConfig
from openrlhf.data.bad_rows import check_embedded
from openrlhf.data.prompts import encode_prompts
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop.verb_arguments import list_of
from openrlhf.models.configurations import load_config
from openrlhf.models.tokenizers import missing_embeddings
from openrlhf.types import Prompt


class KnownPrompts:
    """Numbers texts as prompts, and checks that prompts leave room for an answer."""

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.num_texts, self._numbering = 0, threading.Lock()
        """Number of texts that were prompts, and the lock for it."""

    def of(self, prompts: Sequence[Prompt | str]) -> list[Prompt]:
        """Returns prompts; texts get numbers that no row has, so that they have seeds of their own. Raises
        UsageError for a prompt that leaves no room for an answer."""
        form = "prompts, which are texts or rl.Prompt; run.prompts(rows) makes them of rows and messages"
        given = list_of((Prompt, str), prompts, form)
        with self._numbering:
            numbers = count(self.num_texts + 1)
            known = [
                p if isinstance(p, Prompt) else Prompt(prompt_id=-next(numbers), text=str(p)) for p in given
            ]
            self.num_texts = next(numbers) - 1
        data, uncounted = self.config.data, [p.text for p in known if not (p.num_tokens or p.images)]
        encoded = encode_prompts(uncounted, self.tokenizer, is_chat=data.apply_chat_template)
        for text, token_ids in zip(uncounted, encoded, strict=True):
            check_embedded(token_ids, self._missing)
            if not (0 < (length := len(token_ids)) < data.max_len or self.config.agents):
                room = f"a prompt has {length} tokens, and may have 1 to {data.max_len - 1}"
                raise UsageError(
                    ErrorCode.TOO_LONG, f"{room}: {text[:60]!r}", flag="--data.max_len", value=data.max_len
                )
        return known

    @cached_property
    def _missing(self) -> dict[int, str]:
        config = load_config(self.config.actor.model_name_or_path, ACTOR_FLAG)
        return missing_embeddings(self.tokenizer, config)
