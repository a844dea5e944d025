"""Time against peak memory of one training step: everything a user would pick, and Remat, measured in one run."""
