"""Objectives: `(model, batch, norm) -> (loss, metrics)`, the loss of one model on one batch."""
