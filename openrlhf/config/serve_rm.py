"""Configuration of `serve_rm`, and the checks of its flags."""

import ipaddress
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from openrlhf.config import checks
from openrlhf.config.choices import Count, ExpertsImplementation, ParamDtype, Positive, Range
from openrlhf.config.command import Explicit, Problem
from openrlhf.config.inference import InferenceKernelsConfig
from openrlhf.config.sections import KEY_VARIABLE, HubConfig, TokenizerConfig
from openrlhf.errors import ErrorCode

IN_ENVIRONMENT = ("True", "true")
"""Values of api_key that stand for the key in the environment; YAML has the second."""


@dataclass(frozen=True, kw_only=True)
class ServedRewardConfig:
    """The reward model."""

    model_name_or_path: str | None = None
    """Reward model: a Hugging Face name or a folder. Required."""
    normalize_enable: bool = False
    """Normalise scores with the mean and the standard deviation of the reward model's config.json."""


@dataclass(frozen=True, kw_only=True)
class ServedDataConfig(TokenizerConfig):
    """Tokenisation of texts."""

    max_len: Count = 2048
    """Maximum length of a text, tokens. Longer ones are cut off before their last token, and the answer says
    so in `extra_logs`. If it is not set, at most what the model reads."""
    apply_chat_template: bool = False
    """The texts come from a chat template, which wrote all special tokens, so none are added. Otherwise the
    tokenizer's first token (BOS) is added where a text does not start with it."""


@dataclass(frozen=True, kw_only=True)
class ServedDsConfig(InferenceKernelsConfig):
    """Precision and kernels."""

    param_dtype: ParamDtype | None = None
    """Data type of the weights. None: that of the model."""
    value_head_prefix: str = "score"
    """Name of the reward model's scalar head. Needed only if the head is not named `score` and config.json
    does not name it."""
    experts_implementation: ExpertsImplementation | None = None
    """Kernel for the experts of MoE models. None: transformers chooses."""
    packing_samples: bool = False
    """Accepted for old commands and not read: texts are always packed without padding, and attention never
    reaches from one text into another."""


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig(HubConfig):
    """Rewards of a model over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen at. 127.0.0.1: only this machine can connect. Every other address, such as 0.0.0.0
    (all networks of this machine), needs a key."""
    port: Annotated[int, Range(at_least=0, at_most=65535)] = 5000
    """Port to listen at. 0: any free port."""
    api_key: str | None = None
    """Key that requests must carry as `Authorization: Bearer KEY`. None or True: the value of the environment
    variable OPENRLHF_REWARD_KEY, which the list of processes does not show; if it is not set, no key is
    needed on this machine."""
    batch_size: Count | None = None
    """Maximum number of texts in one forward pass. None: as many as fit into max_tokens_per_gpu."""
    max_tokens_per_gpu: Count = 16192
    """Maximum number of tokens in one forward pass. A longer text gets a pass of its own."""
    max_queue: Count = 16384
    """Maximum number of waiting texts. A request beyond it gets the answer 503 with Retry-After."""
    max_texts: Count = 4096
    """Maximum number of texts in one request."""
    max_text_chars: Count = 1_000_000
    """Maximum length of a text, characters."""
    max_body_mb: Positive = 64.0
    """Maximum size of a request, MB."""
    drain_seconds: Positive = 60.0
    """Seconds after SIGTERM in which the server still answers requests that it accepted before."""
    reward: ServedRewardConfig = ServedRewardConfig()
    data: ServedDataConfig = ServedDataConfig()
    ds: ServedDsConfig = ServedDsConfig()

    @property
    def key(self) -> str | None:
        """Key that requests must carry; None: none is required."""
        from_environment = self.api_key in (None, *IN_ENVIRONMENT)
        return (os.environ.get(KEY_VARIABLE) if from_environment else self.api_key) or None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _requests(c: ServeRMConfig) -> Iterator[Problem]:
    """Checks who may connect, and the sizes of requests."""
    if c.api_key in IN_ENVIRONMENT and not c.key:
        text = f"the environment variable {KEY_VARIABLE} is not set"
        yield Problem("api_key", text, ErrorCode.MISSING_FLAG)
    if c.api_key == "***":
        text = f"*** stands for a key in printed output; use True and set {KEY_VARIABLE}"
        yield Problem("api_key", text, ErrorCode.INVALID_VALUE)
    if c.api_key not in (*IN_ENVIRONMENT, "***") and not c.key and not _is_loopback(c.host):
        text = f"without a key only this machine may connect; set {KEY_VARIABLE} here and where the rewards "
        yield Problem("host", f"{text}are used, or use 127.0.0.1")
    if c.max_texts > c.max_queue:
        text = f"a request with this many texts never fits in max_queue {c.max_queue}; raise max_queue"
        yield Problem("max_texts", text)


def serve_rm_problems(config: ServeRMConfig, explicit: Explicit) -> list[Problem]:
    return checks.first_of_each(
        [
            *checks.bitsandbytes(config.ds.load_in_4bit),
            *checks.modelscope(config),
            *checks.required(config, "reward.model_name_or_path"),
            *checks.local_models(config, "reward.model_name_or_path"),
            *_requests(config),
            *checks.row_attention(config.ds.attn_implementation),
            *checks.attention_packages(config.ds),
            *checks.remark_ignored(config, explicit, [checks.ALWAYS_PACKED]),
        ]
    )
