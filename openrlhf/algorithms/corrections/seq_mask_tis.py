from openrlhf.algorithms.corrections.base import SamplerMismatch
from openrlhf.algorithms.corrections.tis import TIS
from openrlhf.algorithms.reductions import segment_mean, spread
from openrlhf.algorithms.tensor import Tensor


class SeqMaskTIS(TIS):
    """Drops sequences outside their threshold and clips the tokens of the others.

        w_t = clip(ratio, low, high) where the geometric mean of the sequence's ratios is in bounds, else 0

    By default the bounds of sequences equal those of tokens. The geometric mean of a sequence without actions
    is 1.
    """

    name = "seq-mask-tis"
    drops_sequences = True

    def __call__(self, mismatch: SamplerMismatch) -> Tensor:
        lowest, highest = mismatch.sequence_bounds or mismatch.bounds
        geometric_mean = segment_mean(mismatch.log_ratio, mismatch.counts).exp()
        kept = (lowest <= geometric_mean) & (geometric_mean <= highest)
        return (
            super().__call__(mismatch).masked_fill(~spread(kept, mismatch.counts, len(mismatch.log_ratio)), 0)
        )
