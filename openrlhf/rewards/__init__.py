"""Reward sources: functions, HTTP servers, reward models."""
