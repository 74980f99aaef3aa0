"""`python -m openrlhf.cli.interactive_chat`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.interactive_chat import main

if __name__ == "__main__":
    main()
