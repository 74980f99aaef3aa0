from openrlhf.algorithms.policy_losses.ppo import PPO


class GSPO(PPO):
    """Group sequence policy optimization (GSPO): clipped ratio of whole sequences.

    Group Sequence Policy Optimization, https://arxiv.org/abs/2507.18071, eq. 5 to 7

        l_t = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)
        ratio = exp(mean_t log(pi / pi_prox))

    All actions of a sequence share its ratio, so it is clipped as a whole. The ratio of a sequence stays much
    closer to 1 than that of a token: the paper uses `--actor.eps_clip_low_high 3e-4 4e-4`.
    """

    name = "gspo"
    ratio = "sequence"
