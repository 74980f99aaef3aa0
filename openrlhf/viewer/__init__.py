"""The web page of `openrlhf view`: an index of the runs' journals, queries, and a server on loopback."""
