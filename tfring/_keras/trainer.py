"""The steps of `fit`, `evaluate` and `predict` over a ring: few collectives, the same on every rank.

```
one training step on rank r                                           collectives
  next batch ─► rows of each replica ─► who has rows, how many?         1  status       (control)
                      has any rank left the loop?
  forward, backward ─► gradients                                        >= 1 buckets    (gradients)
  state the replicas wrote ─► one value for all ┐
  logs, where a callback reads them ─► all rows ┴                       1  if any       (control)
```

State and logs travel as one collective a dtype. Logs that no callback reads are reduced behind the loop
(`loop.py`), those of several steps at the end of an execution. Nothing is sent from Python.
"""

from __future__ import annotations

import inspect

import tensorflow as tf

from tfring import _tf, data, step
from tfring._keras import agreement, batch_shapes, loop, outside, state, status, trace
from tfring._keras import callbacks as ring_callbacks
from tfring._keras.adoption import adopt_optimizers
from tfring._keras.functions import OfIterator, graph_function, to_tensor, without_optionals
from tfring._keras.logs import Logs
from tfring._keras.parts import refuse_astray
from tfring._keras.predict import PredictFunction
from tfring._keras.printing import on_rank_0
from tfring._keras.seam import entered, ring_of_model, seam
from tfring.errors import ConfigurationError
from tfring.ring import failures


def install():
    from keras.src.backend.tensorflow import trainer
    from keras.src.trainers import trainer as base_trainer

    cls = trainer.TensorFlowTrainer

    def make(kind):
        function_attribute = f"{kind}_function"

        def replacement(original, self, force=False):
            strategy = ring_of_model(self)
            if strategy is None:
                return original(self, force)
            if getattr(self, function_attribute) is None or force:
                _refuse_jit(self)
                function = StepFunction(self, strategy, kind)
                loop.made(self, kind, function)
                setattr(self, function_attribute, function)
            return getattr(self, function_attribute)

        return replacement

    seam(cls, "make_train_function")(make("train"))
    seam(cls, "make_test_function")(make("test"))

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
            loop.bind(iterator, self)
            batch_shapes.check(self, strategy, iterator._tfring_batch_size)
            spec = _tf.element_spec(iterator._distributed_dataset)
            data_batch = _symbolic_batch(spec.parts[0] if isinstance(spec, data.Shares) else spec)
        first = self.train_function is None and self.test_function is None
        if first:
            outside.refuse_weights(self, strategy)
            adopt_optimizers(self, strategy)
        with strategy.scope():
            try:
                self._symbolic_build(data_batch=data_batch)
            except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
                # One process does not build here. A step of its own need not call the model, which may lack `call`.
                if type(self).train_step is cls.train_step and type(self).test_step is cls.test_step:
                    if not self.run_eagerly:
                        raise
                    _build_eagerly(self, data_batch)
        if first:
            outside.take_in_metrics(self, strategy)

    @seam(base_trainer.Trainer, "compile")  # where Keras defines it: it asks whether a class has one of its own
    def compile_model(original, self, *args, **kwargs):
        outside.take_in_model(self)
        strategy = ring_of_model(self)
        if strategy is None:
            outside.refuse_model(self, "compile")
            return original(self, *args, **kwargs)
        with strategy.scope():  # optimizers and metrics made here belong to the model's strategy
            original(self, *args, **kwargs)
        adopt_optimizers(self, strategy)
        refuse_astray(self)

    for name in ("fit", "evaluate", "predict"):
        seam(cls, name)(_entry(name, inspect.signature(getattr(cls, name))))


def _entry(name, signature):
    def replacement(original, self, *args, **kwargs):
        if name == "fit":
            outside.take_in_model(self)
        strategy = ring_of_model(self)
        if strategy is None and name == "fit":
            outside.refuse_model(self, name)
            outside.warn_of_model(self)
        if strategy is None or kwargs.get("_use_cached_eval_dataset"):
            return original(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        from keras.callbacks import CallbackList

        if given.get("verbose", "auto") == "auto" and not strategy.cluster.is_chief:
            given["verbose"] = 0  # one progress bar is enough
        callbacks = given.get("callbacks")
        if not isinstance(callbacks, CallbackList):
            callbacks = given["callbacks"] = ring_callbacks.arranged(
                name, callbacks, self, strategy, given.get("verbose", "auto")
            )
        around = ring_callbacks.around(name, callbacks, self)
        traced = trace.entry(strategy)
        naming = failures.reraise_as_tfring_error(strategy.extended.channels, strategy.mesh)
        with entered(name), on_rank_0(strategy), naming, traced, around:
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

    specs = tf.nest.map_structure(_tf.spec_of_a_replica, element_spec)
    shapes = [list(spec.shape) for spec in tf.nest.flatten(specs) if getattr(spec, "shape", None)]
    counts = [shape[0] for shape in shapes]
    rows = None if None in counts else max(counts, key=counts.count, default=None)

    def symbolic(spec):
        if type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec"):
            return None
        first, *others = list(spec.shape) or [None]
        first = None if first == rows else first  # else of a constant beside the rows
        return backend.KerasTensor([first, *others], backend.standardize_dtype(spec.dtype.name))

    return tf.nest.map_structure(symbolic, specs)


def _build_eagerly(model, data_batch):
    """Builds a model on a row of zeros: what runs eagerly may call NumPy, which takes no symbols."""
    from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

    def zeros(symbol):
        return None if symbol is None else tf.zeros([n or 1 for n in symbol.shape], symbol.dtype)

    x, y, _ = unpack_x_y_sample_weight(tf.nest.map_structure(zeros, data_batch))
    y_pred = model(x, training=False)
    for part in (model._compile_metrics, model._compile_loss):
        if part is not None and not part.built:
            part.build(y, y_pred)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._post_build()


class StepFunction:
    """The `model.train_function` and `model.test_function`: an iterator in, logs out.

    Args:
      model: the Keras model.
      strategy: its RingStrategy.
      kind: "train" or "test".
    """

    def __init__(self, model, strategy, kind):
        self._model = model
        self._strategy = strategy
        self._kind = kind
        self._step = getattr(model, f"{kind}_step")
        self._replicas = len(strategy.extended.worker_devices)
        self._logs = Logs(model, strategy)
        made = (lambda body: body) if model.run_eagerly else graph_function
        self._one_step = made(self._one_step_body)
        self._on_iterator = self._on_iterator_body if model.run_eagerly else OfIterator(self._on_iterator_body)
        self._on_batch = made(self._on_batch_body)
        self._logs_of_all_rows = made(self._logs_of_all_rows_body)
        self._is_compared = False
        self.begin_anew()

    def begin_anew(self):
        """Forgets a loop over batches."""
        self.iterator = None  # of the last step
        self._unread: tuple | None = None  # of the last step: what its replicas returned, and their shares
        self._logs_of_loop: dict = {}  # that Keras holds for those of the last step

    def __call__(self, iterator):
        with trace.step(self._strategy, self._kind):
            return self._run(iterator)

    def _run(self, iterator):
        if not isinstance(iterator, tf.distribute.DistributedIterator):
            logs = None
            for batch in iterator:  # train_on_batch, test_on_batch: this worker's own share
                logs = self._call(self._on_batch, tf.nest.map_structure(to_tensor, batch))
            return logs
        self.iterator = iterator
        if not loop.are_unread(self._model, self._kind):
            return self._call(self._on_iterator, iterator, True)
        self._unread = self._call(self._on_iterator, iterator, False)
        if not isinstance(self._unread[0], dict):
            return self._logs_of_all_rows(*self._unread)
        return self._logs_of_loop

    def _call(self, function, *args):
        """Calls a function of this. Before the first call ranks compare their models, and the graph that was traced."""
        if not self._is_compared:
            graph = None if self._model.run_eagerly else function.get_concrete_function(*args).graph
            agreement.check_model(self._strategy, self._model, f"{self._kind}_step", graph)
            self._is_compared = True
        return function(*args)

    def bring_logs_together(self):
        """Behind the loop over batches: Keras finds the logs of the last in what it was given."""
        if self._unread is not None and isinstance(self._unread[0], dict):
            self._logs_of_loop.update(self._logs_of_all_rows(*self._unread))

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step_body(self, inputs, rows, shares, with_logs):
        """Returns the outputs of each replica, or the logs."""
        before = state.values_before(self._model)
        outputs, written = self._logs.of_step(
            lambda step: self._strategy.extended.run_step(step, inputs, shares),
            lambda element: self._step(without_optionals(element)),
            rows,
            tf.executing_eagerly() or all(isinstance(data.num_rows(element), int) for element in inputs),
        )
        parts = [state.written_together(self._strategy, written, shares, before)]
        if with_logs and self._logs.read(written):
            self._together([parts.pop()])  # first
        if with_logs:
            parts.append(self._logs.together(outputs, shares))
        logs = self._together(parts)
        if self._strategy.check_equal:  # gradients accumulate on each worker, and are reduced once an update
            variables = ring_callbacks.all_variables(self._model)
            self._strategy.assert_equal(
                [v for v in variables if "gradient_accumulator" not in v.path and not step.is_kept_by_replica(v)]
            )
        return logs[-1] if with_logs else outputs

    def _together(self, parts):
        """Applies `finish` to the sums over all workers, for each `(values, finish)`: one collective a dtype."""
        values = [value for values, _ in parts for value in values]
        totals = self._strategy.extended.control_ops.sum_over_workers(values, name="state and logs")
        results = []
        for values, finish in parts:
            results.append(finish(totals[: len(values)]))
            totals = totals[len(values) :]
        return results

    def _on_iterator_body(self, iterator, with_logs):
        """The logs; or what the replicas of this worker returned in the last step, and their shares of its batch."""
        with self._strategy.scope():
            steps = self._model.steps_per_execution
            told, inputs, rows = self._next_batch(iterator)
            taken: list = []

            def take():
                taken.append(self._one_step(inputs, rows, told.shares, with_logs and steps == 1))
                return taken[0]

            # Not the inputs alone: what depends on none, such as `iterations.assign_add(1)`, would run beside an error.
            outputs = tf.cond(told.goes_on, take, lambda: self._refuse(told, iterator, *taken))
            if steps == 1:
                return outputs if with_logs else (outputs, told.shares)

            def more(i, has_batch, outputs, shares):
                return tf.logical_and(i < steps, has_batch)

            def another(i, _, outputs, shares):
                told, inputs, rows = self._next_batch(iterator)
                outputs, shares = tf.cond(
                    told.goes_on,
                    lambda: (self._one_step(inputs, rows, told.shares, False), told.shares),
                    lambda: self._unless_wrong(told, (outputs, shares)),
                )
                return i + 1, told.has_batch, outputs, shares

            _, _, outputs, shares = tf.while_loop(
                more, another, (1, True, outputs, told.shares), parallel_iterations=1
            )
            return self._logs_of_all_rows_body(outputs, shares) if with_logs else (outputs, shares)

    def _on_batch_body(self, batch):
        inputs = data.split_rows(batch, self._replicas)
        with self._strategy.scope():
            rows = [data.num_rows(element) for element in inputs]
            told = status.before_step(self._strategy, rows, True)
            with tf.control_dependencies(status.why_not(told)):
                return self._one_step(inputs, rows, told.shares, True)

    def _logs_of_all_rows_body(self, outputs, shares):
        with self._strategy.scope():
            [logs] = self._together([self._logs.together(outputs, shares)])
            return logs

    # -- the batch -------------------------------------------------------------------------------------------------

    def _next_batch(self, iterator):
        """Returns what all ranks hold before the step, and one element and its number of rows a replica."""
        inputs, have_value = trace.next_batch(self._strategy, lambda: _tf.next_or_dummy(iterator))
        fingerprint = None
        if isinstance(inputs[0], data.Shares):
            [(inputs, rows, fingerprint)] = inputs
            inputs, rows = list(inputs), list(rows)
        else:
            rows = [
                n if n is None else tf.where(drawn, tf.cast(n, tf.int64), 0)
                for n, drawn in zip(map(data.num_rows, inputs), have_value, strict=True)
            ]
        return status.before_step(self._strategy, rows, tf.reduce_any(have_value), fingerprint), inputs, rows

    def _refuse(self, told, iterator, like=None):
        """Raises why there is no step; what it returns never comes to be, and is like what the step returns."""
        with tf.control_dependencies(status.why_not(told)):
            # No rank has a batch: this raises OutOfRangeError, as Keras expects.
            drawn = tf.nest.flatten(_tf.next_or_error(iterator), expand_composites=True)
        with tf.control_dependencies([t for t in drawn if isinstance(t, tf.Tensor)]):
            return tf.nest.map_structure(_never, like, expand_composites=True)

    def _unless_wrong(self, told, results):
        with tf.control_dependencies(status.why_not(told)):
            return tf.nest.map_structure(tf.identity, results, expand_composites=True)


def _never(tensor):
    """A tensor of this dtype, and of this shape as far as it is static."""
    shape = tensor.shape
    if shape.is_fully_defined():
        return tf.zeros(shape, tensor.dtype)
    some = tf.zeros([n or 0 for n in shape] if shape.rank is not None else [], tensor.dtype)
    return tf.raw_ops.PlaceholderWithDefault(input=some, shape=shape)
