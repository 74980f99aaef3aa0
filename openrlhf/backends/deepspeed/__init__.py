"""The DeepSpeed training backend. Only this package imports DeepSpeed."""
