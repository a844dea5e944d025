"""Solvers that prove: mixed-integer programs, CP-SAT, shortest paths, and bounds with cuts."""
