"""Training under torch.compile within a budget: what Inductor saves for backward, chosen by an exact program.

A joint graph becomes a `Joint` (joint), `choose` picks what to save, `predict` says what a choice will need once
Inductor has fused it, `Partitioner` (partition) hands the choice to Inductor.
"""
