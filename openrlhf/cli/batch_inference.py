"""`python -m openrlhf.cli.batch_inference`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.flags import batch_inference as main

if __name__ == "__main__":
    main()
