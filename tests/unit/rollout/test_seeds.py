import itertools

from openrlhf.rollout.seeds import seed_at


def test_a_seed_is_a_fact():
    """A seed is the same on every machine and in every release: journals are replayed from addresses."""
    assert seed_at(42, "train", 0, 7, 3) == 3809089003153826366
    assert seed_at(42, "train", 0, 7, 3) == seed_at(42, "train", 0, 7, 3)


def test_every_part_of_the_address_counts():
    addresses = list(itertools.product((0, 1), ("train", "eval"), (0, 1), (0, 1, 10), (0, 1, 10)))
    seeds = [seed_at(*address) for address in addresses]
    assert len(set(seeds)) == len(addresses)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_at(1, 23) != seed_at(12, 3)
    assert seed_at(1, "2") != seed_at(1, 2)


def test_seeds_are_spread_evenly():
    low_bits = [seed_at(0, i) % 2 for i in range(2000)]
    assert 900 < sum(low_bits) < 1100
