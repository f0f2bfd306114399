"""Plug-ins that say how a graph item is trained on the resources: `(GraphItem, ResourceSpec) -> Strategy`.

`base` has the protocol and the registry, `validation` the rules that every strategy keeps; each other module is one
builder. Nothing here imports TensorFlow or the kernel.
"""
