"""A schedule as functions that XLA keeps in order."""
