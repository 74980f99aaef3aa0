"""How weights go from a model in training to engines, and how what arrived is checked."""
