"""How a variable is cut into shards: which ops of its update can be, and the graph in which they are."""
