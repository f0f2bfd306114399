"""How gradients are coded on the wire: no variable of the user's, no strategy, only tensors."""
