"""Rematerialization while plain eager PyTorch runs, for what cannot be captured."""
