"""Checks, plans and rehearses a run, and shows its samples, before it starts."""
