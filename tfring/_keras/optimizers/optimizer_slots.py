"""Slots of a RingStrategy's optimizer: made for shards and tables, assigned full values, written to files in full."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring._keras.sharding import mark, mark_of, shard_of, sharding_of, slots, stores, tables
from tfring._keras.sharding.shards import Shards, refuse_unless_element_wise, shards_of
from tfring.runtime import ring_of

_ACCUMULATOR = "gradient_accumulator"  # holds each worker's own gradients, which are full


class OptimizerSlots(keras.optimizers.Optimizer):
    """The part of `RingOptimizer` that holds state."""

    _delegates = False  # to other optimizers, which have the slots
    _tfring_shards: Shards | None = None
    _tfring_window: Any = None  # the window since the last synchronization (`local_steps.py`)

    @property
    def _ring(self) -> Any:
        """The RingStrategy of this optimizer; None in one process, where it updates tables."""
        return ring_of(getattr(self, "_distribution_strategy", None))

    @property
    def variables(self) -> list:
        return slots.as_written(super().variables)

    # -- making slots ----------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        if not self._delegates:
            self._check_tables(variables)
            ring = self._ring
            if ring is not None and ring.shard_optimizer and ring.cluster.world_size > 1:
                refuse_unless_element_wise(
                    self, "shard_optimizer=True gives each worker a shard of every weight", "leave shard_optimizer out"
                )
                self._tfring_shards = Shards(ring, self, variables)
            elif any(map(sharding_of, variables)):
                refuse_unless_element_wise(
                    self,
                    "A worker has a shard of each weight that is sharded over workers",
                    "layers that are not sharded",
                )
        super().build(variables)
        if self._ring is not None and self._ring.updater is not None:
            self._ring.updater.on_build(self, variables)

    def _check_tables(self, variables: Sequence[Any]) -> None:
        """Raises ConfigurationError if this optimizer would update tables wrongly."""
        every = [v for v in variables if tables.update_of(v) is not None]
        by_rows = [v for v in every if tables.update_of(v) == "rows"]
        if by_rows or any(sharding_of(v) is not None for v in every):
            refuse_unless_element_wise(
                self, "A ShardedEmbedding updates some rows of a table separately from others", "keras.layers.Embedding"
            )
        if by_rows:
            tables.refuse_what_goes_over_all_rows(self, by_rows[0])

    def add_variable_from_reference(
        self, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
    ) -> Any:
        shards, shard = self._tfring_shards, None
        if shards is not None and name != _ACCUMULATOR:
            shard = shards.shard(reference_variable)
        reference = reference_variable if shard is None else shard
        update = tables.update_of(reference_variable)
        if update is not None:
            initializer = tables.without_copies(initializer)
        marked = mark_of(reference)
        ring = None if marked.sharding is None else ring_of(reference.value.distribute_strategy)
        with contextlib.ExitStack() as scopes:
            if self._ring is not None and not tf.distribute.has_strategy():  # a callback builds it
                scopes.enter_context(self._ring.scope())
            if ring is not None:
                scopes.enter_context(ring.variables_of_worker())
            slot = super().add_variable_from_reference(reference, name=name, initializer=initializer)
        return mark(slot, sharding=marked.sharding, rank=marked.rank, update=update, weight=reference_variable)

    def _var_key(self, variable: Any) -> Any:
        key, shards = super()._var_key(variable), self._tfring_shards
        return key if shards is None else shards.keys.get(key, key)

    # -- full values given to slots --------------------------------------------------------------------------------

    def assign(self, variable: Any, value: Any) -> None:
        super().assign(variable, shard_of(variable, value))  # a slot may begin as its weight

    def set_weights(self, weights: Sequence[Any]) -> None:
        if self._tfring_shards is not None:
            weights = [shard_of(v, w) for v, w in zip(self._variables, weights, strict=False)]
        super().set_weights(weights)

    # -- files -----------------------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        variables = self.variables
        if not any(map(sharding_of, variables)):
            return super().save_own_variables(store)
        for number, variable in enumerate(variables):
            store[str(number)] = slots.gather_full(variable)
        return None

    def load_own_variables(self, store: Any) -> None:
        is_sharded = any(map(sharding_of, self.variables))
        super().load_own_variables(stores.InBlocks(store) if is_sharded else store)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "checkpoint":  # otherwise with a model, whose weights may be full
            sharded = [*filter(sharding_of, self.variables)]
            if sharded or shards_of(self) is not None:
                raise slots.shard_write_error("slot", sharded, self, save_type)
        return super()._trackable_children(save_type, **kwargs)
