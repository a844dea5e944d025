"""What Inductor would fuse and keep: the joint graph, predicted peaks, and which values to save."""
