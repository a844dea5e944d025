"""Batches that fill a budget: micro-batches of one that was asked for, and batches by tokens."""
