"""Everything that people look at: the screen, metrics, samples, reports."""
