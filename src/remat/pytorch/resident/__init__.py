"""What is in memory before a step starts: whoever holds it, and what optimizers will add."""
