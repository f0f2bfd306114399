"""From a GraphItem to a step that runs."""
