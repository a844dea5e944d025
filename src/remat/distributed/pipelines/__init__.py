"""Models in stages over ranks, through which micro-batches pass: one plan for each stage, the same for each of them."""
