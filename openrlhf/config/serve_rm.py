"""Configuration of `serve_rm`, and the checks of its flags."""

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from openrlhf.config import checks
from openrlhf.config.choices import Count, ExpertsImplementation, ParamDtype, Positive, Range
from openrlhf.config.command import Explicit, Problem

KEY_VARIABLE = "OPENRLHF_REWARD_KEY"
"""Environment variable with the key of reward servers, read by servers and clients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRewardConfig:
    """The reward model."""

    model_name_or_path: str | None = None
    """Hugging Face name or folder of the reward model. Required."""
    normalize_enable: bool = False
    """Subtract the mean and divide by the standard deviation that the reward model's config.json holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedDataConfig:
    """How texts become tokens."""

    max_len: Count = 2048
    """Longest text that the model reads, tokens; the rest is cut off, but for the token that ends it, and the
    answer says so in `extra_logs`."""
    apply_chat_template: bool = False
    """The texts come from a chat template, which wrote all special tokens: nothing is put in front of them.
    Without, a text begins with what the tokenizer puts there, unless it does so by itself."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedDsConfig:
    """Precision and kernels."""

    value_head_prefix: str = "score"
    """Name of the reward model's scalar head, where neither its config.json says it nor it is `score`."""
    load_in_4bit: bool = False
    """Weights of linear layers but the head in NF4, a quarter of bf16's memory (bitsandbytes). Scores differ
    a little from those of the whole weights."""
    param_dtype: ParamDtype | None = None
    """Type of the weights. None: that of the model."""
    attn_implementation: str = "auto"
    """Attention kernel by its name in transformers (eager, sdpa, flash_attention_2, ...). auto: the fastest
    that this machine has."""
    experts_implementation: ExpertsImplementation | None = None
    """Kernel for the experts of MoE models. None: as transformers chooses."""
    packing_samples: bool = False
    """Accepted for old commands: rows are always packed without padding, and attention never crosses a
    border."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeRMConfig:
    """Rewards of a model over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1: this machine only. Any other, as 0.0.0.0 (everybody who reaches this
    machine), needs a key."""
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 5000
    """Port to listen at. 0: any that is free."""
    api_key: str | None = None
    """Key that requests must bring as `Authorization: Bearer KEY`. None or True: that in the environment
    variable OPENRLHF_REWARD_KEY, which does not show in the list of processes; without it anybody on this
    machine may ask."""
    batch_size: Count | None = None
    """Texts in one forward pass at most. None: as many as max_tokens_per_gpu holds."""
    max_tokens_per_gpu: Count = 16192
    """Tokens in one forward pass. A longer text gets one of its own."""
    max_queue: Count = 16384
    """Texts that may wait; a request for which there is no room is answered with 503 and Retry-After."""
    max_texts: Count = 4096
    """Texts in one request."""
    max_text_chars: Count = 1_000_000
    """Longest text, characters."""
    max_body_mb: Positive = 64.0
    """Largest request, MB."""
    drain_seconds: Positive = 60.0
    """After SIGTERM requests that came before are still answered, for so long."""
    reward: ServedRewardConfig = field(default_factory=ServedRewardConfig)
    data: ServedDataConfig = field(default_factory=ServedDataConfig)
    ds: ServedDsConfig = field(default_factory=ServedDsConfig)
    use_ms: bool = False
    """Names of models and datasets are looked up on ModelScope in place of the Hugging Face hub."""

    @property
    def key(self) -> str | None:
        """Key that requests must carry; None: none is required."""
        from_environment = self.api_key in (None, "True")
        return (os.environ.get(KEY_VARIABLE) if from_environment else self.api_key) or None


def serve_rm_problems(config: ServeRMConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.bitsandbytes(config.ds.load_in_4bit),
            *checks.modelscope(config),
            *checks.required(config, "reward.model_name_or_path"),
            *checks.local_models(config, "reward.model_name_or_path"),
            *_access(config),
            *_limits(config),
            *checks.row_attention(config.ds.attn_implementation),
            *checks.attention_packages(config.ds),
            *checks.unread(config, explicit, (checks.ALWAYS_PACKED,)),
        ]
    )


def _access(config: ServeRMConfig) -> Iterator[Problem]:
    if config.api_key == "True" and not config.key:
        yield Problem("api_key", f"the environment variable {KEY_VARIABLE} is not set")
    elif config.api_key == "***":
        yield Problem("api_key", f"is a mask, not a key; use True and set {KEY_VARIABLE}")
    elif not config.key and not _is_loopback(config.host):
        yield Problem(
            "host",
            "without a key only this machine may ask; "
            f"set {KEY_VARIABLE} here and where the rewards are used, or listen at 127.0.0.1",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _limits(config: ServeRMConfig) -> Iterator[Problem]:
    if config.max_texts > config.max_queue:
        yield Problem(
            "max_texts", f"a request of so many could never wait: max_queue is {config.max_queue}; raise that"
        )
