"""The agent API of users' files; modules of `openrlhf.utils` re-export it."""
