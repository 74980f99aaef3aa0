import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openrlhf.algorithms.corrections import CORRECTIONS
from openrlhf.algorithms.corrections.base import Bounds, Correction, SamplerMismatch
from openrlhf.algorithms.corrections.gated import Gated
from openrlhf.algorithms.log_ratio import token_log_ratio
from openrlhf.algorithms.proximal import PROXIMAL_POLICIES
from openrlhf.algorithms.staleness import staleness_weights

COUNTS = torch.tensor([2, 3])
RATIO = torch.tensor([0.25, 1.0, 4.0, 8.0, 2.0])  # geometric means 0.5 and 4


def correct(
    kind: str | Correction,
    log_ratio: Tensor,
    counts: Tensor,
    *bounds: float,
    of_sequences: Bounds | None = None,
    sampler: Tensor | None = None,
) -> Tensor:
    rollout = torch.full_like(log_ratio, -1.0) if sampler is None else sampler
    gap = SamplerMismatch(
        log_ratio=log_ratio,
        log_probs=rollout + log_ratio,
        rollout_log_probs=rollout,
        counts=counts,
        bounds=bounds,
        sequence_bounds=of_sequences,
    )
    return (kind if isinstance(kind, Correction) else CORRECTIONS[kind]())(gap)


def test_tis_clamps():
    assert correct("tis", RATIO.log(), COUNTS, 0.5, 5.0).tolist() == pytest.approx([0.5, 1, 4, 5, 2])


def test_icepop_drops_tokens():
    assert correct("icepop", RATIO.log(), COUNTS, 0.5, 5.0).tolist() == pytest.approx([0, 1, 4, 0, 2])


def test_seq_mask_tis_drops_sequences_and_clamps_the_rest():
    assert correct("seq-mask-tis", RATIO.log(), COUNTS, 0.6, 5.0).tolist() == pytest.approx([0, 0, 4, 5, 2])
    assert correct("seq-mask-tis", RATIO.log(), COUNTS, 0.4, 3.0).tolist() == pytest.approx([0.4, 1, 0, 0, 0])


def test_sequences_have_bounds_of_their_own():
    """The ratios are 1.2, 1.2 and 0.9, 1.1: geometric means 1.2 and 0.995."""
    ratio, counts = torch.tensor([1.2, 1.2, 0.9, 1.1]), torch.tensor([2, 2])
    own = correct("seq-mask-tis", ratio.log(), counts, 0.95, 1.05, of_sequences=(0.99, 1.01))
    assert own.tolist() == pytest.approx([0, 0, 0.95, 1.05])
    on_bounds = correct("seq-mask-tis", torch.zeros(4), counts, 1.0, 1.0)
    assert on_bounds.tolist() == [1, 1, 1, 1]  # both bounds belong to the range
    shared = correct("seq-mask-tis", ratio.log(), counts, 0.95, 1.3)
    assert shared.tolist() == pytest.approx([1.2, 1.2, 0.95, 1.1])


def test_the_gate_of_tokens_is_icepop_and_its_clip_is_tis():
    given = RATIO.log(), COUNTS, 0.5, 5.0
    for gate, name in ((Gated(), "icepop"), (Gated(mode="clip"), "tis")):
        assert correct(gate, *given).equal(correct(name, *given))
    assert correct(Gated(), RATIO.log(), COUNTS, 0.0, 5.0).tolist() == pytest.approx([0.25, 1, 4, 0, 2])


def test_the_gate_of_sequences_keeps_the_ratios_of_tokens():
    gate = Gated(level="seq")
    assert correct(gate, RATIO.log(), COUNTS, 0.6, 5.0).tolist() == pytest.approx([0, 0, 4, 8, 2])
    assert correct(gate, RATIO.log(), COUNTS, 0.4, 3.0).tolist() == pytest.approx([0.25, 1, 0, 0, 0])


P, Q = torch.tensor([0.5, 0.5, 0.1, 1.0]), torch.tensor([0.25, 0.5, 0.2, 0.5])
DIVERGENCES = {
    # |p - q|
    "tv": [0.25, 0, 0.1, 0.5],
    # .5 log 2 + .5 log(2/3), 0, .1 log(1/2) + .9 log(9/8), and log 2: nothing is left for other tokens
    "binary_kl": [0.1438410, 0, 0.0366901, 0.6931472],
}


@pytest.mark.parametrize("gating", DIVERGENCES)
def test_the_gate_of_a_divergence_by_hand(gating):
    """Each token is kept at a bound just above its divergence, and dropped just below it."""
    counts, ratio = torch.tensor([3, 1]), Q / P
    for i, value in enumerate(DIVERGENCES[gating]):
        for bound, is_kept in ((value + 1e-4, True), (value - 1e-4, False)):
            weights = correct(Gated(gating=gating), ratio.log(), counts, 0.0, bound, sampler=P.log())
            assert weights[i].item() == pytest.approx(ratio[i].item() if is_kept else 0)
    mean = sum(DIVERGENCES[gating][:3]) / 3
    of_sequences = Gated(level="seq", gating=gating)
    kept = correct(of_sequences, ratio.log(), counts, 0.0, mean + 1e-4, sampler=P.log())
    assert kept.tolist() == pytest.approx([0.5, 1, 2, 0])
    assert correct(of_sequences, ratio.log(), counts, 0.0, mean - 1e-4, sampler=P.log()).tolist() == [0] * 4


@pytest.mark.parametrize("gating", DIVERGENCES)
def test_a_certain_token_has_no_divergence_from_rounding(gating):
    """A probability of 1 - 3e-8 is 1 in float32, and its log-prob is not 0."""
    sampler, counts = torch.tensor([-3e-8, 0.0]), torch.tensor([2])
    weights = correct(Gated(gating=gating), sampler.flip(0) - sampler, counts, 0.0, 1e-5, sampler=sampler)
    assert weights.tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_finite_however_far_the_sampler_is(name):
    log_probs, rollout = torch.tensor([0.0, -900, 0, -1, -1]), torch.tensor([-900.0, 0, -torch.inf, -1, -1])
    weights = correct(name, token_log_ratio(log_probs, rollout, COUNTS), COUNTS, 0.5, 5.0)
    assert weights.isfinite().all()
    assert weights.max() <= 5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_faithful_sampler_changes_nothing(name):
    assert correct(name, torch.zeros(5), COUNTS, 0.5, 5.0).tolist() == [1] * 5
    assert correct(name, torch.zeros(0), torch.tensor([0]), 0.5, 5.0).tolist() == []


NOW, OLD, SAMPLER = torch.tensor([[-1.0] * 5, [-2.0] * 5, [-3.0] * 5])
STALENESS = torch.tensor([0, 1, 2, 4, 1], dtype=torch.int32)


def test_proximal_policies_by_hand():
    of = {name: proximal()(NOW, OLD, SAMPLER, STALENESS) for name, proximal in PROXIMAL_POLICIES.items()}
    assert of["recomputed"].tolist() == OLD.tolist()
    assert of["rollout"].tolist() == SAMPLER.tolist()
    # 1 / s of the sampler's -3, the rest of the policy's -1; the sampler's up to staleness 1
    assert of["interpolated"].tolist() == [-3, -3, -2, -1.5, -3]


def test_proximal_policies_of_what_is_not_known():
    """A step of one update knows no older policy than its own, and with staleness 0 interpolation returns the
    sampler."""
    of = {name: proximal()(NOW, None, SAMPLER, None) for name, proximal in PROXIMAL_POLICIES.items()}
    assert of["recomputed"] is NOW and of["rollout"] is of["interpolated"] is SAMPLER


@given(st.lists(st.tuples(*[st.floats(-20, 0, width=32)] * 2, st.integers(0, 99)), min_size=1, max_size=9))
def test_the_interpolated_policy_is_between_the_two_and_contracts_the_ratio(values):
    """The policy lies between both, and pi / pi_prox = (pi / pi_behave)^alpha
    (https://arxiv.org/abs/2512.06547). Each of the four operations rounds numbers below 20 to float32."""
    log_probs, sampler = torch.tensor([v[:2] for v in values]).T
    staleness = torch.tensor([v[2] for v in values])
    proximal = PROXIMAL_POLICIES["interpolated"]()(log_probs, None, sampler, staleness)
    error = 4 * 20 * 2**-24
    assert (torch.minimum(log_probs, sampler) - error <= proximal).all()
    assert (proximal <= torch.maximum(log_probs, sampler) + error).all()
    contracted = (log_probs - sampler).double() / staleness.clamp(min=1)
    torch.testing.assert_close((log_probs - proximal).double(), contracted, atol=error, rtol=0)


def test_staleness_weights_by_hand():
    weights = lambda decay, limit, ratio: staleness_weights(STALENESS, COUNTS, decay, limit, ratio).tolist()
    assert weights(0.5, None, "token") == [1, 0.5, 0.25, 0.0625, 0.5]
    assert weights(0.5, 1, "token") == [1, 0.5, 0, 0, 0.5]
    assert weights(1.0, 0, "token") == [1, 0, 0, 0, 0]
    # sequences of 0, 1 and 2, 4, 1: means 1/2 and 7/3
    assert weights(0.5, None, "sequence") == pytest.approx([0.5**0.5] * 2 + [0.5 ** (7 / 3)] * 3)
    assert weights(1.0, 1, "sequence") == [1, 1, 0, 0, 0]
    assert staleness_weights(STALENESS[:0], torch.tensor([0]), 0.5, 1, "sequence").tolist() == []


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=5), st.data())
def test_the_weight_of_an_action_depends_on_no_other_sequence(sequences, data):
    """Weights are the same however rows are packed, and in whatever order."""
    order = data.draw(st.permutations(range(len(sequences))))
    for ratio in ("token", "sequence"):

        def weigh(rows: list[list[int]], ratio=ratio) -> list[float]:
            counts = torch.tensor([len(row) for row in rows])
            values = torch.tensor([s for row in rows for s in row], dtype=torch.int32)
            return staleness_weights(values, counts, 0.7, 4, ratio).tolist()

        alone = [weigh([row]) for row in sequences]
        assert weigh([sequences[i] for i in order]) == [w for i in order for w in alone[i]]
