"""The record of a run beside its metrics, which entry points attach: all rollouts, and the model's card."""
