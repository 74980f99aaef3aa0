"""`python -m openrlhf.cli.serve_rm`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.serve_rm import main

if __name__ == "__main__":
    main()
