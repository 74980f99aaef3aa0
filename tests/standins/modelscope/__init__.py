"""In the place of the package modelscope, whose hub the tests cannot reach."""
