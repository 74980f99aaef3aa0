"""Checks, plans and rehearses a run, and shows its samples, before it starts."""

COMMANDS = {
    "init": ("init", "ask a few questions and write a commented configuration for a training run"),
    "schema": ("schema", "print the JSON Schema of a command's YAML file, with which editors complete it"),
    "plan": ("plan", "predict memory, time and batches of a training run from its configuration"),
    "check": ("check", "check a training run before it starts, and list all problems"),
    "rehearse": ("rehearse", "run a training command in minutes on CPU cores, with shrunk models"),
    "data": ("data", "data preview: show the samples that a supervised command would train on"),
    "agent": ("agent", "agent try, agent record: show, turn by turn, what an agent or a program would train"),
}
"""Command -> (module of this folder, summary for `--help`)."""
