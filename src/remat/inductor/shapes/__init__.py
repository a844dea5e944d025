"""Compiled steps whose sizes change: what is compiled for many of them, and where that ends."""
