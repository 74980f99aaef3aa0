"""`python -m openrlhf.cli.batch_inference`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.batch_inference import main

if __name__ == "__main__":
    main()
