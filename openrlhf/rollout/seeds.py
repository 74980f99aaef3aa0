"""Randomness has an address: who asks decides the seed, not when or on which engine."""

import hashlib


def seed_at(*address: int | str) -> int:
    """A seed in [0, 2**63) from an address such as (run seed, "train", episode, prompt id, sample index,
    turn)."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
