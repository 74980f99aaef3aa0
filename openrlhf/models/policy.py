"""The policy model: a Hugging Face causal language model that reads packed rows and returns the log-probs of
actions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from openrlhf.algorithms.logprobs import WHOLE, Vocabulary, linear_log_probs, sum_of_log_probs
from openrlhf.memory.sizes import SOFTCAPS
from openrlhf.models.backbone import RowModel, action_states
from openrlhf.rows import PackedRow


class TokenScores(NamedTuple):
    """The output of the policy for the actions of a row."""

    log_probs: Tensor  # (A,) float32; () if their sum was requested
    entropy: Tensor | None  # (A,) float32, None if not requested
    likely: Tensor | None = None  # (A, K) float32, log-probs of other tokens; None if not requested


class PolicyModel(RowModel):
    """A causal language model that returns the log-probs of actions. All logits never exist at once: the head
    runs in chunks, and only on the hidden states that predict an action."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head_options = head_options(model.config)
        # Only the class changes: a module around the head would rename its weight, by which checkpoints,
        # adapters and engines know it; a copy would lose its tie to the embedding and ZeRO-3's hooks.
        get_head(model).__class__ = LogProbHead

    def forward(
        self,
        row: PackedRow,
        temperature: float = 1.0,
        with_entropy: bool = False,
        summed: bool = False,
        likely: Tensor | None = None,
    ) -> TokenScores:
        """Returns the scores of the row's actions. `temperature` divides the logits, as in sampling, unless
        the row has those of its actions. For actions with a recorded top-p/top-k nucleus the distribution is
        the softmax over the recorded tokens, and the log of their total probability in the sampler
        (`Nuclei.log_masses`, a constant) is added to the log-probs. With `summed`, which excludes the
        entropy, returns the sum of the log-probs and computes the head's gradients in the forward pass, see
        `sum_of_log_probs`. `likely`: (A, K) further tokens at each action whose log-probs are returned too.
        They must be inside its nucleus, or have probability 0 under the sampler.
        """
        states = action_states(self.model, row, row.actions - 1)
        scale, softcap = self.head_options
        divisors = temperature if row.temperatures is None else row.temperatures[states.own]
        targets = row.token_ids[row.actions[states.own]]
        if likely is not None:
            targets = torch.cat([targets[:, None], likely[states.own]], 1)
        log_probs, entropy = get_head(self.model)(
            states.hidden,
            targets,
            scale=scale / divisors,
            softcap=softcap,
            kept=None if row.kept_ids is None else row.kept_ids[states.own],
            with_entropy=with_entropy,
            summed=summed,
        )
        if summed:
            return TokenScores(states.total(log_probs), None)
        log_probs = states.whole(log_probs)
        if row.log_masses is not None:
            log_probs = log_probs + (row.log_masses if likely is None else row.log_masses[:, None])
        entropy = None if entropy is None else states.whole(entropy)
        if likely is None:
            return TokenScores(log_probs, entropy)
        return TokenScores(log_probs[:, 0].clone(), entropy, log_probs[:, 1:].clone())


class LogProbHead(nn.Linear):
    """A language model head that can return log-probs instead of logits. It is called as a module so that
    ZeRO-3 gathers its weight."""

    vocabulary: Vocabulary = WHOLE
    """The vocabulary or, under tensor parallelism, this rank's shard of it (models/tensor_parallel.py)."""

    # pyrefly: ignore[bad-override]  without targets it is a linear layer
    def forward(
        self,
        input: Tensor,
        targets: Tensor | None = None,
        *,
        scale: float | Tensor = 1.0,
        softcap: float | None = None,
        kept: Tensor | None = None,
        with_entropy: bool = False,
        summed: bool = False,
    ) -> Any:
        """Returns logits without `targets`. With `targets`, (A,) or (A, T): their log-probs, or the sum, and
        the entropy (A,) or None, of softmax(scale * head(input)). `kept` restricts the softmax as in
        `linear_log_probs`."""
        if targets is None:
            return self.vocabulary.joined(super().forward(input))
        options: dict[str, Any] = {"scale": scale, "bias": self.bias, "softcap": softcap}
        options["vocabulary"] = self.vocabulary
        if summed:
            return sum_of_log_probs(input, self.weight, targets, **options), None
        return linear_log_probs(input, self.weight, targets, kept=kept, with_entropy=with_entropy, **options)


def get_head(model: PreTrainedModel) -> nn.Module:
    """Returns the head of a causal language model."""
    head = model.get_output_embeddings()
    assert head is not None  # a causal language model has one
    return head


def head_options(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Returns the architecture's transformation of logits as (factor, softcap): Cohere multiplies logits,
    Granite divides them, Gemma caps them by tanh."""
    text_config = config.get_text_config()
    known = lambda *names: next(filter(None, (getattr(text_config, name, None) for name in names)), None)
    factor = known("logit_scale") or 1.0
    divisor = known("logits_scaling", "logits_mup_width_multiplier") or 1.0
    return factor / divisor, known(*SOFTCAPS)


def transformed_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Returns the logits of the architecture, given those of its head, of any shape (see `head_options`)."""
    scale, softcap = head_options(config)
    logits = logits * scale
    return logits if softcap is None else softcap * (logits / softcap).tanh()
