"""Sampling: prompts go to engines, trajectories with rewards come back."""
