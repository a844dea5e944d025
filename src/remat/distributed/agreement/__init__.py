"""Before anyone enters a collective: ranks compare what they are about to train, and one plans for all."""
