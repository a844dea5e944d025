"""The search around the strategies: a start, a neighbourhood, the smallest budget, the best schedule so far."""
