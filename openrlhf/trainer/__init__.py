"""The loops that decide what happens next."""
