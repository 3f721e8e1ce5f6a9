"""Layers that communicate with the other workers, and helpers for models that have such layers."""

from tfring.layers.batch_normalization import (
    freeze_batch_normalization,
    to_group_normalization,
    to_sync_batch_normalization,
    unfreeze_batch_normalization,
)
from tfring.layers.distributed_embedding import DistributedEmbedding
from tfring.layers.embedding_configs import FeatureConfig, TableConfig
from tfring.layers.sharded_attention import ShardedMultiHeadAttention
from tfring.layers.sharded_dense import ShardedDense
from tfring.layers.sharded_embedding import ShardedEmbedding
from tfring.layers.sync_batch_normalization import SyncBatchNormalization

__all__ = [
    "DistributedEmbedding",
    "FeatureConfig",
    "ShardedDense",
    "ShardedEmbedding",
    "ShardedMultiHeadAttention",
    "SyncBatchNormalization",
    "TableConfig",
    "freeze_batch_normalization",
    "to_group_normalization",
    "to_sync_batch_normalization",
    "unfreeze_batch_normalization",
]
