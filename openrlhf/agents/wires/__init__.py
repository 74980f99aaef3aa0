"""The APIs of the server of agents. Each is a translation to and from chat completions, the one form that is
sampled."""
