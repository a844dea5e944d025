"""Schedules under change: one that can be edited, what may be kept, evicted, cut into blocks, put in another order."""
