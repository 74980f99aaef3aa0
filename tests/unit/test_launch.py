import pytest

from openrlhf.cluster.launch import resource_problems
from openrlhf.config.ppo import (
    ActorConfig,
    AdvantageConfig,
    AlgoConfig,
    CriticConfig,
    KLConfig,
    PPOConfig,
    RefConfig,
    RewardConfig,
    TrainConfig,
    VllmConfig,
)


def config(
    actors=2,
    refs=2,
    engines=2,
    tensor_parallel=1,
    kl=0.01,
    estimator="rloo",
    reward=None,
    **train,
) -> PPOConfig:
    return PPOConfig(
        critic=CriticConfig(num_gpus_per_node=3),
        reward=RewardConfig(model_name_or_path=reward, num_gpus_per_node=1),
        actor=ActorConfig(num_gpus_per_node=actors),
        ref=RefConfig(num_gpus_per_node=refs),
        vllm=VllmConfig(num_engines=engines, tensor_parallel_size=tensor_parallel),
        algo=AlgoConfig(advantage=AdvantageConfig(estimator=estimator), kl=KLConfig(init_coef=kl)),
        train=TrainConfig(**train),
    )


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 6),
        ({"kl": 0.0}, 4),
        ({"colocate_actor_ref": True}, 4),
        ({"colocate_all": True}, 2),
        ({"tensor_parallel": 3}, 10),
        ({"estimator": "gae"}, 9),
        ({"estimator": "gae", "reward": "one,two"}, 10),
        ({"estimator": "gae", "reward": "one", "colocate_critic_reward": True}, 9),
        ({"estimator": "gae", "reward": "one", "colocate_all": True}, 2),
        ({"reward": "one", "colocate_critic_reward": True}, 7),
    ],
)
def test_exactly_enough_gpus_are_enough(changes, gpus):
    assert resource_problems(config(**changes), {"GPU": gpus, "CPU": 1}) == []
    (problem,) = resource_problems(config(**changes), {"GPU": gpus - 1, "CPU": 1})
    assert f"the run needs {gpus} GPUs" in problem and f"the cluster has {gpus - 1}" in problem


def test_the_text_names_every_flag():
    (problem,) = resource_problems(config(tensor_parallel=2), {"GPU": 4.0, "CPU": 16.0})
    assert problem == (
        "the run needs 8 GPUs (--actor.num_nodes x --actor.num_gpus_per_node = 2, "
        "--ref.num_nodes x --ref.num_gpus_per_node = 2, "
        "--vllm.num_engines x --vllm.tensor_parallel_size = 4); the cluster has 4.\n"
        "Ask for fewer, or share them with --train.colocate_all (now False)."
    )


def test_without_gpus_a_rank_needs_a_core():
    resources = {"CPU": 4.0, "memory": 1e9}
    assert resource_problems(config(actors=4, refs=4, engines=4), resources) == []
    problems = resource_problems(config(actors=8, refs=1, engines=9), resources)
    assert problems == [
        "--actor.num_nodes x --actor.num_gpus_per_node asks for 8 ranks; the cluster has no GPU and 4 CPU "
        "cores, and a rank needs a core. Ask for at most 4.",
        "--vllm.num_engines x --vllm.tensor_parallel_size asks for 9 ranks; the cluster has no GPU and 4 CPU "
        "cores, and a rank needs a core. Ask for at most 4.",
    ]


def test_two_ranks_run_on_any_machine():
    """So that tests of two ranks run everywhere."""
    assert resource_problems(config(), {"CPU": 1.0}) == []
    assert len(resource_problems(config(actors=3), {"CPU": 1.0})) == 1
