"""The verbs of post-training, with which users write loops of their own; `openrlhf.api` lists them."""
