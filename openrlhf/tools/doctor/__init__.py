"""Finds the causes of a run's problems from the files of its folder."""
