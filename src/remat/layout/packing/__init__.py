"""Placements of buffers in an arena: greedy, local search, coarse, exact."""
