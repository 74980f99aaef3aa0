"""Training engines, rollout engines, and the weight sync between them."""
