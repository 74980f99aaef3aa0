"""Stand-in for the package modelscope, whose hub the tests cannot reach."""
