"""Weight sync: sends weights from a model in training to rollout engines, and checks what they loaded."""
