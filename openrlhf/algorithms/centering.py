"""Score centering: subtracts from each action's score its mean under the sampler."""

from collections.abc import Callable

import torch
from torch import Tensor

SMALLEST = 1e-6
"""Smallest probability of all other tokens together: float32 rounds 1 - p by 1e-7."""


def centering(
    log_probs: Tensor,
    sampler: Tensor,
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None,
    log_masses: Tensor | None = None,
) -> Tensor:
    """Returns the coefficients c (A, K) of the sampler's K most likely tokens at each action, such that
    C = sum_v c_v log p_v, with constant c, has the gradient of the sampler's expected score.

    Score Centering Stabilizes Off-policy Reinforcement Learning, https://arxiv.org/abs/2609.20807

    At one action let p be the policy, q the sampler, A the advantage, s_v = grad log p_v the score of a token
    v, and w_v = f(p_v / q_v) the weight of the off-policy correction, 1 without one. The policy loss of a
    sampled y has the gradient -A w_y s_y. Its mean over q is -A mu for every A that does not depend on y,

        mu = sum_v q_v w_v s_v

    which is 0 where q = p, because sum_v p_v s_v = grad 1, and otherwise a drift without a reward. The loss
    with A C added has the gradient -A (w_y s_y - mu), whose mean over q is 0. With f(r) = r, exact importance
    sampling, mu is 0 already.

    q is recorded for its K most likely tokens H alone, with their probabilities under all of q: they are not
    renormalised. Outside of H it is taken to be proportional to p,

        q_v = rho p_v,   rho = (M - sum_H q_v) / (M - sum_H p_v)

    so the tail has one ratio, 1 / rho, and by sum_v p_v s_v = 0 its scores are those of H:

        mu = sum_H c_v s_v,   c_v = q_v w_v - rho f(1 / rho) p_v

    If H has all tokens of q, this is exact. M is 1, or in top-p/top-k sampling the probability of the
    recorded nucleus, over which p is normalised.

    Args:
        log_probs: (A, K) log p of the tokens H.
        sampler: (A, K) log q of them; -inf for tokens that top-p or top-k dropped.
        weigh: maps log p and log q, both (A, K + 1), to w; None: 1. The last column is the tail as one token.
        log_masses: (A,) log M; None: 0.
    """
    whole = 1.0 if log_masses is None else log_masses.exp()
    rest = whole - log_probs.exp().sum(-1), whole - sampler.exp().sum(-1)
    log_p = torch.cat([log_probs, rest[0].clamp(min=SMALLEST).log()[:, None]], 1)
    log_q = torch.cat([sampler, rest[1].clamp(min=0).log()[:, None]], 1)
    masses = log_q.exp() if weigh is None else log_q.exp() * weigh(log_p, log_q)
    return masses[:, :-1] - (masses[:, -1:] / log_p[:, -1:].exp()) * log_p[:, :-1].exp()
