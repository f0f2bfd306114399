"""The runtime: the workers of a run, and the execution of compiled programs on them."""
