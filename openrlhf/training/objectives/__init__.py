"""What one model minimises on one batch: `(model, batch, norm) -> (loss, metrics)`."""
