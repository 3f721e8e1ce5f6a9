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
"""

from __future__ import annotations

import contextlib
import threading

import tensorflow as tf

from tfring import step
from tfring._keras import finite, sharding
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
      cut: whether gradients are of this worker's pieces; see `sharding.py`.
      variables: that the gradients are of.
    """

    def __init__(self, strategy, active=None, weighed=False, reduced=False, cut=False):
        self.strategy = strategy
        self.active = active
        self.weighed = weighed
        self.reduced = reduced
        self.cut = cut
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

    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    cuts = {i: sharding.cut_of(shards.piece(variables[i])) for i in present} if shards else {}
    cut = [i for i in present if cuts.get(i)]
    ops = strategy.extended.gradient_ops
    reduce([i for i in present if i not in cut], ops.sum_over_workers)
    reduce(
        cut,
        ops.reduce_scatter_over_workers,
        [cuts[i] for i in cut],
        is_zero_unless_active=applying.weighed,
    )
    return results


def _sum_on_worker(strategy, optimizer, gradients, active):
    """`(gradients, active)`: the sum of this worker's replicas; whether the worker contributes, None where it does."""
    ops = strategy.extended.gradient_ops
    flags = None if active is None else values_of(active)
    # One replica without rows is left to the ring, which then adds zeros for free. Not so where gradients are
    # accumulated: those of earlier steps count.
    active = None
    if flags is not None and len(flags) == 1 and not optimizer.gradient_accumulation_steps:
        [active], flags = flags, None
    return [None if g is None else ops.sum_on_worker(g, flags) for g in gradients], active


def _names(variables):
    return [getattr(v, "path", None) or v.name for v in variables]


def install():
    from keras.src.optimizers import base_optimizer, loss_scale_optimizer

    def enter(optimizer, gradients, variables, body):
        """Moves an `apply` into the cross-replica context; None where it is there already or not ours."""
        strategy = ring_of(getattr(optimizer, "_distribution_strategy", None))
        if strategy is None or tf.distribute.get_replica_context() is None:
            return False
        if not tf.distribute.has_strategy():
            return False
        running = step.current()
        active = running.active if running else None
        if running is not None:
            gradients = list(gradients)
            for i, variable in enumerate(variables or [None] * len(gradients)):
                if not getattr(variable, "overwrite_with_gradient", False):  # which is no gradient, but a value
                    gradients[i] = running.weigh(gradients[i])
        weighed = running is not None and running.share is not None

        def in_cross_replica(gradients, active):
            names = _names(variables or optimizer._trainable_variables)
            finite.note(strategy, optimizer, gradients, names, active)
            summed, worker_active = _sum_on_worker(strategy, optimizer, gradients, active)
            with _running(_Applying(strategy, worker_active, weighed)):
                body(summed)

        strategy.extended.cross_replica(in_cross_replica, list(gradients), active)
        return True

    def apply(original, self, grads, trainable_variables=None):
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
        with _running(_Applying(applying.strategy, reduced=True, cut=shards is not None)):
            return self._common_apply(reduced, trainable_variables=trainable_variables)

    @seam(loss_scale_optimizer.LossScaleOptimizer, "check_finite")
    def check_finite(original, self, grads):
        applying, is_finite = _under_way(), original(self, grads)
        if applying is None or not applying.cut:
            return is_finite
        flags = [tf.reshape(tf.cast(is_finite, tf.int32), [1])]
        [agreed] = applying.strategy.extended.gradients.all_reduce(flags, "min", name="gradients are finite")
        return agreed[0] > 0

    @seam(base_optimizer.BaseOptimizer, "_backend_apply_gradients")
    def backend_apply_gradients(original, self, grads, trainable_variables):
        applying = _under_way()
        if applying is not None:
            applying.variables = list(trainable_variables)
        return original(self, grads, trainable_variables)

    @seam(base_optimizer.BaseOptimizer, "_clip_gradients")
    def clip_gradients(original, self, grads):
        applying, shards = _under_way(), sharding.shards_of(self)
        if applying is not None and not applying.reduced:
            grads = _reduce(applying, grads, applying.variables, shards)
        if shards is None:
            return original(self, grads)
        if applying is None:
            raise ConfigurationError(
                "With shard_optimizer=True gradients are applied where each replica has its own: in `train_step`, or "
                "in the function given to `strategy.run`. Received: an outside call of apply of "
                f"{type(self).__name__} {self.name!r}."
            )
        if applying.reduced and not applying.cut:
            grads = [sharding.piece_of(shards.piece(v), g) for v, g in zip(applying.variables, grads, strict=True)]
        return sharding.clipped(original, self, shards, grads)
