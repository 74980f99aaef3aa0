"""`python -m openrlhf.cli.interactive_chat`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.flags import chat as main

if __name__ == "__main__":
    main()
