"""Uses models: batch inference, chat, a server of reward models, merged adapters."""

COMMANDS = {
    "batch_inference": ("batch_inference", "answer the prompts of a dataset, or score its answers"),
    "chat": ("interactive_chat", "chat with a model"),
    "serve_rm": ("serve_rm", "serve a reward model over HTTP"),
    "lora_combiner": ("lora_combiner", "merge a LoRA adapter into its base model"),
}
"""Command -> (module of this folder, summary for `--help`)."""
