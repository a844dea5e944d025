"""Training steps that run out of memory, rolled back and run again with less."""
