"""One step seen from outside its graphs: what the caller holds and does, and whether a plan keeps its word."""
