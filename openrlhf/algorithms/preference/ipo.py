from torch import Tensor


def ipo_loss(h: Tensor, *, beta: float) -> Tensor:
    """Identity preference optimization (IPO).

    A General Theoretical Paradigm to Understand Learning from Human Preferences,
    https://arxiv.org/abs/2310.12036, eq. 17

        l = (h - 1 / (2 beta))^2

    `h` (P,) is defined as in `dpo_loss`. Returns (P,).
    """
    return (h - 1 / (2 * beta)) ** 2
