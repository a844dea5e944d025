"""What a person sees: tables, progress, failures, and Ctrl-C."""
