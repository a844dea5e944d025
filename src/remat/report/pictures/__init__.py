"""Pictures and what they are drawn from."""
