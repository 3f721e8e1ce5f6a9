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
from tfring._keras import finite
from tfring._keras.seam import seam
from tfring.cross_device_ops import values_of
from tfring.recognition import ring_of

_local = threading.local()


class _Applying:
    """One `apply` on its way through Keras: what it still has to reduce."""

    def __init__(self, strategy, active, reduced):
        self.strategy = strategy
        self.active = active
        self.reduced = reduced
        self.names: list[str] | None = None


@contextlib.contextmanager
def _applying(strategy, active, reduced=False):
    before = getattr(_local, "applying", None)
    _local.applying = _Applying(strategy, active, reduced)
    try:
        yield
    finally:
        _local.applying = before


def _reduce(strategy, gradients, active, names=None):
    positions = [i for i, g in enumerate(gradients) if g is not None]
    reduced = strategy.extended.gradient_ops.sum_over_workers(
        [gradients[i] for i in positions],
        name="gradients",
        value_names=[names[i] for i in positions] if names else None,
        active=active,
    )
    results = list(gradients)
    for i, gradient in zip(positions, reduced, strict=True):
        results[i] = gradient
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

        def in_cross_replica(gradients, active):
            names = _names(variables or optimizer._trainable_variables)
            finite.note(strategy, optimizer, gradients, names, active)
            summed, worker_active = _sum_on_worker(strategy, optimizer, gradients, active)
            body(strategy, summed, worker_active)

        strategy.extended.cross_replica(in_cross_replica, list(gradients), active)
        return True

    @seam(base_optimizer.BaseOptimizer, "apply")
    def apply(original, self, grads, trainable_variables=None):
        def body(strategy, summed, active):
            with _applying(strategy, active):
                original(self, summed, trainable_variables)

        if not enter(self, grads, trainable_variables, body):
            original(self, grads, trainable_variables)

    @seam(loss_scale_optimizer.LossScaleOptimizer, "apply")
    def loss_scale_apply(original, self, grads, trainable_variables=None):
        def body(strategy, summed, active):
            # Reduced first: every rank sees the same sum, so all find it finite or none does.
            reduced = _reduce(strategy, summed, active, _names(trainable_variables or []))
            with _applying(strategy, None, reduced=True):
                original(self, reduced, trainable_variables)

        if not enter(self, grads, trainable_variables, body):
            original(self, grads, trainable_variables)

    @seam(loss_scale_optimizer.LossScaleOptimizer, "_tf_apply")
    def tf_apply(original, self, grads, trainable_variables=None):
        if getattr(_local, "applying", None) is not None:
            self._common_apply(grads, trainable_variables=trainable_variables)
        else:
            original(self, grads, trainable_variables)

    @seam(base_optimizer.BaseOptimizer, "_backend_apply_gradients")
    def backend_apply_gradients(original, self, grads, trainable_variables):
        applying = getattr(_local, "applying", None)
        if applying is not None:
            applying.names = _names(trainable_variables)
        return original(self, grads, trainable_variables)

    @seam(base_optimizer.BaseOptimizer, "_clip_gradients")
    def clip_gradients(original, self, grads):
        applying = getattr(_local, "applying", None)
        if applying is not None and not applying.reduced:
            grads = _reduce(applying.strategy, grads, applying.active, applying.names)
        return original(self, grads)
