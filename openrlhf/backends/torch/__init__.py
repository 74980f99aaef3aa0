"""Plain PyTorch behind `TrainEngine`: no DeepSpeed is imported or needed."""
