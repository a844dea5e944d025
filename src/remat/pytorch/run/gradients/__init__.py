"""Gradients that are no plain results of a backward: used up in its middle, or differentiated again."""
