"""What happened, for people: text tables and pictures. In: plans, solutions, measurements. Never imports torch."""
