"""The steps of `fit`, `evaluate` and `predict` over a ring: few collectives, the same on every rank.

```
one training step on rank r                                           collectives
  next batch ─► rows of each replica ─► who has rows, how many?         1  status       (control)
  forward, backward ─► gradients                                        >= 1 buckets    (gradients)
  moving statistics the replicas wrote ─► mean by rows                  1  if any       (control)
last of an execution: logs ─► mean by rows                              1  logs         (control)
after it, in Python: has any rank set stop_training?                    1  a flag       (control)
```
"""

from __future__ import annotations

import inspect

import tensorflow as tf

from tfring import _tf, data
from tfring._keras import callbacks as ring_callbacks
from tfring._keras import state
from tfring._keras.functions import graph_function, to_tensor, without_optionals
from tfring._keras.predict import PredictFunction
from tfring._keras.seam import entered, ring_of_model, seam
from tfring.errors import ConfigurationError


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
                setattr(self, function_attribute, StepFunction(self, strategy, step_function))
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
            spec = iterator._distributed_dataset.element_spec
            data_batch = _symbolic_batch(spec.parts[0] if isinstance(spec, data.Shares) else spec)
        with strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    @seam(base_trainer.Trainer, "compile")  # where Keras defines it: it asks whether a class has one of its own
    def compile_model(original, self, *args, **kwargs):
        strategy = ring_of_model(self)
        if strategy is None:
            return original(self, *args, **kwargs)
        with strategy.scope():  # optimizers and metrics made here belong to the model's strategy
            return original(self, *args, **kwargs)

    for name in ("fit", "evaluate", "predict"):
        seam(cls, name)(_entry(name, inspect.signature(getattr(cls, name))))


def _entry(name, signature):
    def replacement(original, self, *args, **kwargs):
        strategy = ring_of_model(self)
        if strategy is None or kwargs.get("_use_cached_eval_dataset"):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        from keras.callbacks import CallbackList

        callbacks = given.get("callbacks")
        if not isinstance(callbacks, CallbackList) and strategy.cluster.world_size > 1:
            callbacks = [] if callbacks is None else callbacks
            callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
            callbacks = ring_callbacks.for_rank(callbacks, strategy)
            given["callbacks"] = [*callbacks, ring_callbacks.agreement(strategy)]
        if given.get("verbose", "auto") == "auto" and not strategy.cluster.is_chief:
            given["verbose"] = 0  # one progress bar is enough
        with entered(name):
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
        if isinstance(spec, _tf.distribute_values.PerReplicaSpec):
            spec = spec._value_specs[0]
        if type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec"):
            return None
        shape = list(spec.shape)
        return backend.KerasTensor([None, *shape[1:]], backend.standardize_dtype(spec.dtype.name))

    return tf.nest.map_structure(symbolic, element_spec)


_OTHER_BATCHES = (
    "The ranks drew different batches. Every rank runs the same input pipeline over the same data, and tfring cuts "
    "each rank's share from it. Give random transformations a seed, make unseeded datasets after the strategy, and do "
    "not shard the data yourself, or say so: "
    "options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF."
)


class StepFunction:
    """What `model.train_function` and `model.test_function` are: an iterator in, logs out.

    Args:
      model: the Keras model.
      strategy: its RingStrategy.
      step_function: `train_step` or `test_step`.
    """

    def __init__(self, model, strategy, step_function):
        self._model = model
        self._strategy = strategy
        self._step = step_function
        self._replicas = len(strategy.extended.worker_devices)
        eager = model.run_eagerly
        self._one_step = self._one_step_body if eager else graph_function(self._one_step_body)
        self._on_iterator = self._on_iterator_body if eager else graph_function(self._on_iterator_body)
        self._on_batch = self._on_batch_body if eager else graph_function(self._on_batch_body)

    def __call__(self, iterator):
        if isinstance(iterator, tf.distribute.DistributedIterator):
            return self._on_iterator(iterator)
        logs = None
        for batch in iterator:  # train_on_batch and its sisters: this worker's own share
            logs = self._on_batch(tf.nest.map_structure(to_tensor, batch))
        return logs

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step_body(self, inputs, shares):
        outputs, written = self._strategy.extended.run_step(
            lambda element: self._step(without_optionals(element)), inputs, shares
        )
        state.average_written_state(self._strategy, written, shares)
        if self._strategy.check_equal:  # gradients accumulate on each worker, and go round the ring once an update
            variables = ring_callbacks.all_variables(self._model)
            self._strategy.assert_equal([v for v in variables if "gradient_accumulator" not in v.path])
        return outputs

    def _on_iterator_body(self, iterator):
        with self._strategy.scope():
            steps = self._model.steps_per_execution
            has_batch, inputs, shares = self._next_batch(iterator)
            inputs = tf.cond(has_batch, lambda: inputs, lambda: self._end_of_data(iterator))
            outputs = self._one_step(inputs, shares)
            if steps == 1:
                return self._logs(outputs, shares)

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
            return self._logs(outputs, shares)

    def _on_batch_body(self, batch):
        inputs = data.split_rows(batch, self._replicas)
        with self._strategy.scope():
            _, shares = self._status(inputs, True)
            return self._logs(self._one_step(inputs, shares), shares)

    # -- the batch -------------------------------------------------------------------------------------------------

    def _next_batch(self, iterator):
        """`(has_batch, one element a replica, shares)`; has_batch is the same on every rank."""
        workers = iterator._input_workers
        optionals = [iterator._iterators[0].get_next_as_optional_list()]
        inputs = _tf.input_lib._get_value_or_dummy(workers, optionals, produce_dummy=True)
        has_batch = tf.reduce_any([optional.has_value() for optional in optionals[0]])
        inputs, fingerprint = _parts(inputs)
        has_batch, shares = self._status(inputs, has_batch, fingerprint)
        return has_batch, inputs, shares

    def _end_of_data(self, iterator):
        # No rank has a batch: this raises OutOfRangeError, as Keras expects.
        return _parts(iterator._iterators[0].get_next_as_list())[0]

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

    # -- logs ------------------------------------------------------------------------------------------------------

    def _logs(self, outputs, shares):
        """Numbers become their mean over replicas, weighted by rows; the same on every rank."""
        strategy = self._strategy
        leaves = tf.nest.flatten(outputs)
        local = [strategy.experimental_local_results(leaf) for leaf in leaves]
        numbers = [
            i
            for i, values in enumerate(local)
            if tf.is_tensor(values[0]) and (values[0].dtype.is_floating or values[0].dtype.is_integer)
        ]
        results = [values[0] for values in local]
        if strategy.num_replicas_in_sync > 1 and numbers:
            wide = [
                [v if v.dtype.is_floating else tf.cast(v, tf.float64) for v in local[i]] for i in numbers
            ]
            means = state.mean_over_replicas(strategy, wide, shares)
            for i, mean in zip(numbers, means, strict=True):
                results[i] = tf.cast(mean, local[i][0].dtype)
        return tf.nest.pack_sequence_as(outputs, results)


def _parts(elements):
    """`(one element a replica, fingerprint of the batch or None)`."""
    if isinstance(elements[0], data.Shares):
        return list(elements[0].parts), elements[0].fingerprint
    return elements, None
