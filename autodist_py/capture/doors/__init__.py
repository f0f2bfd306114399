"""The doors through which the user's code is captured: a step function, a graph, Keras."""
