"""The training loops, what they minimise, and what each rank does in them."""
