"""The checks of a run while it trains: hooks that the package's entry points attach to every run."""
