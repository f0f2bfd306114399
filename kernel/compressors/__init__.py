"""How gradients are coded on the wire: no variable, no strategy, only tensors."""
