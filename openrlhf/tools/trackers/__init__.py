"""Trackers of other packages; entry points of the group `openrlhf.trackers` name them."""
