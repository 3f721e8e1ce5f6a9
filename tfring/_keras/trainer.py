"""The steps of `fit`, `evaluate` and `predict` over a ring: few collectives, the same on every rank.

```
one training step on rank r                                           collectives
  next batch ─► rows of each replica ─► who has rows, how many?         1  status       (control)
  forward, backward ─► gradients                                        >= 1 buckets    (gradients)
  state the replicas wrote ─► one value for all                         1  if any       (control)
last of an execution: logs ─► of all rows                               1  logs         (control)
after it, in Python: has any rank set stop_training?                    1  a flag       (control)
```
"""

from __future__ import annotations

import inspect

import tensorflow as tf

from tfring import _tf, data, step
from tfring._keras import batch_shapes, outside, state, trace
from tfring._keras import callbacks as ring_callbacks
from tfring._keras.functions import graph_function, to_tensor, without_optionals
from tfring._keras.logs import Logs
from tfring._keras.predict import PredictFunction
from tfring._keras.printing import on_rank_0
from tfring._keras.seam import entered, ring_of_model, seam
from tfring.errors import ConfigurationError
from tfring.ring import failures


def install():
    from keras.src.backend.tensorflow import trainer
    from keras.src.trainers import trainer as base_trainer

    cls = trainer.TensorFlowTrainer

    def make(function_attribute, step_attribute):
        def replacement(original, self, force=False):
            strategy = ring_of_model(self)
            if strategy is None:
                return original(self, force)
            if getattr(self, function_attribute) is None or force:
                _refuse_jit(self)
                step_function = getattr(self, step_attribute)
                kind = step_attribute.removesuffix("_step")
                setattr(self, function_attribute, StepFunction(self, strategy, step_function, kind))
            return getattr(self, function_attribute)

        return replacement

    seam(cls, "make_train_function")(make("train_function", "train_step"))
    seam(cls, "make_test_function")(make("test_function", "test_step"))

    @seam(cls, "make_predict_function")
    def make_predict_function(original, self, force=False):
        strategy = ring_of_model(self)
        if strategy is None:
            return original(self, force)
        if self.predict_function is None or force:
            _refuse_jit(self)
            self.predict_function = PredictFunction(self, strategy)
        return self.predict_function

    @seam(cls, "_maybe_symbolic_build")
    def maybe_symbolic_build(original, self, iterator=None, data_batch=None):
        strategy = ring_of_model(self)
        if strategy is None:
            return original(self, iterator=iterator, data_batch=data_batch)
        # From the specification, not from a batch: a generator's rows are drawn once.
        if iterator is not None:
            batch_shapes.check(self, strategy, iterator._tfring_batch_size)
            spec = iterator._distributed_dataset.element_spec
            data_batch = _symbolic_batch(spec.parts[0] if isinstance(spec, data.Shares) else spec)
        first = self.train_function is None and self.test_function is None
        if first:
            outside.refuse_weights(self, strategy)
            outside.take_in_optimizers(self, strategy)
        with strategy.scope():
            try:
                self._symbolic_build(data_batch=data_batch)
            except (NotImplementedError, RuntimeError, TypeError, ValueError):
                # One process does not build here. A step of its own need not call the model, which may lack `call`.
                if type(self).train_step is cls.train_step and type(self).test_step is cls.test_step:
                    raise
        if first:
            outside.take_in_metrics(self, strategy)

    @seam(base_trainer.Trainer, "compile")  # where Keras defines it: it asks whether a class has one of its own
    def compile_model(original, self, *args, **kwargs):
        strategy = ring_of_model(self)
        if strategy is None:
            outside.refuse_model(self, "compile")
            return original(self, *args, **kwargs)
        with strategy.scope():  # optimizers and metrics made here belong to the model's strategy
            original(self, *args, **kwargs)
        outside.take_in_optimizers(self, strategy)

    for name in ("fit", "evaluate", "predict"):
        seam(cls, name)(_entry(name, inspect.signature(getattr(cls, name))))


def _entry(name, signature):
    def replacement(original, self, *args, **kwargs):
        strategy = ring_of_model(self)
        if strategy is None and name == "fit":
            outside.refuse_model(self, name)
        if strategy is None or kwargs.get("_use_cached_eval_dataset"):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        from keras.callbacks import CallbackList

        callbacks = given.get("callbacks")
        if not isinstance(callbacks, CallbackList):
            callbacks = given["callbacks"] = ring_callbacks.arranged(name, callbacks, strategy)
        if given.get("verbose", "auto") == "auto" and not strategy.cluster.is_chief:
            given["verbose"] = 0  # one progress bar is enough
        around = ring_callbacks.around(name, callbacks, self)
        traced = trace.entry(strategy)
        with entered(name), on_rank_0(strategy), failures.named(strategy.extended.channels), traced, around:
            return original(*bound.args, **bound.kwargs)

    return replacement


def _refuse_jit(model):
    if model.jit_compile:
        raise ConfigurationError(
            "XLA cannot compile a training step that holds tfring's collectives. Received: jit_compile="
            f"{model.jit_compile}. Compile with `model.compile(..., jit_compile=False)`; "
            "layers may still be compiled one by one with `tf.function(jit_compile=True)`."
        )


def _symbolic_batch(element_spec):
    from keras.src import backend

    def symbolic(spec):
        spec = _tf.spec_of_a_replica(spec)
        if type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec"):
            return None
        shape = list(spec.shape)
        return backend.KerasTensor([None, *shape[1:]], backend.standardize_dtype(spec.dtype.name))

    return tf.nest.map_structure(symbolic, element_spec)


_OTHER_BATCHES = (
    "The ranks drew different batches. Every rank runs the same program over the same rows, and tfring cuts each "
    "rank's share from them. Give what chooses or orders rows a seed (`dataset.shuffle(n, seed=1)`, "
    "`keras.utils.set_random_seed(1)` before data is made), make unseeded datasets after the strategy; batches of a "
    "PyDataset or a generator draw their random numbers from `np.random.default_rng([seed, index])`. Where each rank "
    "has rows of its own, say so: "
    "options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF. See docs/data.md."
)


class StepFunction:
    """What `model.train_function` and `model.test_function` are: an iterator in, logs out.

    Args:
      model: the Keras model.
      strategy: its RingStrategy.
      step_function: `train_step` or `test_step`.
      kind: "train" or "test", for a trace.
    """

    def __init__(self, model, strategy, step_function, kind):
        self._kind = kind
        self._model = model
        self._strategy = strategy
        self._step = step_function
        self._replicas = len(strategy.extended.worker_devices)
        self._logs = Logs(model, strategy)
        eager = model.run_eagerly
        self._one_step = self._one_step_body if eager else graph_function(self._one_step_body)
        self._on_iterator = self._on_iterator_body if eager else graph_function(self._on_iterator_body)
        self._on_batch = self._on_batch_body if eager else graph_function(self._on_batch_body)

    def __call__(self, iterator):
        with trace.step(self._strategy, self._kind):
            return self._run(iterator)

    def _run(self, iterator):
        if isinstance(iterator, tf.distribute.DistributedIterator):
            return self._on_iterator(iterator)
        logs = None
        for batch in iterator:  # train_on_batch and its sisters: this worker's own share
            logs = self._on_batch(tf.nest.map_structure(to_tensor, batch))
        return logs

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step_body(self, inputs, shares):
        before = state.values_before(self._model)
        outputs, written = self._logs.of_step(
            lambda step: self._strategy.extended.run_step(step, inputs, shares),
            lambda element: self._step(without_optionals(element)),
            inputs,
        )
        state.bring_written_state_together(self._strategy, written, shares, before)
        if self._strategy.check_equal:  # gradients accumulate on each worker, and go round the ring once an update
            variables = ring_callbacks.all_variables(self._model)
            self._strategy.assert_equal(
                [v for v in variables if "gradient_accumulator" not in v.path and not step.is_kept_by_replica(v)]
            )
        return outputs

    def _on_iterator_body(self, iterator):
        with self._strategy.scope():
            steps = self._model.steps_per_execution
            has_batch, inputs, shares = self._next_batch(iterator)
            inputs = tf.cond(has_batch, lambda: inputs, lambda: self._end_of_data(iterator))
            outputs = self._one_step(inputs, shares)
            if steps == 1:
                return self._logs.of_all_rows(outputs, shares)

            def more(i, has_batch, outputs, shares):
                return tf.logical_and(i < steps, has_batch)

            def another(i, _, outputs, shares):
                has_batch, inputs, next_shares = self._next_batch(iterator)
                outputs, shares = tf.cond(
                    has_batch,
                    lambda: (self._one_step(inputs, next_shares), next_shares),
                    lambda: (outputs, shares),
                )
                return i + 1, has_batch, outputs, shares

            _, _, outputs, shares = tf.while_loop(
                more, another, (1, True, outputs, shares), parallel_iterations=1
            )
            return self._logs.of_all_rows(outputs, shares)

    def _on_batch_body(self, batch):
        inputs = data.split_rows(batch, self._replicas)
        with self._strategy.scope():
            _, shares = self._status(inputs, True)
            return self._logs.of_all_rows(self._one_step(inputs, shares), shares)

    # -- the batch -------------------------------------------------------------------------------------------------

    def _next_batch(self, iterator):
        """`(has_batch, one element a replica, shares)`; has_batch is the same on every rank."""
        inputs, has_batch = trace.next_batch(self._strategy, lambda: _tf.next_or_dummy(iterator))
        inputs, fingerprint = _parts(inputs)
        has_batch, shares = self._status(inputs, has_batch, fingerprint)
        return has_batch, inputs, shares

    def _end_of_data(self, iterator):
        # No rank has a batch: this raises OutOfRangeError, as Keras expects.
        return _parts(_tf.next_or_error(iterator))[0]

    def _status(self, inputs, has_batch, fingerprint=None):
        """One small collective: does any rank have rows left, how many has each replica, are they of one batch?"""
        cluster = self._strategy.cluster
        rows = [data.num_rows(element) for element in inputs]
        rows = tf.stack([tf.cast(1 if r is None else r, tf.int64) for r in rows])
        has_batch = tf.convert_to_tensor(has_batch)
        if self._strategy.num_replicas_in_sync == 1:
            return has_batch, tf.ones([1], tf.float64)
        before = cluster.rank * self._replicas
        after = self._strategy.num_replicas_in_sync - before - self._replicas
        prints = tf.zeros([2], tf.int64)
        if fingerprint is not None:
            prints = tf.where(has_batch, [fingerprint, -fingerprint], [tf.int64.min, tf.int64.min])
        mine = tf.concat([prints, [tf.cast(has_batch, tf.int64)], tf.pad(rows, [[before, after]])], 0)
        [everyone] = self._strategy.extended.control.all_reduce([mine], "max", name="status")
        has_batch, total = everyone[2] > 0, tf.reduce_sum(everyone[3:])
        same = tf.debugging.assert_equal(everyone[0], tf.where(has_batch, -everyone[1], everyone[0]), _OTHER_BATCHES)
        with tf.control_dependencies([] if same is None else [same]):
            shares = tf.math.divide_no_nan(tf.cast(rows, tf.float64), tf.cast(total, tf.float64))
        return has_batch, shares


def _parts(elements):
    """`(one element a replica, fingerprint of the batch or None)`."""
    if isinstance(elements[0], data.Shares):
        return list(elements[0].parts), elements[0].fingerprint
    return elements, None
