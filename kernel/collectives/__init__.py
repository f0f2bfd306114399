"""Reductions over replicas by themselves: no variable, no strategy, only tensors and devices."""
