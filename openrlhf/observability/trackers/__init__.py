"""Trackers of metrics, one file for each kind. Any layer above `observability` may import it."""
