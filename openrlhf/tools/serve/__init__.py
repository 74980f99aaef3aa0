"""Uses models: batch inference, chat, a server of reward models, merged adapters."""
