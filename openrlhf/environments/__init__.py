"""Executors for third-party environments. `--train.agent_func_path` takes a file with a subclass of one of
them; see docs/environments.md."""
