"""Shows runs: on the terminal, and as a web page of their curves and rollouts."""
