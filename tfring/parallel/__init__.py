"""Models made of others, for clusters in which a worker does not hold all of a model."""

from tfring.parallel.embeddings import shard_embeddings

__all__ = ["shard_embeddings"]
