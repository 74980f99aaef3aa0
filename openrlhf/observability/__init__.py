"""Screen output, metrics, samples and reports of a run."""
