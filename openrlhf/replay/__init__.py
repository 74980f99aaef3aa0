"""Comparisons of recorded runs: the first difference between two runs, and a step that is computed again."""
