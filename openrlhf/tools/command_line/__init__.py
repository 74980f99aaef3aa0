"""What the tools' commands share: their arguments, and the runs that words describe."""
