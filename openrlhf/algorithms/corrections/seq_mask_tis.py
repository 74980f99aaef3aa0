from openrlhf.algorithms.corrections.base import SamplerGap
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

    def __call__(self, gap: SamplerGap) -> Tensor:
        lowest, highest = gap.sequence_bounds or gap.bounds
        geometric_mean = segment_mean(gap.log_ratio, gap.counts).exp()
        kept = (lowest <= geometric_mean) & (geometric_mean <= highest)
        return super().__call__(gap).masked_fill(~spread(kept, gap.counts, len(gap.log_ratio)), 0)
