"""Losses over large vocabularies, rewritten to be computed in chunks."""
