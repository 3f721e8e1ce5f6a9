"""The path of a gradient through an optimizer of a RingStrategy, from top to bottom.

```
                    Keras                                   RingOptimizer
apply               ─►                                      weigh by rows ─► sum the replicas of the worker
_backend_apply_…    accumulate ─►                           the same
_clip_gradients     clip, each worker its own gradient      reduce over workers ─► clip, as one process would
_apply_weight_decay,
_backend_update_…   all_reduce ─► update                    update: weights, shards, rows of tables ─► gather
```

A LossScaleOptimizer reduces before it checks whether gradients are finite, and passes on the reduced ones.

The methods of `RingOptimizer` come after those of an optimizer's class and of a user's subclass, and before those of
`keras.optimizers.Optimizer` (`optimizer_class.py`). So `super()` in a user's method finds them.

The optimizer weighs each gradient by its replica's share of the rows, so that the sum is the gradient of the whole
batch for any loss. A user's own loop counts no rows, so there gradients are summed as in `tf.distribute`. Clipping of
local gradients is horovod #1346; the finite check of LossScaleOptimizer on local gradients sends ranks down different
branches. All of `apply` runs in the cross-replica context: there it may contain `cond` (gradient accumulation, loss
scaling), which a replica may not mix with `merge_call`.

If ranks along the data axis have different shards, the gradient of a shard is already that of the whole batch: the code
that computed it has weighed and summed it (`layers/lookup.py`, `layers/data_parallel_matmul.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfring import partition, step
from tfring._keras.losses import scale_row_losses
from tfring._keras.optimizers import optimizers_of
from tfring._keras.optimizers.optimizer_class import join_ring
from tfring._keras.optimizers.optimizer_slots import OptimizerSlots
from tfring._keras.optimizers.overrides import ReducedForOverrides
from tfring._keras.sharding import gradient_is_complete, mark_of, shard_of, sharding_of, tables
from tfring._keras.sharding.shards import Shards, is_value, shards_of
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.runtime import Ring
from tfring.step import branches, clipping, finite


@dataclasses.dataclass
class Update:
    """The state of one running `apply` of an optimizer, in the cross-replica context.

    Attributes:
      active: bool scalar, whether this worker contributes; None if it does.
      is_weighed: Whether gradients are zeros if this worker does not contribute.
      is_reduced: Whether gradients are those of all workers.
      is_sharded: Whether gradients are those of the shards of weights.
      differs_by_rank: Whether ranks hold different gradients after the reduction.
      has_each_id_once: Whether IndexedSlices hold no id twice: the ring has summed them.
      variables: The variables of the gradients, after Keras has removed those without a gradient.
    """

    active: tf.Tensor | None = None
    is_weighed: bool = False
    is_reduced: bool = False
    is_sharded: bool = False
    differs_by_rank: bool = False
    has_each_id_once: bool = True
    variables: Sequence[Any] = ()


class RingOptimizer(OptimizerSlots):
    """An optimizer of a RingStrategy, or of a single process that updates tables."""

    in_front_of_overrides = ReducedForOverrides
    _current_update: Update | None = None

    def _adopt_inner_optimizers(self) -> None:
        """Makes the optimizers to which this one passes gradients join its ring."""
        for inner in optimizers_of(self) if self._ring is not None else ():
            if not isinstance(inner, RingOptimizer):
                inner._distribution_strategy = self._distribution_strategy
                join_ring(inner)

    # -- 0. a loss, on its way to the tape -------------------------------------------------------------------------

    def scale_loss(self, loss: Any) -> Any:
        return super().scale_loss(scale_row_losses(loss))

    # -- 1. weigh, and sum the replicas of this worker -------------------------------------------------------------

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._enter(grads, trainable_variables, super().apply)

    def _enter(self, grads: Sequence[Any], variables: Sequence[Any] | None, apply: Callable) -> None:
        """Runs Keras' `apply` in the cross-replica context, with weighed gradients.

        Raises:
          ConfigurationError: If it is called outside of a replica, where no collective would aggregate the workers'
            gradients, or with gradients that `all_reduce_gradients` has summed in a user's own loop.
        """
        ring = self._ring
        variables = None if variables is None else list(variables)
        if ring is None or self._current_update is not None:
            return apply(grads, variables)
        if tf.distribute.get_replica_context() is None or not tf.distribute.has_strategy():
            if ring.cluster.world_size > 1:
                raise _outside_run_error(self, ring)
            return apply(grads, variables)
        if not self.built and variables:
            ring.cross_replica(lambda: _build(self, variables))
        every = list(variables or self._trainable_variables)
        if len(every) != len(grads):  # Keras reports what is missing
            return apply(grads, variables)
        running = step.current() or step.Step()
        if any(map(step.is_sum, grads)):
            raise _already_summed_error(self)
        is_complete = [*map(gradient_is_complete, every)]
        triples = zip(grads, every, is_complete, strict=True)
        updater = ring.updater  # between this optimizer and the weights
        weigh = running.weigh if updater is None or updater.weighs else lambda gradient: gradient
        weighed = [g if done or is_value(v) else weigh(_expected(running, g, v)) for g, v, done in triples]

        def in_cross_replica(grads: Sequence[Any], active: Any) -> None:
            self._note_finite(grads, every, active)
            summed, worker_active = self._sum_on_worker(grads, is_complete, active)
            is_weighed = running.share is not None
            update = Update(worker_active, is_weighed, is_reduced=updater is not None)
            with branches.checked(ring, running), self._updating(update):
                if updater is None:
                    apply(summed, variables)
                else:
                    updater.apply(self, summed, every, worker_active, apply)

        with partition.own():
            ring.cross_replica(in_cross_replica, weighed, running.active)
        return None

    def _note_finite(self, grads: Sequence[Any], variables: Sequence[Any], active: Any) -> None:
        """Notes for `CheckFinite` the first gradient of a replica that is not finite, before it is summed."""
        finite.note(self._ring, self, grads, _names(variables), active)

    def _sum_on_worker(
        self, grads: Sequence[Any], is_complete: Sequence[bool], active: Any
    ) -> tuple[list[Any], tf.Tensor | None]:
        """Returns the sums over this worker's replicas, and whether the worker contributes; None if it does.

        The shards of a worker without rows of the batch have gradients from the rows of others.
        """
        ops = self._ring.gradient_ops
        flags = None if active is None else values_of(active)
        # A single replica without rows is left to the ring, which then adds zeros for free, unless gradients are
        # accumulated: those of earlier steps count.
        active = None
        if flags is not None and len(flags) == 1 and not self.gradient_accumulation_steps:
            [active], flags = flags, None
        pairs = zip(grads, is_complete, strict=True)
        return [None if g is None else ops.sum_on_worker(g, None if done else flags) for g, done in pairs], active

    @contextlib.contextmanager
    def _updating(self, update: Update) -> Iterator[None]:
        """Notes the running update in this optimizer and in those to which it passes gradients."""
        involved = [o for o in (self, *optimizers_of(self)) if isinstance(o, RingOptimizer)]
        before = [optimizer._current_update for optimizer in involved]
        try:
            for optimizer in involved:
                object.__setattr__(optimizer, "_current_update", update)
            yield
        finally:
            for optimizer, earlier in zip(involved, before, strict=True):
                object.__setattr__(optimizer, "_current_update", earlier)

    # -- 2. accumulate ---------------------------------------------------------------------------------------------

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        """Adds gradients to accumulators, or continues with their sum if an update is due, as Keras does."""
        if self._current_update is None and any(map(sharding_of, trainable_variables)):
            raise _outside_replica_error(self)
        pairs = zip(grads, trainable_variables, strict=True)
        grads = [tables.sum_duplicate_ids(g) if self._sums_ids(g, v) else g for g, v in pairs]
        update = self._current_update
        if update is None and any(map(tables.update_of, trainable_variables)):
            update = Update(is_reduced=True, has_each_id_once=False)  # of one process
        if update is None:
            return super()._backend_apply_gradients(grads, trainable_variables)
        update.variables = list(trainable_variables)
        with self._updating(update):
            return super()._backend_apply_gradients(grads, trainable_variables)

    def _sums_ids(self, gradient: Any, variable: Any) -> bool:
        marked = mark_of(variable)
        is_table = marked.update is not None or (self._ring is None and marked.sums_ids)
        return is_table and isinstance(gradient, tf.IndexedSlices)

    # -- 3. reduce, 4. clip ----------------------------------------------------------------------------------------

    def _clip_gradients(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Reduces and clips: Keras calls it when an update is due, with the gradients that are to be applied."""
        update, shards = self._current_update, self._tfring_shards
        if update is None:
            if shards is not None:
                raise _outside_replica_error(self)
            return super()._clip_gradients(grads)
        variables = update.variables
        if not update.is_reduced:
            grads = self._reduce(grads, variables, shards)
        held = variables if shards is None else shards.held(variables)
        if shards is not None and update.is_reduced and not update.is_sharded:
            pairs = zip(held, variables, grads, strict=True)
            grads = [g if shard is v else shard_of(shard, g) for shard, v, g in pairs]
        shardings = [*map(sharding_of, held)]
        if any(shardings) or any(map(tables.update_of, variables)):  # Keras would make them dense
            return clipping.clip(self, self._ring, grads, shardings, super()._clip_gradients)
        return super()._clip_gradients(grads)

    def _reduce(self, grads: Sequence[Any], variables: Sequence[Any], shards: Shards | None) -> list[Any]:
        """Returns the gradients of all workers: the one place where an optimizer aggregates over the ring.

        Args:
          grads: The gradients of this worker, None for a weight without one.
          variables: The weights.
          shards: The shards whose gradients replace those of weights that are sharded. None: all are full gradients.
        """
        update, ring = self._current_update, self._ring
        assert update is not None
        ops, names, results = ring.gradient_ops, _names(variables), list(grads)

        def reduce(positions: Sequence[int], function: Callable, *more: Any, **options: Any) -> None:
            reduced = function(
                [grads[i] for i in positions],
                *more,
                name="gradients",
                value_names=[names[i] for i in positions],
                active=update.active,
                **options,
            )
            for i, gradient in zip(positions, reduced, strict=True):
                results[i] = gradient

        alone = ring.gradients.world_size == 1  # and each id of a table occurs once
        chosen = [
            i
            for i, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
            if not (gradient is None or gradient_is_complete(variable) or (alone and tables.update_of(variable)))
        ]
        held = variables if shards is None else shards.held(variables)
        sharded = [i for i in chosen if held[i] is not variables[i]]
        by_rows = [i for i in chosen if tables.update_of(variables[i]) == "rows"]
        others = [i for i in chosen if i not in sharded and i not in by_rows]
        reduce(others, ops.sum_over_workers)
        reduce(by_rows, ops.sum_over_workers, keep_sparse=True)
        shardings = [sharding_of(held[i]) for i in sharded]
        reduce(sharded, ops.reduce_scatter_over_workers, shardings, is_zero_unless_active=update.is_weighed)
        return results

    # -- 5. update, 6. gather --------------------------------------------------------------------------------------

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        variables = [v for v in variables if tables.update_of(v) != "rows"]  # their rows decay when they are updated
        shards = self._tfring_shards
        super()._apply_weight_decay(variables if shards is None else shards.filled(variables))

    def _use_weight_decay(self, variable: Any) -> bool:
        shards = self._tfring_shards
        weight = None if shards is None else shards.weights.get(self._var_key(variable))
        return super()._use_weight_decay(variable if weight is None else weight)  # its name may be excluded

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        """Updates shards, then gathers the weights; updates other weights, and rows of tables, in place."""
        pairs = list(zip(grads, trainable_variables, strict=True))
        others = [(g, v) for g, v in pairs if tables.update_of(v) != "rows"]
        if others:
            weights, shards = [v for _, v in others], self._tfring_shards
            held = weights if shards is None else shards.held(weights)
            super()._backend_update_step([g for g, _ in others], held, learning_rate)
            if shards is not None:
                sharded = [(v, shard) for v, shard in zip(weights, held, strict=True) if shard is not v]
                shards.gather_into([v for v, _ in sharded], [shard for _, shard in sharded])
        for gradient, variable in pairs:
            if tables.update_of(variable) == "rows":
                tables.update_rows(self, gradient, variable, learning_rate)

    # -- 7. average ------------------------------------------------------------------------------------------------

    def _update_model_variables_moving_average(self, trainable_variables: Sequence[Any]) -> None:
        shards = self._tfring_shards
        variables = trainable_variables if shards is None else shards.filled(trainable_variables)
        super()._update_model_variables_moving_average(variables)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Sequence[Any]) -> None:
        shards = self._tfring_shards
        if shards is None:
            return super()._overwrite_model_variables_with_average_value(trainable_variables)
        averages = zip(trainable_variables, self._model_variables_moving_average, strict=False)
        pairs = [(variable, average) for variable, average in averages if average is not None]
        for variable, average in pairs:
            if shards.shard(variable) is None:
                variable.assign(average)
        pairs = [(variable, average) for variable, average in pairs if shards.shard(variable) is not None]
        return shards.gather_into([variable for variable, _ in pairs], [average for _, average in pairs])


class RingLossScaleOptimizer(keras.optimizers.LossScaleOptimizer, RingOptimizer):
    """Reduces gradients, then checks whether they are finite: all ranks find the same."""

    _delegates = True

    def build(self, variables: Sequence[Any]) -> None:
        self._adopt_inner_optimizers()
        super().build(variables)

    def scale_loss(self, loss: Any) -> Any:
        return super().scale_loss(scale_row_losses(loss))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        self._enter(grads, trainable_variables, super().apply)

    def _note_finite(self, grads: Sequence[Any], variables: Sequence[Any], active: Any) -> None:
        """Notes nothing: gradients are infinite on purpose, and such steps are skipped."""

    def _tf_apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        ring, inner = self._ring, self.inner_optimizer
        if self._current_update is None:
            return super()._tf_apply(grads, trainable_variables)
        variables = list(trainable_variables or self._trainable_variables)
        shards = None if inner.gradient_accumulation_steps else shards_of(inner)  # accumulated in full
        reduced = self._reduce(grads, variables, shards)
        is_sharded = shards is not None
        differs = is_sharded or any(sharding_of(v) is not None for v in variables) or not ring.mesh.is_data_only
        with self._updating(Update(is_reduced=True, is_sharded=is_sharded, differs_by_rank=differs)):
            return self._common_apply(reduced, trainable_variables=trainable_variables)

    def check_finite(self, grads: Sequence[Any]) -> Any:
        is_finite = super().check_finite(grads)
        if self._current_update is None or not self._current_update.differs_by_rank:
            return is_finite
        flags = [tf.reshape(tf.cast(is_finite, tf.int32), [1])]
        everyone = self._ring.along("world", "gradients")
        [agreed] = everyone.all_reduce(flags, "min", name="gradients are finite")
        return agreed[0] > 0


if hasattr(keras.optimizers, "MultiOptimizer"):

    class RingMultiOptimizer(keras.optimizers.MultiOptimizer, RingOptimizer):
        """Passes each optimizer its gradients; each then processes them by itself."""

        _delegates = True

        def build(self, variables: Sequence[Any]) -> None:
            self._adopt_inner_optimizers()
            super().build(variables)


def _build(optimizer: RingOptimizer, variables: Sequence[Any]) -> None:
    with tf.init_scope():  # once, even if its assignments would be part of the step
        optimizer.build(variables)


def _expected(running: step.Step, gradient: Any, variable: Any) -> Any:
    """Returns a gradient, which has to be that of a mean because it is weighed by its replica's rows."""
    # A shard's comes from tfring's own backward pass, from gradients that it has expected to be those of a mean.
    if running.share is not None and gradient is not None and sharding_of(variable) is None:
        return partition.expect_gradient(gradient, f"the gradient of {_names([variable])[0]}")
    return gradient


def _names(variables: Sequence[Any]) -> list[str]:
    return [getattr(v, "path", None) or v.name for v in variables]


def _outside_run_error(optimizer: Any, ring: Ring) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} {optimizer.name!r} was applied outside of `fit` and `strategy.run`, which would "
        f"train a separate model on each of {ring.cluster.world_size} workers. Write the step as "
        "`strategy.run(train_step, args=...)`; see docs/custom_training.md, Loops of your own."
    )


def _already_summed_error(optimizer: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} {optimizer.name!r} got gradients that `strategy.all_reduce_gradients` returned, "
        "but under `strategy.run` the optimizer sums over replicas as well. Pass the optimizer the gradients of the "
        "tape, or divide the sums by `strategy.num_replicas_in_sync` first; see docs/custom_training.md, Loops of your "
        "own."
    )


def _outside_replica_error(optimizer: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{type(optimizer).__name__} {optimizer.name!r} was applied outside of a replica. With shard_optimizer=True, "
        "and for weights sharded over workers, apply gradients in `train_step`, or in the function given to "
        "`strategy.run`."
    )
