"""What users write agents with. `openrlhf.utils` has the same names, for files of theirs that exist."""
