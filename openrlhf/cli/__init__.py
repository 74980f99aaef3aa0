"""The commands that users run; each parses its flags, checks them, builds its parts and runs."""

from openrlhf import heap

heap.grow()
