"""The rows of docs/results.md: tasks, methods, the program that repeats a row, and the page."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.extend(str(ROOT / folder) for folder in ("recipes", "tools", "examples/python"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
"""The number of threads decides the order in which sums are added; torch reads it when it is imported."""
