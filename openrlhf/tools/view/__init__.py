"""Shows runs: on the terminal, and as a web page of their curves and rollouts."""

COMMANDS = {
    "rollouts": ("rollouts", "print samples of an RL run, with tokens coloured by advantage"),
    "watch": ("watch", "show a run on one screen: steps, phases, curves, samples, warnings"),
    "view": ("view", "serve a local web page of runs: curves side by side, and every rollout"),
}
"""Command -> (module of this folder, summary for `--help`)."""
