"""The tables of the benchmarks page and of the README, made from results."""
