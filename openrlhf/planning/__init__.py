"""Predictions of a run's placement, batches, memory and time, from its configuration alone."""
