"""Parts that the commands of tools share: arguments, and the runs that words describe."""
