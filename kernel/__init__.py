"""The compiler: `(GraphItem, Strategy, Place) -> CompiledProgram`, as a pipeline of passes over a graph."""
