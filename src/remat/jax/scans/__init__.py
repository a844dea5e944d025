"""Loops over layers or time: one body is planned, and its iterations are split over a few plans."""
