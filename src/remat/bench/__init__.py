"""The classic experiments: which models at which sizes (`suite`), and how one is run (`experiment`).

In: names of zoo models and a device. Out: a `core.bench.Bench`, for `report` to show.
"""
