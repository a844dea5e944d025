"""Random modules, run plainly and under plans, that have to agree: `python -m tests.fuzz --help`."""
