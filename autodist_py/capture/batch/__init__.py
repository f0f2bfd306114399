"""What a captured step does with the batch: the layout of its tensors, and what replicas must combine."""
