"""Sends weights from a model in training to rollout engines, and checks the weights that they loaded."""
