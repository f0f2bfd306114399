"""The compiler: `(GraphItem, Strategy, Topology) -> CompiledProgram`, as a pipeline of passes over a graph."""
