"""What a value may be: names and ranges. Nothing heavy is imported here, so that `--help` answers at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

EstimatorName = Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
KLEstimator = Literal["k1", "k2", "k3"]
PolicyLossType = Literal["ppo", "gspo", "cispo"]
LossAggregation = Literal["token_mean", "sample_mean", "constant_length"]
ISCorrectionType = Literal["tis", "icepop", "seq-mask-tis"]
OptimizerName = Literal["adam", "muon"]
ParamDtype = Literal["bf16", "fp16", "fp32"]
ExpertsImplementation = Literal["eager", "batched_mm", "grouped_mm", "deepgemm"]
SyncBackend = Literal["nccl", "gloo"]
BadRows = Literal["error", "skip"]
PairLoss = Literal["sigmoid", "logexp"]
InferenceTask = Literal["generate_vllm", "generate", "rm"]
PostProcessor = Literal["rs", "csft", "iter_dpo"]
ChatEngine = Literal["transformers", "vllm"]
DistillationLoss = Literal["forward_kl", "reverse_kl"]
JournalMode = Literal["full", "sample", "off"]

GROUP_ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""They compare the samples of one prompt, and credit every action with the whole outcome (gamma is 1)."""
WHITENING_ESTIMATORS = ("gae", "reinforce", "reinforce_baseline")
"""They whiten advantages over all actions of a step."""
SEQUENCE_LOSSES = ("gspo",)
"""Policy losses with the ratio of a sequence and the mean over sequences; the others have those of tokens."""

FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Attention kernels that come in a package of their own, which need not be installed."""
ROW_KERNELS = ("auto", "sdpa", "eager", *FLASH_PACKAGES)
"""Attention that keeps the sequences of a packed row apart. So do those of `HUB_KERNELS`."""
HUB_KERNELS = "kernels-community/"

LR_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""Names that `transformers.get_scheduler` knows and for which flags say all that they need."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number; `above` and `below` exclude the bound itself."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.at_most is None or number <= self.at_most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        words = {
            "at least": self.at_least,
            "more than": self.above,
            "at most": self.at_most,
            "less than": self.below,
        }
        return " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)


Count = Annotated[int, Range(at_least=1)]
CountOrZero = Annotated[int, Range(at_least=0)]
Steps = Annotated[int, Range(at_least=-1)]
"""An interval. -1 and 0: never, or what the flag says; see `is_due`."""
Positive = Annotated[float, Range(above=0)]
PositiveOrZero = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
PositiveShare = Annotated[float, Range(above=0, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
Smoothing = Annotated[float, Range(at_least=0, below=0.5)]
