"""Parameter servers in the graph: the messages of workers, and what servers run."""
