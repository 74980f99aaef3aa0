"""Computes recorded runs again, and finds their first difference."""
