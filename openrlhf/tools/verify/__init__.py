"""Compares what a run computes with references."""
