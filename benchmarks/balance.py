"""Balance and speed of `data/packing.py`, which distributes the sequences of a step over ranks. The lengths
are those of reasoning, 16 to 32768 tokens:

    log-normal   median 1800 tokens
    groups       the same, 8 answers to each prompt of about its length
    bimodal      70 % short answers, and chains of thought from 16000 tokens

The table shows the worst of the seeds: the most tokens of a rank, divided by the mean of all ranks and by a
lower bound of every distribution (`least_possible`); and seconds. Exits with an error if a sequence is lost.

    python benchmarks/balance.py
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence

from openrlhf.data.packing import partition

SIZES = [(128, 8), (512, 64), (1024, 64), (4096, 128), (4096, 512), (8192, 512)]
"""(sequences, ranks) of each measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=8192, help="largest number of sequences")
    options = parser.parse_args()
    print("| sequences | ranks | lengths | most / mean | most / least possible | seconds |")
    print("|---|---|---|---|---|---|")
    for n, ranks in SIZES:
        for name, draw in LENGTHS.items():
            if n <= options.largest:
                runs = [measure(draw(n, random.Random(seed)), ranks) for seed in range(options.seeds)]
                mean, least, seconds = (max(figures) for figures in zip(*runs, strict=True))
                print(f"| {n} | {ranks} | {name} | {mean:.3f} | {least:.3f} | {seconds:.2f} |")


def measure(lengths: Sequence[int], ranks: int) -> tuple[float, float, float]:
    start = time.perf_counter()
    parts = partition(lengths, ranks)
    seconds = time.perf_counter() - start
    if sorted(i for part in parts for i in part) != list(range(len(lengths))):
        sys.exit("error: a sequence is lost")
    most = max(sum(lengths[i] for i in part) for part in parts)
    return most / (sum(lengths) / ranks), most / least_possible(lengths, ranks), seconds


def least_possible(costs: Sequence[int], k: int) -> float:
    """Returns a lower bound of the costliest of `k` parts: the mean, and for every j the cost of the cheapest
    j + 1 of the j k + 1 costliest sequences, because some part has at least j + 1 of them."""
    order = sorted(costs, reverse=True)
    crowded = [sum(order[j * (k - 1) : j * k + 1]) for j in range((len(costs) - 1) // k + 1)]
    return max(sum(costs) / k, *crowded)


def log_normal(n: int, rng: random.Random) -> list[int]:
    return [clipped(math.exp(rng.gauss(7.5, 1))) for _ in range(n)]


def groups(n: int, rng: random.Random) -> list[int]:
    means = [rng.gauss(7.5, 0.8) for _ in range(n // 8)]
    return [clipped(math.exp(rng.gauss(mean, 0.3))) for mean in means for _ in range(8)]


def bimodal(n: int, rng: random.Random) -> list[int]:
    return [rng.randint(16, 400) if rng.random() < 0.7 else rng.randint(16000, 32768) for _ in range(n)]


def clipped(length: float) -> int:
    return min(32768, max(16, round(length)))


LENGTHS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "log-normal": log_normal,
    "groups": groups,
    "bimodal": bimodal,
}

if __name__ == "__main__":
    main()
