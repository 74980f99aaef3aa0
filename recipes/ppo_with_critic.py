"""PPO with a critic: a value for each action, generalized advantage estimation, several passes over a batch.

    python recipes/ppo_with_critic.py MODEL PROMPTS FOLDER

The loop is that of recipes/grpo.py; `batch` computes values, and `update` trains the critic, too. For a task
of your own change what recipes/grpo.py names.

High-Dimensional Continuous Control Using Generalized Advantage Estimation, https://arxiv.org/abs/1506.02438
"""

import sys

from grpo import FLAGS, main

WITH_CRITIC = {
    **FLAGS,
    "algo.advantage.estimator": "gae",
    "critic.adam.lr": 1e-3,
    "train.max_epochs": 2,
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], flags=WITH_CRITIC)
