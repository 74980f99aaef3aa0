"""Checks and measures every part of openrlhf on a GPU, in stages that cannot end each other."""
