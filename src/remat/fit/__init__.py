"""Make it fit: precision, recomputation, offload, sharding, accumulation and pipelines, chosen together."""
