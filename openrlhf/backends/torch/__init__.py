"""The training backend of plain PyTorch, which neither imports nor needs DeepSpeed."""
