"""The three values that travel between the stages, `GraphItem`, `ResourceSpec` and `Strategy`, and their wire format.

Nothing here imports TensorFlow: what is TensorFlow's own (a GraphDef, a VariableDef, a SaverDef) is opaque bytes.
Import from the modules: `autodist_py.proto.graph_item`, `.resource_spec`, `.strategy`, `.errors`; `.values` loads a
file of any of the three.
"""
