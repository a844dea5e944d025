"""The parts of `bench_distributed`, each of which prints and keeps what it found."""
