"""Training under a budget with Inductor's kernels."""
