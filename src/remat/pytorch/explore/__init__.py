"""Many budgets, batches and blocks of one captured step."""
