"""The collectives of a step: all-reduce, how replicas are added up, buckets, and the choice of an engine."""
