"""Environments that others have made, as agents: a file with a subclass of one of these executors is what
`--train.agent_func_path` takes. docs/environments.md"""
