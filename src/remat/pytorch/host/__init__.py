"""Memory below the device: pinned host memory and files, what goes there and comes back, and how fast it goes."""
