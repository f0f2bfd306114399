"""Variables that live elsewhere: on parameter servers, and in shards."""
