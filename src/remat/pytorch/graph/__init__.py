"""The first arrow: a traced step in, a graph of ops, storages and aliases out."""
