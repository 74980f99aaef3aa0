"""Trackers of metrics that other packages provide; entry points of the group `openrlhf.trackers` name them."""
