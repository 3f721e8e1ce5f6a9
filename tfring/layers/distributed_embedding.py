"""DistributedEmbedding: many embedding tables for many features, sharded over the workers, in one exchange per step.

```
table items, 5 rows   ─┐                          feature bought   ids 4 1      ─┐
table users, 3 rows   ─┼─► one weight of 8 rows   feature seen     ids 0        ─┼─► ids 4 1 0 7 of the weight
  of the same width    │   row r at worker r % N  feature user     ids 2 = 5 + 2 ─┘   in one exchange
table tags, whole     ─┘   all of it at one worker
table genres, small   ───► a weight of its own, replicated: whole at each worker
tables by columns     ───► one weight a width, of which each worker has some columns
```
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfring import _keras
from tfring._keras.sharding import ShardGroup, check_axis, large, mark, sharding_of, slots, stores, tables
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.layers import embedding_configs
from tfring.layers.choice import next_layer_number
from tfring.layers.combiners import check_ids, combined, flat
from tfring.layers.embedding_configs import FeatureConfig, TableConfig
from tfring.layers.lookup import exchange
from tfring.reduction.table_plan import KINDS, TablePlan, deal, plan_tables
from tfring.sharding import shard_table, shard_tables

_BUNDLE = "preprocessed"  # the key of what `preprocess` returns


@keras.saving.register_keras_serializable(package="tfring")
class DistributedEmbedding(keras.layers.Layer):
    """Looks up many features in many tables, which are sharded over the workers of a `tfring.RingStrategy`.

    Tables of one width lie one after another in one weight, which is sharded by rows like a `ShardedEmbedding`. A step
    costs three `all_to_all` per width; one weight per width has one set of slots and one update. A table may have all
    of its rows on one worker ("whole") and still be in that weight. Tables sharded by columns are in another weight.
    Small tables are replicated: each worker has all of their rows, and their gradients join those of other weights.

    The interface is that of `keras_rs.layers.DistributedEmbedding`, whose configs are accepted as well. Calls, weights,
    files and updates work as in `ShardedEmbedding`: calls are collectives, `weights` are this worker's part, and
    `get_weights()` gathers. Files hold full tables. They load into any number of workers and also, except for the slots
    of an optimizer, with another `plan`.

    Args:
      feature_configs: A nested structure of `FeatureConfig`. Inputs and results have the same structure.
      plan: The placement of each table: a plan of `tfring.parallel.plan_tables`, or a dict that maps each table's name
        to "replicated" (in full on each worker), "rows" (sharded by rows), "whole" (in full on one worker) or "columns"
        (sharded by columns). Defaults to `plan_tables` of the tables' sizes, which replicates tables of up to 64 KiB
        and shards others by rows. A plan for the same number of workers determines which worker owns a whole table.
        Otherwise owners are dealt by bytes.
      update: "rows" (default) or "dense", for tables that are not replicated; see `ShardedEmbedding`. Optimizers update
        replicated tables like any other weight.
      axis: The mesh axis over which tables are sharded, "model" or "data"; see `ShardedEmbedding`.
      **kwargs: The arguments of `keras.layers.Layer`.

    Call arguments:
      inputs: int32 or int64 ids for each feature: dense of shape `[batch]` or `[..., ids]`, or with a combiner a
        `tf.RaggedTensor` or `tf.SparseTensor` of shape `[batch, ids]`. Other dtypes are cast to int32.
      weights: A structure like that of `inputs` of float weights of the ids, each with the layout of its ids. Only for
        tables with a combiner. Defaults to 1 for each id.

    Returns:
      For each feature a tensor of shape `[batch, embedding_dim]` or `[..., embedding_dim]`: one row for the ids along
      the last axis, or one row per id if the table has no combiner. In the layer's compute dtype.

    Raises:
      ConfigurationError: If a config or plan is not supported; see also `ShardedEmbedding`.
      ValueError: If inputs have another structure.
      tf.errors.InvalidArgumentError: If a table has no row for an id, with the name of the table; on every rank unless
        the table is replicated.

    >>> from tfring.layers import FeatureConfig, TableConfig
    >>> items = TableConfig("items", vocabulary_size=4, embedding_dim=2, initializer="ones", combiner="sum")
    >>> layer = DistributedEmbedding({"bought": FeatureConfig("bought", items), "seen": FeatureConfig("seen", items)})
    >>> rows = layer({"bought": tf.constant([3, 1]), "seen": tf.ragged.constant([[0, 2], []], dtype=tf.int32)})
    >>> rows["seen"].numpy().tolist()
    [[2.0, 2.0], [0.0, 0.0]]
    """

    def __init__(
        self, feature_configs: Any, *, plan: Any = None, update: str = "rows", axis: str | None = None, **kwargs: Any
    ) -> None:
        _keras.install()
        super().__init__(**kwargs)
        tables.check_update(update)
        check_axis(axis)
        self.update = update
        self.axis = axis
        self.supports_jit = False  # XLA has no outputs whose size depends on the number of distinct ids
        self._features = tuple(embedding_configs.features_of(feature_configs))
        self._tables = tuple({f.table.name: f.table for f in self._features}.values())
        self._kinds = self._kinds_of(plan)
        self._plan = plan if isinstance(plan, TablePlan) else None
        self._stacks = tuple(_Stack(chosen, self._features, self._kinds) for chosen in self._stacked())
        numbers = keras.tree.pack_sequence_as(feature_configs, list(range(len(self._features))))
        self._paths = _paths_of(numbers)
        self._packed = functools.partial(keras.tree.pack_sequence_as, numbers)  # Keras tracks no structure in it

    def _kinds_of(self, plan: Any) -> dict[str, str]:
        sizes = {table.name: (table.vocabulary_size, table.embedding_dim) for table in self._tables}
        if plan is None:
            plan = plan_tables(sizes, world_size=1)  # its kinds are those for any number of workers
        kinds = plan.kinds if isinstance(plan, TablePlan) else plan
        is_complete = isinstance(kinds, Mapping) and kinds.keys() == sizes.keys()
        if not is_complete or any(kind not in KINDS for kind in kinds.values()):
            raise ConfigurationError(
                f"`plan` is {kinds!r} for tables {', '.join(sizes)}, but must give each table one of {KINDS}. Make it "
                "with tfring.parallel.plan_tables, or pass a dict."
            )
        return dict(kinds)

    def _stacked(self) -> Iterator[list[TableConfig]]:
        """Yields the tables that share a weight."""
        for kinds in (("rows", "whole"), ("columns",)):
            chosen = [table for table in self._tables if self._kinds[table.name] in kinds]
            for width in dict.fromkeys(table.embedding_dim for table in chosen):
                yield [table for table in chosen if table.embedding_dim == width]
        for table in self._tables:
            if self._kinds[table.name] == "replicated":
                yield [table]

    def build(self, input_shape: Any = None) -> None:
        if self.built:
            return
        group = ShardGroup.of(self.axis, "DistributedEmbedding", "keras.layers.Embedding")
        number, owners = next_layer_number(), self._owners(group.collectives.world_size)
        for stack in self._stacks:
            stack.build(self, group, owners, f"tables {number}")

    def _owners(self, world_size: int) -> dict[str, int]:
        """Returns the worker that owns each whole table; empty for a single process."""
        if world_size == 1:
            return {}
        if self._plan is not None and self._plan.world_size == world_size:
            return self._plan.owners
        whole = [table for table in self._tables if self._kinds[table.name] == "whole"]
        return deal({table.name: (table.vocabulary_size * table.embedding_dim,) for table in whole}, world_size)

    def build_from_config(self, config: dict[str, Any]) -> None:
        self.build()

    def preprocess(self, inputs: Any, weights: Any = None, training: bool = False) -> dict[str, Any]:
        """Bundles inputs and weights, as in keras_rs. A call accepts the result in place of `inputs`. Optional."""
        self._flat("inputs", inputs)
        if weights is None:
            return {_BUNDLE: {"inputs": inputs}}
        self._flat("weights", weights)
        return {_BUNDLE: {"inputs": inputs, "weights": weights}}

    def call(self, inputs: Any, weights: Any = None) -> Any:
        inputs, weights = _unbundled(inputs, weights)
        given = self._flat("inputs", inputs)
        weights = [None] * len(given) if weights is None else self._flat("weights", weights)
        for feature, ids, weight in zip(self._features, given, weights, strict=True):
            check_ids(ids, feature.table.combiner, feature.name)
            if weight is not None and feature.table.combiner is None:
                raise ValueError(
                    f"`weights` were given for {feature.name!r}, whose table {feature.table.name!r} has combiner=None. "
                    "Only a combiner takes weights."
                )
        ids = [_as_ids(each) for each in given]
        results = [None] * len(ids)
        for stack in self._stacks:
            for number, rows in stack.rows(ids):
                rows = tf.cast(rows, self.compute_dtype)
                combiner = self._features[number].table.combiner
                results[number] = rows if combiner is None else _one_row(rows, ids[number], weights[number], combiner)
        return self._packed(results)

    def _flat(self, name: str, structure: Any) -> list:
        if _paths_of(structure) != self._paths:
            raise ValueError(
                f"`{name}` have the structure {_shown(_paths_of(structure))}, but `feature_configs` have "
                f"{_shown(self._paths)}."
            )
        return keras.tree.flatten(structure)

    def compute_output_spec(self, inputs: Any, weights: Any = None) -> Any:
        inputs, _ = _unbundled(inputs, weights)
        given = self._flat("inputs", inputs)
        for feature, ids in zip(self._features, given, strict=True):
            check_ids(ids, feature.table.combiner, feature.name)
        shapes = [_output_shape(feature, ids.shape) for feature, ids in zip(self._features, given, strict=True)]
        return self._packed([keras.KerasTensor(shape, dtype=self.compute_dtype) for shape in shapes])

    def compute_output_shape(self, input_shape: Any) -> Any:
        def of_feature(number: int, shape: Any) -> tuple:
            return _output_shape(self._features[number], shape)

        input_shape, _ = _unbundled(input_shape, None)
        numbers = self._packed(list(range(len(self._features))))
        return keras.tree.map_structure_up_to(numbers, of_feature, numbers, input_shape)

    # -- whole tables --------------------------------------------------------------------------------------------------

    def get_embedding_tables(self) -> dict[str, np.ndarray]:
        """Returns the full tables, `[vocabulary_size, embedding_dim]`, by name. All ranks call it."""
        self.build()
        whole = {name: table for stack in self._stacks for name, table in stack.whole().items()}
        return {table.name: whole[table.name] for table in self._tables}

    def set_embedding_tables(self, embedding_tables: Mapping[str, np.ndarray]) -> None:
        """Sets full tables by name. Each worker keeps its part.

        Raises:
          ValueError: If a table is missing or has another shape.
        """
        self.build()
        received = {name: tuple(table.shape) for name, table in embedding_tables.items()}
        shapes = {table.name: (table.vocabulary_size, table.embedding_dim) for table in self._tables}
        if received != shapes:
            raise ValueError(f"The tables given to {self.name!r} have shapes {received}, but its own have {shapes}.")
        for stack in self._stacks:
            stack.assign(embedding_tables)

    def save_own_variables(self, store: Any) -> None:
        """Saves full tables. All ranks call it, or are in `tfring.save` or `model.save` together."""
        if self.built:
            for number, table in enumerate(self.get_embedding_tables().values()):
                store[str(number)] = table

    def load_own_variables(self, store: Any) -> None:
        if not self.built:
            return
        store = stores.InBlocks(store)
        if len(store.keys()) != len(self._tables):
            raise ValueError(
                f"The file has {len(store.keys())} tables, but {self.name!r} has {len(self._tables)}. Make the layer "
                "with the tables of the file, or load another file."
            )
        self.set_embedding_tables({table.name: store[str(number)] for number, table in enumerate(self._tables)})

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            **embedding_configs.write(self._features, self._tables),
            "structure": self._packed(list(range(len(self._features)))),
            "plan": dict(self._kinds),
            "update": self.update,
            "axis": self.axis,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DistributedEmbedding:
        own = ("tables", "features", "structure")
        features = embedding_configs.read(config)
        feature_configs = keras.tree.map_structure(features.__getitem__, config["structure"])
        rest = {name: value for name, value in config.items() if name not in own}
        return super().from_config({"feature_configs": feature_configs, **rest})


class _Stack:
    """Tables of one width in one weight, one after another; a replicated table is alone in its weight.

    Args:
      chosen: The tables.
      features: All features of the layer.
      kinds: The kind of each table, by name.
    """

    def __init__(self, chosen: list[TableConfig], features: Sequence[FeatureConfig], kinds: Mapping[str, str]) -> None:
        self._kind = kinds[chosen[0].name]
        bounds = itertools.pairwise(itertools.accumulate((t.vocabulary_size for t in chosen), initial=0))
        self._tables = [(table, *own) for table, own in zip(chosen, bounds, strict=True)]  # with their rows among all
        numbers = {table.name: number for number, table in enumerate(chosen)}
        self._lookups = [(i, numbers[f.table.name]) for i, f in enumerate(features) if f.table.name in numbers]

    def build(self, layer: keras.layers.Layer, group: ShardGroup, owners: Mapping[str, int], key: str) -> None:
        group = ShardGroup() if self._kind == "replicated" else group
        if sum(end - begin for table, begin, end in self._tables if table.name not in owners) == 1:
            # A single row is not divided either, so a worker that has all rows has them in the order of whole tables.
            owners = {table.name: owners.get(table.name, 0) for table, _, _ in self._tables}
        last, _, rows = self._tables[-1]
        shape, world_size = (rows, last.embedding_dim), group.collectives.world_size
        self._rank = group.collectives.rank
        name = f"embeddings_{last.embedding_dim}"
        if self._kind == "columns":
            name = f"{name}_by_columns"
            self._sharding = shard_table(shape, world_size, "columns", group.axis)
        else:
            owned = [(table.vocabulary_size, owners.get(table.name)) for table, _, _ in self._tables]
            self._sharding = shard_tables(shape, world_size, owned, group.axis)
        self._held = sorted(self._tables, key=lambda each: each[0].name in owners)  # sharded tables before whole ones
        if self._kind == "replicated":
            self._variable = layer.add_weight(name=last.name, shape=shape, initializer=last.initializer)
            mark(self._variable, sums_ids=True)
        else:
            parts = [(table.initializer, begin, end) for table, begin, end in self._held]
            self._variable = tables.add_table(layer, name, parts, self._sharding, group)
        names = [(table.name, table.vocabulary_size) for table, _, _ in self._tables]
        self._exchange = exchange(self._sharding, names, group, f"{key}, {name}")

    def rows(self, ids: Sequence[Any]) -> Iterator[tuple[int, tf.Tensor]]:
        """Returns pairs of the number of a feature and the rows of its ids, `[*flat(ids).shape, width]`."""
        lookups = [(table, flat(ids[feature])) for feature, table in self._lookups]
        rows = self._exchange.rows(values_of(self._variable.value)[0], lookups)
        return zip([feature for feature, _ in self._lookups], rows, strict=True)

    def whole(self) -> dict[str, np.ndarray]:
        """Returns the full tables by name. All ranks call it."""
        value = slots.gather_full(self._variable)
        return {table.name: value[begin:end] for table, begin, end in self._tables}

    def assign(self, whole: Mapping[str, Any]) -> None:
        """Keeps this worker's part of full tables; of an array in a file only this part is read."""
        if sharding_of(self._variable) is None:
            self._variable.assign(np.concatenate([np.asarray(whole[table.name]) for table, _, _ in self._held]))
            return
        at = 0
        for table, begin, end in self._held:
            part = self._sharding.within(self._rank, begin, end)
            at = large.write(self._variable, at, whole[table.name], part)


def _unbundled(inputs: Any, weights: Any) -> tuple[Any, Any]:
    """Returns the inputs and weights of a call, unpacked if `preprocess` bundled them."""
    if not isinstance(inputs, Mapping) or inputs.keys() != {_BUNDLE}:
        return inputs, weights
    return inputs[_BUNDLE]["inputs"], inputs[_BUNDLE].get("weights", weights)


def _as_ids(ids: Any) -> Any:
    return ids if ids.dtype in ("int32", "int64") else tf.cast(ids, tf.int32)


def _one_row(rows: tf.Tensor, ids: Any, weights: Any, combiner: str) -> tf.Tensor:
    """Returns one row per example; dense ids of shape `[batch]` are one per example."""
    if len(ids.shape) == 1:
        rows, ids = rows[:, None], ids[:, None]
        weights = None if weights is None else weights[:, None]
    return combined(rows, ids, weights, combiner)


def _output_shape(feature: FeatureConfig, shape: Sequence[int | None]) -> tuple:
    inner = len(shape) - 1 if feature.table.combiner is not None and len(shape) > 1 else len(shape)
    return (*shape[:inner], feature.table.embedding_dim)


def _paths_of(structure: Any) -> tuple:
    return tuple(path for path, _ in keras.tree.flatten_with_path(structure))


def _shown(paths: Iterable[tuple]) -> str:
    return ", ".join(".".join(map(str, path)) for path in paths) or "one tensor"
