"""Guests: they check, predict, examine, repeat, show and serve runs, and know `openrlhf.api` alone."""
