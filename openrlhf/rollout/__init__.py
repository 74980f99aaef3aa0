"""Samples trajectories: runs episodes on engines and gets their rewards."""
