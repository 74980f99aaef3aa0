"""Losses, advantages, corrections and metrics as pure functions of tensors and numbers."""
