"""Events of the training loops, and those who listen: checks, the run's record, users' own observers."""
