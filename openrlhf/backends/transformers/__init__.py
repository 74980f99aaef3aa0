"""The rollout engine of transformers, without vLLM."""
