"""vLLM behind token in, token out, and both ends of a weight sync."""
