"""Sampling of trajectories: episodes run on engines and get their rewards."""
