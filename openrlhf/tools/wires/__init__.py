"""APIs of the agents' server beside chat completions, attached by entry points. Each is a translation to and
from chat completions, the one form that is sampled."""
