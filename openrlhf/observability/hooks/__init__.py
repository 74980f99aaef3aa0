"""What a training loop announces, and who listens: checks, the run's record, and users' own observers."""
