"""Changes to a joint graph before it is cut: from graph to graph."""
