"""Built-in verifiable tasks with tiny models, used by the demo and the tests."""
