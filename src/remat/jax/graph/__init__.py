"""A step as a graph: traced, joined, and without what XLA fuses."""
