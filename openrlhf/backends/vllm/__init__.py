"""The vLLM rollout engine, and both sides of weight transfers to it."""
