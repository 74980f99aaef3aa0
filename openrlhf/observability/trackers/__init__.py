"""Where metrics go: one file for each kind of tracker. Everybody above `observability` may import it."""
