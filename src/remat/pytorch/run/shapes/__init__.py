"""One capture for many shapes: what a graph is at sizes that it leaves open, and schedules for ranges of them."""
