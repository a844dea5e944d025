"""Lower and run: a schedule in, a step out that trains with the same bits."""
