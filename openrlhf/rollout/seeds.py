"""Derives seeds from the address of a request. A seed does not depend on when or on which engine the request
runs."""

import hashlib


def seed_at(*address: int | str) -> int:
    """Returns a seed in [0, 2**63) for an address such as (run seed, "train", episode, prompt id, sample
    index, turn)."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
