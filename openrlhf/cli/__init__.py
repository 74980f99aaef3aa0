"""What users run: parse, check, build, run."""

from openrlhf import heap

heap.grow()
