"""Pure functions: tensors and numbers in, tensors and numbers out."""
