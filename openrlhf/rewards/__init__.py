"""Reward sources: functions, servers, models."""
