"""Finds the causes of what went wrong in a run, from the files of its folder."""
