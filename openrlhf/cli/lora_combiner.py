"""`python -m openrlhf.cli.lora_combiner`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.lora_combiner import main

if __name__ == "__main__":
    main()
