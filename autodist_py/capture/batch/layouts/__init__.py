"""The layouts of all that losses, writes and results are computed from, and what replicas must combine for them."""
