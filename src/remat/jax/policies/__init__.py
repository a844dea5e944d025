"""Policies for `jax.checkpoint` that fit a budget, for code that has to stay as it is written."""
