"""`python -m openrlhf.cli.serve_rm`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.flags import serve_rm as main

if __name__ == "__main__":
    main()
