"""Supervised commands: a `Task` for each (its data and objective), and the run that all share."""
