"""Checkpoints of a run: their files, the folder that holds them, and the choice of one to resume from."""
