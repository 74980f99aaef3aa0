"""The program of a process of `openrlhf replay`, under the name that it has in all commits."""

from openrlhf.tools.replay.replayed import main

if __name__ == "__main__":
    main()
