"""The rollout engine on transformers, which does not need vLLM."""
