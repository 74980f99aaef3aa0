"""The local web page of `openrlhf view`: an index of the journals, queries, and a server on loopback."""
