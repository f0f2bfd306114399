"""The coordinator of a run, on the chief: its state, and its gRPC service."""
