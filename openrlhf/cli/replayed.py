"""`python -m openrlhf.cli.replayed`: see `openrlhf.tools.replay`."""

from openrlhf.tools.replay.replayed import main

if __name__ == "__main__":
    main()
