"""Optimizers reduce before they clip and before they ask whether gradients are finite.

```
Keras      apply ─► (accumulate) ─► clip ─► all_reduce ─► update          two workers clip, each its own gradient
tfring     apply ─► weigh by rows ─► sum replicas of the worker ─► (accumulate) ─► ring ─► clip ─► update
                                                                                              as one process would
```

A gradient is weighed by its replica's share of the rows where the optimizer takes it, so that their sum is the gradient
of the whole batch, whatever loss it comes from. In a loop of the user's own, where nobody counts rows, gradients are
summed as `tf.distribute` has it.

Clipping on local gradients is horovod #1346; the finite test of LossScaleOptimizer on local gradients sends ranks
down different branches. The whole of `apply` runs in the cross-replica context: there it may contain `cond`
(gradient accumulation, loss scaling), which a replica may not mix with `merge_call`.

An optimizer of the user's that overrides `apply` or `apply_gradients` works on what it is given, so it is given the sum
over replicas, and the base class sums what becomes of it by the same shares: gradients are sent twice.

The gradient of a piece that others along the data axis have other pieces of is that of the whole batch already: what
made it has weighed it and summed it (`layers/lookup.py`, `layers/own_rows.py`).
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfring import step
from tfring._keras import finite, outside, sharding, tables
from tfring._keras.seam import seam
from tfring.cross_device_ops import values_of
from tfring.errors import ConfigurationError
from tfring.recognition import ring_of

_local = threading.local()


class _Applying:
    """One `apply` on its way through Keras, and what it still has to do with gradients.

    Attributes:
      strategy: the RingStrategy.
      active: whether this worker contributes; None where it does.
      weighed: whether gradients are zeros where it does not.
      reduced: whether gradients are those of all workers.
      cut: whether gradients are of pieces of whole weights; see `sharding.py`.
      apart: whether workers hold different gradients, those of their pieces or tables.
      variables: that the gradients are of.
    """

    def __init__(self, strategy, active=None, weighed=False, reduced=False, cut=False, apart=False):
        self.strategy = strategy
        self.active = active
        self.weighed = weighed
        self.reduced = reduced
        self.cut = cut
        self.apart = apart
        self.variables: list = []


@contextlib.contextmanager
def _running(applying):
    before = _under_way()
    _local.applying = applying
    try:
        yield
    finally:
        _local.applying = before


def _under_way() -> _Applying | None:
    return getattr(_local, "applying", None)


def each_id_once() -> bool:
    """Whether gradients that come as IndexedSlices just now hold no id twice: the ring has summed them."""
    applying = _under_way()
    return applying is not None and applying.strategy is not None


def _reduce(applying, gradients, variables, shards=None):
    """The gradients of all workers; where there are `shards`, of the pieces of variables that are cut."""
    strategy = applying.strategy
    names = _names(variables) if variables else [f"gradients/{i}" for i in range(len(gradients))]
    results = list(gradients)

    def reduce(positions, function, *more, **options):
        reduced = function(
            [gradients[i] for i in positions],
            *more,
            name="gradients",
            value_names=[names[i] for i in positions],
            active=applying.active,
            **options,
        )
        for i, gradient in zip(positions, reduced, strict=True):
            results[i] = gradient

    alone = strategy.extended.gradients.world_size == 1  # and the ids of tables are there once
    complete = [
        i
        for i, variable in enumerate(variables or ())
        if sharding.gradient_is_complete(variable) or (alone and tables.update_of(variable))
    ]
    present = [i for i, gradient in enumerate(gradients) if gradient is not None and i not in complete]
    cuts = {i: sharding.cut_of(shards.piece(variables[i])) for i in present} if shards else {}
    cut = [i for i in present if cuts.get(i)]
    by_rows = [i for i in present if variables and tables.update_of(variables[i]) == "rows"]
    ops = strategy.extended.gradient_ops
    reduce([i for i in present if i not in cut and i not in by_rows], ops.sum_over_workers)
    reduce(by_rows, ops.sum_over_workers, keep_sparse=True)
    reduce(
        cut,
        ops.reduce_scatter_over_workers,
        [cuts[i] for i in cut],
        is_zero_unless_active=applying.weighed,
    )
    return results


def _sum_on_worker(strategy, optimizer, gradients, are_complete, active):
    """`(gradients, active)`: the sum of this worker's replicas; whether the worker contributes, None where it does.

    A worker without rows of the batch has pieces whose gradients are of the rows of others.
    """
    ops = strategy.extended.gradient_ops
    flags = None if active is None else values_of(active)
    # One replica without rows is left to the ring, which then adds zeros for free. Not so where gradients are
    # accumulated: those of earlier steps count.
    active = None
    if flags is not None and len(flags) == 1 and not optimizer.gradient_accumulation_steps:
        [active], flags = flags, None
    pairs = zip(gradients, are_complete, strict=True)
    return [None if g is None else ops.sum_on_worker(g, None if done else flags) for g, done in pairs], active


def _names(variables):
    return [getattr(v, "path", None) or v.name for v in variables]


def _reduced(optimizer, gradients, variables):
    """The gradients of the whole batch, in each replica; those of shards are, and values in their place are none."""
    strategy = ring_of(getattr(optimizer, "_distribution_strategy", None))
    positions = [
        i
        for i, variable in enumerate(variables)
        if not sharding.gradient_is_complete(variable) and not getattr(variable, "overwrite_with_gradient", False)
    ]
    gradients = list(gradients)
    reduced = strategy.all_reduce_gradients([gradients[i] for i in positions])
    for i, gradient in zip(positions, reduced, strict=True):
        gradients[i] = gradient
    return gradients


def _is_outermost(optimizer) -> bool:
    """Whether gradients come from a replica of a step, and no method of this optimizer's has had them yet."""
    strategy = ring_of(getattr(optimizer, "_distribution_strategy", None))
    if strategy is None or step.weighing() is None or tf.distribute.get_replica_context() is None:
        return False
    return _under_way() is None and getattr(_local, "entered", None) is not optimizer


@contextlib.contextmanager
def _entered(optimizer):
    before = getattr(_local, "entered", None)
    _local.entered = optimizer
    try:
        yield
    finally:
        _local.entered = before


def _reduce_before_overrides(cls) -> None:
    """Has `apply` and `apply_gradients` of a user's optimizer see gradients of the whole batch, as in one process."""
    for owner in cls.__mro__:
        if owner.__module__.startswith("keras."):
            continue
        if "apply" in vars(owner) and not hasattr(owner.apply, "_tfring_reduces"):

            @seam(owner, "apply")
            def apply(original, self, grads, trainable_variables=None):
                if not _is_outermost(self):
                    return original(self, grads, trainable_variables)
                variables = list(trainable_variables or self._trainable_variables)
                if len(variables) == len(grads):
                    grads = _reduced(self, grads, variables)
                with _entered(self):
                    return original(self, grads, trainable_variables)

            owner.apply._tfring_reduces = True
        if "apply_gradients" in vars(owner) and not hasattr(owner.apply_gradients, "_tfring_reduces"):

            @seam(owner, "apply_gradients")
            def apply_gradients(original, self, grads_and_vars, *args, **kwargs):
                if not _is_outermost(self):
                    return original(self, grads_and_vars, *args, **kwargs)
                grads, variables = zip(*grads_and_vars, strict=True)
                with _entered(self):
                    pairs = list(zip(_reduced(self, grads, variables), variables, strict=True))
                    return original(self, pairs, *args, **kwargs)

            owner.apply_gradients._tfring_reduces = True


def install():
    from keras.src.optimizers import base_optimizer, loss_scale_optimizer

    @seam(base_optimizer.BaseOptimizer, "__init__")
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        _reduce_before_overrides(type(self))

    def enter(optimizer, gradients, variables, body):
        """Moves an `apply` into the cross-replica context; returns False where it is there already or not ours.

        Raises:
          ConfigurationError: outside of a replica, where nothing would bring the workers' gradients together.
        """
        strategy = ring_of(getattr(optimizer, "_distribution_strategy", None))
        if strategy is None:
            if _under_way() is None:
                outside.refuse_variables(optimizer, variables)
            return False
        if tf.distribute.get_replica_context() is None or not tf.distribute.has_strategy():
            if _under_way() is None and strategy.cluster.world_size > 1:
                raise _no_replica(optimizer, strategy)
            return False
        running = step.current()
        active = running.active if running else None
        variables = list(variables or optimizer._trainable_variables)
        if len(variables) != len(gradients):  # Keras says what is missing
            return False
        are_complete = list(map(sharding.gradient_is_complete, variables))
        if running is not None:
            gradients = list(gradients)
            for i, variable in enumerate(variables):
                is_value = getattr(variable, "overwrite_with_gradient", False)  # and no gradient
                if not is_value and not are_complete[i]:
                    gradients[i] = running.weigh(gradients[i])
        weighed = running is not None and running.share is not None

        def in_cross_replica(gradients, active):
            names = _names(variables)
            finite.note(strategy, optimizer, gradients, names, active)
            summed, worker_active = _sum_on_worker(strategy, optimizer, gradients, are_complete, active)
            if strategy.updater is not None:
                with _running(_Applying(strategy, worker_active, weighed, reduced=True)):
                    return strategy.updater.apply(optimizer, summed, variables)
            with _running(_Applying(strategy, worker_active, weighed)):
                body(summed)

        strategy.extended.cross_replica(in_cross_replica, list(gradients), active)
        return True

    def apply(original, self, grads, trainable_variables=None):
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        if not enter(self, grads, trainable_variables, lambda summed: original(self, summed, trainable_variables)):
            original(self, grads, trainable_variables)

    seam(base_optimizer.BaseOptimizer, "apply")(apply)
    seam(loss_scale_optimizer.LossScaleOptimizer, "apply")(apply)

    @seam(loss_scale_optimizer.LossScaleOptimizer, "_tf_apply")
    def tf_apply(original, self, grads, trainable_variables=None):
        applying = _under_way()
        if applying is None:
            return original(self, grads, trainable_variables)
        # Reduced first: every rank sees the same sum, so all find it finite or none does.
        variables = list(trainable_variables or self._trainable_variables)
        inner = self.inner_optimizer
        shards = None if inner.gradient_accumulation_steps else sharding.shards_of(inner)  # accumulated whole
        reduced = _reduce(applying, grads, variables, shards)
        has_pieces = any(sharding.cut_of(v) is not None for v in variables)
        apart = shards is not None or has_pieces or not applying.strategy.mesh.is_data_only
        with _running(_Applying(applying.strategy, reduced=True, cut=shards is not None, apart=apart)):
            return self._common_apply(reduced, trainable_variables=trainable_variables)

    @seam(loss_scale_optimizer.LossScaleOptimizer, "check_finite")
    def check_finite(original, self, grads):
        applying, is_finite = _under_way(), original(self, grads)
        if applying is None or not applying.apart:
            return is_finite
        flags = [tf.reshape(tf.cast(is_finite, tf.int32), [1])]
        everyone = applying.strategy.extended.along("world", "gradients")
        [agreed] = everyone.all_reduce(flags, "min", name="gradients are finite")
        return agreed[0] > 0

    @seam(base_optimizer.BaseOptimizer, "_backend_apply_gradients")
    def backend_apply_gradients(original, self, grads, trainable_variables):
        applying = _under_way()
        if applying is None and any(map(sharding.axis_of, trainable_variables)):
            raise _outside(self)
        if applying is None and any(map(tables.update_of, trainable_variables)):
            applying = _Applying(None, reduced=True)  # of one process
        if applying is not None:
            applying.variables = list(trainable_variables)
        with _running(applying):
            return original(self, grads, trainable_variables)

    @seam(base_optimizer.BaseOptimizer, "_clip_gradients")
    def clip_gradients(original, self, grads):
        applying, shards = _under_way(), sharding.shards_of(self)
        if applying is None:
            if shards is not None:
                raise _outside(self)
            return original(self, grads)
        variables = applying.variables
        if not applying.reduced:
            grads = _reduce(applying, grads, variables, shards)
        pieces = [None if shards is None else shards.piece(v) for v in variables]
        if applying.reduced and not applying.cut:
            grads = [g if p is None else sharding.piece_of(p, g) for p, g in zip(pieces, grads, strict=True)]
        axes = [sharding.axis_of(v if p is None else p) for p, v in zip(pieces, variables, strict=True)]
        if any(axes) or any(map(tables.update_of, variables)):  # which Keras would make dense
            return sharding.clipped(original, self, applying.strategy, grads, axes)
        return original(self, grads)


def _no_replica(optimizer, strategy):
    return ConfigurationError(
        "Gradients are applied where those of all workers are brought together: in `fit`, or in the function given to "
        f"`strategy.run`. Received: a call of apply of {type(optimizer).__name__} {optimizer.name!r} outside of both, "
        f"which would train a model on each of {strategy.cluster.world_size} workers alone. Write the step as "
        "`strategy.run(train_step, args=...)`; see docs/custom_training.md, Loops of your own."
    )


def _outside(optimizer):
    return ConfigurationError(
        "With shard_optimizer=True, and for weights divided over workers, gradients are applied where each replica has "
        "its own: in `train_step`, or in the function given to `strategy.run`. Received: an outside call of apply of "
        f"{type(optimizer).__name__} {optimizer.name!r}."
    )
