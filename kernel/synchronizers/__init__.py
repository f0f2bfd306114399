"""How one variable's replicas stay equal: what stands between its gradients and its update."""
