"""Many devices: one plan on every rank, made for what each rank holds."""
