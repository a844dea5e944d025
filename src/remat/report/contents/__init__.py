"""What a report tells: the steps side by side, thinned to what a screen shows, and what was decided for each value."""
