"""Configs of `DistributedEmbedding`: its tables, and the features that are looked up in them.

Their attributes are those of `keras_rs.layers.TableConfig` and `FeatureConfig`, which are accepted as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tfring.errors import ConfigurationError
from tfring.layers.combiners import check_combiner

_PLACEMENTS = ("auto", "default_device")


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table of embeddings.

    Args:
      name: Name of the table, unique among the tables of the layer.
      vocabulary_size: Number of rows. Ids range from 0 to `vocabulary_size - 1`.
      embedding_dim: Number of columns. Tables with the same number of columns share a weight; those sharded by columns
        share another, and each replicated table has its own.
      initializer: A Keras initializer. Defaults to "uniform".
      optimizer: Must be None (default): the model's optimizer updates tables.
      combiner: How to combine the rows of an example's ids: "mean" (default), "sum" or "sqrtn". With None each id keeps
        its row.
      placement: "auto" (default) or "default_device", which are the same here. "sparsecore" is refused.
      max_ids_per_partition: Size of buffers on TPUs, as in keras_rs. Ignored here.
      max_unique_ids_per_partition: Size of buffers on TPUs, as in keras_rs. Ignored here.

    Raises:
      ConfigurationError: If `optimizer` is not None, or `combiner` or `placement` is not supported.

    >>> TableConfig("items", vocabulary_size=1000, embedding_dim=16).combiner
    'mean'
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = "uniform"
    optimizer: Any = None
    combiner: str | None = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256

    def __post_init__(self) -> None:
        check_combiner(self.combiner, self.name)
        if self.optimizer is not None:
            raise ConfigurationError(
                f"Table {self.name!r} has optimizer={self.optimizer!r}, but the optimizer given to `compile` updates "
                "tables. Give the table optimizer=None."
            )
        if self.placement not in _PLACEMENTS:
            raise ConfigurationError(
                f"Table {self.name!r} has placement={self.placement!r}, not one of {_PLACEMENTS}: workers, which have "
                "no SparseCore, hold the rows. Leave it out, and pass `plan` to DistributedEmbedding."
            )


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """A feature whose ids are looked up in a table. Several features may share a table.

    Args:
      name: Name of the feature.
      table: The TableConfig of its table; the same object for all features that share the table.
      input_shape: Shape of the ids of the whole batch, as in keras_rs. Ignored here.
      output_shape: Shape of the result for the whole batch, as in keras_rs. Ignored here.

    >>> items = TableConfig("items", vocabulary_size=1000, embedding_dim=16)
    >>> [FeatureConfig(name, items).table.name for name in ("bought", "seen")]
    ['items', 'items']
    """

    name: str
    table: TableConfig
    input_shape: Any = None
    output_shape: Any = None


def features_of(configs: Any) -> list[FeatureConfig]:
    """Returns configs of this module for a nested structure of them or of keras_rs'. A shared table stays shared."""
    tables: dict[int, TableConfig] = {}

    def table_of(config: Any) -> TableConfig:
        if id(config) not in tables:
            fields = _fields_of(TableConfig, config)
            if not isinstance(config, TableConfig) and fields["optimizer"] == "adam":  # keras_rs' default, for TPUs
                fields["optimizer"] = None
            tables[id(config)] = TableConfig(**{**fields, "initializer": keras.initializers.get(fields["initializer"])})
        return tables[id(config)]

    features = []
    for config in keras.tree.flatten(configs):
        fields = _fields_of(FeatureConfig, config)
        features.append(FeatureConfig(**{**fields, "table": table_of(fields["table"])}))
    names = [table.name for table in tables.values()]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"Tables share a name: {', '.join(names)}. Give features that share a table the same TableConfig object."
        )
    return features


def _fields_of(kind: type, config: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    if missing := [name for name in names if not hasattr(config, name)]:
        raise ConfigurationError(
            f"`feature_configs` has {config!r}, a {kind.__name__} without {', '.join(missing)}. It must be a nested "
            "structure of FeatureConfig, each with a TableConfig. Use those of tfring.layers or of keras_rs.layers."
        )
    return {name: getattr(config, name) for name in names}


def write(features: Sequence[FeatureConfig], tables: Sequence[TableConfig]) -> dict[str, Any]:
    """Returns features and tables as lists of plain values. A feature has the number of its table."""
    own = ("name", "input_shape", "output_shape")
    return {
        "tables": [{**vars(table), "initializer": keras.initializers.serialize(table.initializer)} for table in tables],
        "features": [
            {**{name: getattr(feature, name) for name in own}, "table": tables.index(feature.table)}
            for feature in features
        ],
    }


def read(config: dict[str, Any]) -> list[FeatureConfig]:
    """Returns the features that `write` wrote."""
    tables = [TableConfig(**table) for table in config["tables"]]
    return [FeatureConfig(**{**feature, "table": tables[feature["table"]]}) for feature in config["features"]]
