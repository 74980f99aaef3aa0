"""Where rewards come from: functions, servers, models."""
