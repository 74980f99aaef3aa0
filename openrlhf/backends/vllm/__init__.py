"""The vLLM rollout engine, and both ends of weight transfers to it."""
