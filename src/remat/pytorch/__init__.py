"""The arrows for PyTorch: capture, profile, lower, execute, track, and the torch.compile backend."""
