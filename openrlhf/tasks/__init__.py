"""Built-in verifiable tasks with a tiny model: what the demo and the tests train on."""
