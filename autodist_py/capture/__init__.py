"""User code -> GraphItem: the front end of the compiler."""
