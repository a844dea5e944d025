"""Inductor's generated code, read for what it allocates and when."""
