"""The nouns a user gets: a plan, a curve, a profile, an estimate, the largest batch, a benchmark."""
