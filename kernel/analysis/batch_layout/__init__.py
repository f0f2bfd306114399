"""How a tensor depends on a replica's examples: what its value for the whole batch is, given its values on replicas.

An abstract interpretation: each op's layout follows from those of its inputs by a rule for its op type. A rule claims
only what holds for every value; what no rule knows is `OTHER`. The tables own the knowledge about op types.
"""
