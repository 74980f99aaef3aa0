"""The training backend on PyTorch alone, which does not need DeepSpeed."""
