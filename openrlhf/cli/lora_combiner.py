"""`python -m openrlhf.cli.lora_combiner`: see `openrlhf.tools.serve`."""

from openrlhf.tools.serve.flags import lora_combiner as main

if __name__ == "__main__":
    main()
