"""What a search may spend, the best it has found so far, and a process of its own to run in."""
