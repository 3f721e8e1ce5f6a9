"""The steps of `fit`, `evaluate` and `predict` over a ring: few collectives, the same on every rank.

```
one training step on rank r                                           collectives
  next batch ─► rows of each replica ─► who has rows, how many?         1  status       (control)
                      has any rank left the loop?
  forward, backward ─► gradients                                        >= 1 buckets    (gradients)
  state the replicas wrote ─► one value for all ┐
  logs, where a callback reads them ─► all rows ┴                       1  if any       (control)
```

State and logs are sent in one collective per dtype; logs that depend on the state follow in another. Logs that no
callback reads are reduced after the loop (`loop.py`), those of several steps at the end of an execution. Nothing is
sent from Python.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.models.functional import Functional
from keras.src.saving import serialization_lib

from tfring import _tf, imports, step
from tfring._keras import agreement, batch_shapes, calls, exactness, loop, resume, scope, state, whole
from tfring._keras import callbacks as ring_callbacks
from tfring._keras.batch import slice_own_rows
from tfring._keras.logs import Logs
from tfring._keras.losses import RingCompileLoss, additional_loss
from tfring._keras.metrics import summed_metric_state, values_of_results
from tfring._keras.optimizers.adoption import adopt_optimizers
from tfring._keras.parts import check_parallel_pairs
from tfring._keras.predict import PredictFunction
from tfring._keras.printing import on_rank_0
from tfring._keras.seam import entered, extend, ring_of_model
from tfring.data.rows import has_static_rows, num_rows, split_rows
from tfring.data.shares import Shares
from tfring.errors import TfringError
from tfring.program import ShortTraceback
from tfring.ring import failures
from tfring.runtime import Ring
from tfring.step import Way, status, trace
from tfring.step.functions import IteratorFunction, between_collectives, graph_function, to_tensor, without_optionals


def install() -> None:
    """Makes `keras.Model`, and thus every existing and future model, derive from RingTrainer."""
    extend(keras.Model, RingTrainer)


class RingTrainer(TensorFlowTrainer):
    """Trains a model over the ring of the RingStrategy it was made under; any other model as Keras does.

    `keras.Model` derives from it instead of Keras' TensorFlowTrainer. A method that a user's class overrides therefore
    comes first and reaches this one by `super()`, as it would reach Keras', and no model's class changes: names,
    `isinstance`, pickling, `clone_model` and files are those of plain Keras (docs/decisions/0021).
    """

    predict_function: Any

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles a model in its strategy's scope. The optimizers and metrics made here then belong to that scope."""
        scope.adopt_model(self)
        ring = ring_of_model(self)
        if ring is None:
            scope.refuse_model(self, "compile")
            return super().compile(*args, **kwargs)
        with ring.scope():
            super().compile(*args, **kwargs)
            RingCompileLoss.adopt(self)
        adopt_optimizers(self, ring)
        check_parallel_pairs(self)
        if ring.updater is not None:
            ring.updater.check_model(self)

    def compile_from_config(self, config: dict) -> None:
        if type(self).compile is not RingTrainer.compile:  # a user's own: Keras reports that it is not called
            return super().compile_from_config(config)
        self.compile(**serialization_lib.deserialize_keras_object(config))
        if hasattr(self, "optimizer") and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        scope.adopt_model(self)
        ring = ring_of_model(self)
        if ring is None:
            scope.refuse_model(self, "fit")
            scope.warn_of_model(self)
            return super().fit(*args, **kwargs)
        with _short_traceback(), _call("fit", self, ring, args, kwargs) as (given, _):
            ring.lines.note(exactness.describe_layer_differences(ring, self))
            return super().fit(**given)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        ring = ring_of_model(self)
        if ring is None:
            scope.refuse_model(self, "evaluate")
        if ring is None or kwargs.get("_use_cached_eval_dataset"):  # the validation of `fit`
            return super().evaluate(*args, **kwargs)
        with _short_traceback(), _call("evaluate", self, ring, args, kwargs) as (given, _):
            return super().evaluate(**given)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        ring = ring_of_model(self)
        if ring is None:
            scope.refuse_model(self, "predict")
            return super().predict(*args, **kwargs)
        with _short_traceback(), _call("predict", self, ring, args, kwargs) as (given, traits):
            self.make_predict_function()
            if not isinstance(self.predict_function, PredictFunction):  # one that the user put there
                return super().predict(**given)
            with self.predict_function.loop(waits=not traits.watches_predict) as of_all_rows:
                return of_all_rows(super().predict(**given))

    def make_train_function(self, force: bool = False) -> Any:
        ring = ring_of_model(self)
        if ring is None:
            scope.warn_of_model(self, stacklevel=4)  # after `fit` has; or in `train_on_batch`
            return super().make_train_function(force)
        return _make_step_function(self, ring, "train", force)

    def make_test_function(self, force: bool = False) -> Any:
        ring = ring_of_model(self)
        if ring is None:
            return super().make_test_function(force)
        return _make_step_function(self, ring, "test", force)

    def make_predict_function(self, force: bool = False) -> Any:
        ring = ring_of_model(self)
        if ring is None:
            return super().make_predict_function(force)
        if self.predict_function is None or force:
            self.predict_function = PredictFunction(self, ring)
        return self.predict_function

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        ring = ring_of_model(self)
        if ring is None:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
        else:
            _build(self, ring, iterator, data_batch)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is not None and ring_of_model(self) is not None:
            _build_metrics_and_loss(self, data_batch)
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        return additional_loss(super()._aggregate_additional_loss, loss)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        ring = ring_of_model(self)
        if ring is None:
            return super()._get_metrics_result_or_logs(logs)
        logs = logs or resume.interrupted_logs() or logs
        if not logs and ring.updater is not None and ring.updater.is_star:
            # This worker of asynchronous servers had no batch of the epoch: its metrics hold those of the others.
            return values_of_results(self.get_metrics_result())
        if ring.num_replicas == 1:
            return values_of_results(super()._get_metrics_result_or_logs(logs))
        with summed_metric_state(ring, self.metrics):
            return values_of_results(super()._get_metrics_result_or_logs(logs))


for _name in ("compile", "fit", "evaluate", "predict"):  # `help` and `inspect.signature` show Keras' methods
    functools.update_wrapper(vars(RingTrainer)[_name], getattr(TensorFlowTrainer, _name))
_SIGNATURES = {name: inspect.signature(getattr(TensorFlowTrainer, name)) for name in ("fit", "evaluate", "predict")}
_LEFT = "_tfring_left_to_step"  # attribute of a model that is not built: the spec of a batch


def _short_traceback() -> ShortTraceback:
    return ShortTraceback(keras.config.is_traceback_filtering_enabled())


@contextlib.contextmanager
def _call(name: str, model: Any, ring: Ring, args: tuple, kwargs: dict) -> Iterator[tuple[dict, Any]]:
    """Prepares a call of `fit`, `evaluate` or `predict` on all ranks.

    Args:
      name: Name of the method.
      model: The Keras model.
      ring: The workers of the model.
      args: Positional arguments that the user passes.
      kwargs: Keyword arguments that the user passes.

    Yields:
      The arguments of Keras' method by name, and the needs of the callbacks of all ranks.
    """
    try:
        bound = _SIGNATURES[name].bind(model, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    bound.apply_defaults()
    given = bound.arguments
    if given["verbose"] == "auto" and not ring.cluster.is_chief:
        given["verbose"] = 0  # one progress bar is enough
    with ring.lines.timed(ring), calls.annotated_errors(ring, f"model.{name}", given):
        traits = ring_callbacks.traits_of(name, model, given["callbacks"], given["verbose"])
        traits = ring_callbacks.CallbackTraits(*agreement.check_call(ring, model, name, given, traits))
        if not isinstance(given["callbacks"], keras.callbacks.CallbackList):
            given["callbacks"] = ring_callbacks.prepared(name, given["callbacks"], model, ring, traits)
        around = ring_callbacks.around(name, given["callbacks"], model)
        naming = failures.reraise_as_tfring_error(ring.channels, ring.mesh)
        counted = batch_shapes.of_call(given.get("x"))
        del given["self"]
        with counted, entered(name), on_rank_0(ring), naming, trace.entry(ring), around:
            if name != "fit" and ring.updater is not None:
                ring.updater.before_evaluation(model)
            yield bound.kwargs, traits


def _make_step_function(model: Any, ring: Ring, kind: str, force: bool) -> Any:
    """Returns `model.train_function` or `model.test_function`, made if there is none or if `force` is True."""
    attribute = f"{kind}_function"
    if getattr(model, attribute) is None or force:
        function = StepFunction(model, ring, kind)
        loop.made(model, kind, function)
        setattr(model, attribute, function)
    return getattr(model, attribute)


def _build(model: Any, ring: Ring, iterator: Any, data_batch: Any) -> None:
    """Builds a model for the data it is called with, from the data's spec: a generator's rows are drawn once."""
    if iterator is not None:
        loop.bind(iterator, model)
        batch_shapes.check(model, iterator._tfring_batch_size)
        spec = _tf.element_spec(iterator._distributed_dataset)
        data_batch = _symbolic_batch(spec.parts[0] if isinstance(spec, Shares) else spec)
    _skip_first_reset(model._compile_metrics)
    first = model.train_function is None and model.test_function is None
    if iterator is None and not first:  # the second call of `train_on_batch` or another `..._on_batch`
        return
    if first:
        scope.refuse_weights(model, ring)
        adopt_optimizers(model, ring)
    with ring.scope():
        try:
            _build_symbolically(model, data_batch)
        except TfringError:
            raise
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            # One process does not build here, but when it traces its step, which may not call the model.
            steps_of_keras = RingTrainer.train_step, RingTrainer.test_step
            is_keras_step = (type(model).train_step, type(model).test_step) == steps_of_keras
            if is_keras_step and (model.run_eagerly or any(map(_ragged_or_sparse, tf.nest.flatten(data_batch)))):
                _build_eagerly(model, data_batch)
    if first:
        scope.adopt_metrics(model, ring)


def _skip_first_reset(metrics: Any) -> None:
    """Skips the first reset of metrics that are not built: one process builds them after it, in its step."""
    if metrics is not None and not metrics.built:
        vars(metrics)["reset_state"] = lambda: vars(metrics).pop("reset_state")


def allow_first_reset(model: Any) -> None:
    """Makes the first reset of a model's metrics take effect, as they hold what was restored."""
    if model._compile_metrics is not None:
        vars(model._compile_metrics).pop("reset_state", None)


def _build_symbolically(model: Any, data_batch: Any) -> None:
    """Builds a model as Keras does; leaves to a user's own step what only it knows, as in one process.

    Only the step knows which variables an optimizer updates and, in a model that is not built, which layers are called.
    """
    vars(model).pop(_LEFT, None)  # from an earlier call
    if type(model).train_step is RingTrainer.train_step:
        return model._symbolic_build(data_batch=data_batch)
    if not all(layer.built for layer in model._flatten_layers()):
        vars(model)[_LEFT] = tf.nest.map_structure(lambda symbol: getattr(symbol, "_tfring_spec", None), data_batch)
        return
    optimizer = model.optimizer
    if optimizer is None or optimizer.built:
        return model._symbolic_build(data_batch=data_batch)
    optimizer.built = True  # otherwise Keras would build it for all variables of the model, in their order
    try:
        model._symbolic_build(data_batch=data_batch)
    finally:
        optimizer.built = False


def build_by_step(model: Any) -> None:
    """Makes the variables that are left to a `train_step` before it runs, so that they can be restored."""
    spec, ring = vars(model).pop(_LEFT, None), ring_of_model(model)
    if spec is None or ring is None:
        return
    step = loop.Loop(model, "train").step_function.step
    with ring.scope():
        graph_function(lambda batch: ring.strategy.run(step, args=(batch,))).get_concrete_function(spec)


def _build_metrics_and_loss(model: Any, data_batch: Any) -> None:
    """Builds metrics and loss of a functional model from its known outputs, for which Keras traces a forward pass."""
    from keras.src import backend
    from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

    def symbolic(value: Any) -> Any:
        return None if value is None else backend.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))

    metrics, loss = (part is not None and not part.built for part in (model._compile_metrics, model._compile_loss))
    if not (metrics or loss):
        return
    x, y, sample_weight = unpack_x_y_sample_weight(tf.nest.map_structure(symbolic, data_batch))
    y_pred = _known_outputs(model, x)
    if y_pred is None:
        return
    if metrics:
        backend.compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    if loss:
        backend.compute_output_spec(model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False)


def _known_outputs(model: Any, x: Any) -> Any:
    """Returns symbolic outputs of a functional model for inputs like those it was made with; otherwise None."""
    kind = type(model)
    is_functional = isinstance(model, Functional) or (isinstance(model, keras.Sequential) and model._functional)
    if not is_functional or kind.call not in (Functional.call, keras.Sequential.call):
        return None
    if kind.__call__ is not keras.Layer.__call__ or any(t.sparse for t in [*model.inputs, *model.outputs]):
        return None
    shapes = [getattr(value, "shape", None) for value in tf.nest.flatten(x)]
    return model.compute_output_spec(x) if shapes == [t.shape for t in model.inputs] else None


def _symbolic_batch(element_spec: Any) -> Any:
    from keras.src import backend

    specs = tf.nest.map_structure(_tf.spec_of_a_replica, element_spec)
    shapes = [list(spec.shape) for spec in tf.nest.flatten(specs) if getattr(spec, "shape", None)]
    counts = [shape[0] for shape in shapes]
    rows = None if None in counts else max(counts, key=counts.count, default=None)

    def symbolic(spec: Any) -> Any:
        if type(spec).__name__ in ("OptionalSpec", "NoneTensorSpec"):
            return None
        first, *others = list(spec.shape) or [None]
        first = None if first == rows else first  # otherwise that of a constant beside the rows
        symbol = backend.KerasTensor([first, *others], backend.standardize_dtype(spec.dtype.name))
        symbol._tfring_spec = spec
        return symbol

    return tf.nest.map_structure(symbolic, specs)


def _ragged_or_sparse(value: Any) -> Any:
    """Returns the spec of a ragged or sparse component of a batch; None for a dense one."""
    spec = getattr(value, "_tfring_spec", None)
    return spec if isinstance(spec, (tf.RaggedTensorSpec, tf.SparseTensorSpec)) else None


def _build_eagerly(model: Any, data_batch: Any) -> None:
    """Builds a model on a row of zeros if symbols do not work: they are dense, and NumPy does not accept them."""
    from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

    def zeros(symbol: Any) -> Any:
        if symbol is None:
            return None
        dense, spec = tf.zeros([n or 1 for n in symbol.shape], symbol.dtype), _ragged_or_sparse(symbol)
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(dense, ragged_rank=spec.ragged_rank)
        return dense if spec is None else tf.sparse.from_dense(dense)

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
      model: The Keras model.
      ring: The workers.
      kind: "train" or "test".
    """

    def __init__(self, model: Any, ring: Ring, kind: str) -> None:
        self._model = model
        self._ring = ring
        self._kind = kind
        self.step = between_collectives(model, kind, ring)
        self._replicas = len(ring.devices)
        self._logs = Logs(model, ring)
        self._way: Way | None = None  # not known before the first step
        self._refused: exactness.WholeBatchRequired | None = None  # why the traced step has to be traced again
        self._reads_more = False  # than its updater knew at the trace, so it is traced again
        self._static_rows: int | None = None  # of every global batch, if one process knows their number
        self._is_compared = False
        self._make()
        self.reset()

    def _make(self) -> None:
        """Makes functions that have not been traced."""
        made = (lambda body: body) if self._model.run_eagerly else graph_function
        self._one_step = made(self._one_step_body)
        body = self._on_iterator_body
        self._on_iterator = body if self._model.run_eagerly else IteratorFunction(body)
        self._on_batch = made(self._on_batch_body)
        self._logs_of_all_rows = made(self._logs_of_all_rows_body)

    def reset(self) -> None:
        """Forgets a loop over batches."""
        self.iterator = None  # of the last step
        self._unread: tuple | None = None  # of the last step: what its replicas returned, and their shares
        self._logs_of_loop: dict = {}  # the dict that Keras holds as the logs of the last step

    def __call__(self, iterator: Any) -> Any:
        with trace.step(self._ring, self._kind):
            return self._run(iterator)

    def _run(self, iterator: Any) -> Any:
        if not isinstance(iterator, tf.distribute.DistributedIterator):
            logs = None
            if self._kind == "test" and self._ring.updater is not None:
                self._ring.updater.before_evaluation(self._model)
            for batch in iterator:  # train_on_batch, test_on_batch
                batch = tf.nest.map_structure(to_tensor, batch)
                own = slice_own_rows(self._ring, batch)
                self._know_rows(num_rows(batch) if has_static_rows(batch) and own is not batch else None)
                logs = self._call("_on_batch", own)
            return logs
        self.iterator = iterator
        self._know_rows(batch_shapes.static_rows_of_call())
        if not loop.are_unread(self._model, self._kind):
            return self._call("_on_iterator", iterator, True)
        self._unread = self._call("_on_iterator", iterator, False)
        if not isinstance(self._unread[0], dict):
            return self._logs_of_all_rows(*self._unread)
        return self._logs_of_loop

    def _call(self, name: str, *args: Any) -> Any:
        """Calls a function of this object. Before the first call, ranks compare their models and the traced graph."""
        if not self._is_compared:
            with imports.pause_garbage_collection(as_old=False):  # each collection would walk the graph again
                graph = None if self._model.run_eagerly else self._traced(name, *args).graph
            agreement.check_model(self._ring, self._model, f"{self._kind}_step", graph)
            self._is_compared = True
            if self._kind == "train" and self._ring.updater is not None:
                self._ring.updater.before_first_step(graph is not None)
        while True:
            try:
                return getattr(self, name)(*args)
            except exactness.WholeBatchRequired as refused:  # for a batch of another kind
                self._switch_to_whole_batch(refused)

    def _know_rows(self, rows: int | None) -> None:
        """Notes the static number of rows of the next batches, with which a step of the whole batch is traced."""
        if rows != self._static_rows and self._way is Way.WHOLE:
            self._make()
        self._static_rows = rows

    def _switch_to_whole_batch(self, refused: exactness.WholeBatchRequired) -> None:
        """Makes each step one of the whole batch from now on; what was traced is traced again."""
        self._way, self._refused = Way.WHOLE, None
        exactness.log_whole_batch_step(self._ring, self._model, f"{self._kind}_step", refused.reason)
        self._make()

    def _traced(self, name: str, *args: Any) -> Any:
        """Returns a function of this object, traced. It is traced again if its rows cannot be divided.

        The first trace is completed in any case: only after it does TensorFlow initialize variables that a step makes.
        """
        while True:
            try:
                traced = getattr(self, name).get_concrete_function(*args)
            except exactness.WholeBatchRequired as refused:
                self._refused = refused
            except Exception as error:  # of any kind: a program may need the number of rows, which one process knows
                if self._way is not Way.EDITED or self._static_rows is None:
                    raise
                self._refused = exactness.WholeBatchRequired(f"It needs the number of rows before it runs ({error!r}).")
            if self._refused is not None:
                self._switch_to_whole_batch(self._refused)
            elif self._reads_more:
                self._make()
            else:
                return traced
            self._reads_more = False

    def reduce_logs_after_loop(self) -> None:
        """Reduces the logs of the last batch after the loop: Keras finds them in the dict that it was given."""
        if self._unread is not None and isinstance(self._unread[0], dict):
            self._logs_of_loop.update(self._logs_of_all_rows(*self._unread))

    # -- one step --------------------------------------------------------------------------------------------------

    def _one_step_body(
        self, inputs: Sequence[Any], rows: Sequence[Any], batch_status: status.Status, with_logs: bool
    ) -> Any:
        """Returns the outputs of each replica, or the logs."""
        name = f"{self._kind}_step"
        if self._way is None:
            self._way, reason = exactness.decide_way(self._ring, self._model)
            if self._way is Way.WHOLE:
                exactness.log_whole_batch_step(self._ring, self._model, name, reason)
        way, shares = self._way, self._shares(batch_status)
        if way is Way.WHOLE:
            inputs = whole.batch(self._ring, inputs, rows, self._static_rows)
        before = state.snapshot_values(self._model)
        outputs, written = self._logs.run_and_classify(
            lambda step: self._ring.strategy.extended.run_step(step, inputs, shares, way),
            lambda element: self.step(without_optionals(element)),
            rows,
            way,
        )
        if self._kind == "train" and self._ring.updater is not None:
            self._reads_more |= self._ring.updater.should_retrace()
        if way is not Way.EDITED:
            return self._with_state_and_logs(outputs, written, shares, before, with_logs)
        exchanges: list = []
        try:
            edit = functools.partial(exactness.edit_step, self._ring, self._model, name, batch_status.rows)
            exchanges, written = state.edit_step_and_state(self._ring, written, edit)
        except exactness.WholeBatchRequired as refused:
            if self._is_compared:
                raise
            self._refused, written = refused, []
        with tf.control_dependencies(exchanges):
            outputs = self._logs.with_all_rows(outputs, rows, shares)
            return self._with_state_and_logs(outputs, written, shares, before, with_logs)

    def _shares(self, batch_status: status.Status) -> tf.Tensor:
        """Returns the shares by which the replicas of this worker count."""
        return whole.shares(self._ring) if self._way is Way.WHOLE else batch_status.shares

    def _with_state_and_logs(
        self, outputs: Any, written: Sequence[state.Written], shares: tf.Tensor, before: dict, with_logs: bool
    ) -> Any:
        """Returns the outputs of each replica, or the logs, once each variable that replicas wrote has one value."""
        parts = [state.combine_writes(self._ring, written, shares, before)]
        if with_logs and self._logs.read(written):
            self._sum_and_finish([parts.pop()])  # first, as the logs read the state
        if with_logs:
            parts.append(self._logs.pending_reduction(outputs, shares))
        logs = self._sum_and_finish(parts)
        if self._ring.check_equal:  # gradients accumulate on each worker, and are reduced once per update
            variables = ring_callbacks.all_variables(self._model)
            self._ring.strategy.assert_equal(
                [v for v in variables if "gradient_accumulator" not in v.path and not step.is_kept_by_replica(v)]
            )
        return logs[-1] if with_logs else outputs

    def _sum_and_finish(self, parts: Sequence[tuple[Sequence[Any], Callable[[Any], Any]]]) -> list:
        """Applies `finish` to the sums over all workers, for each `(values, finish)`: one collective per dtype."""
        values = [value for values, _ in parts for value in values]
        totals = self._ring.control_ops.sum_over_workers(values, name="state and logs")
        results = []
        for mine, finish in parts:
            results.append(finish(totals[: len(mine)]))
            totals = totals[len(mine) :]
        return results

    def _on_iterator_body(self, iterator: Any, with_logs: bool) -> Any:
        """Returns the logs, or the outputs of this worker's replicas in the last step and their shares of its batch."""
        with self._ring.scope():
            steps = self._model.steps_per_execution
            if steps == 1:
                outputs, shares, _ = self._step_on_iterator(iterator, with_logs)
                return outputs if with_logs else (outputs, shares)

            def more(i: tf.Tensor, has_batch: tf.Tensor, outputs: Any, shares: tf.Tensor) -> tf.Tensor:
                return tf.logical_and(i < steps, has_batch)

            def another(i: Any, _: Any, outputs: Any, shares: Any) -> tuple:
                outputs, shares, has_batch = self._step_on_iterator(iterator, False, (i > 0, (outputs, shares)))
                return i + 1, has_batch, outputs, shares

            if tf.executing_eagerly():
                first = another(0, True, None, None)
            else:  # the step is in the graph only once: twice, it would draw the numbers of a seed twice
                with _tf.scratch_graph():
                    outputs, shares, _ = self._step_on_iterator(iterator, False)
                first = 0, True, *tf.nest.map_structure(_dummy_like, (outputs, shares), expand_composites=True)
            _, _, outputs, shares = tf.while_loop(more, another, first, parallel_iterations=1)
            return self._logs_of_all_rows_body(outputs, shares) if with_logs else (outputs, shares)

    def _step_on_iterator(self, iterator: Any, with_logs: bool, before: tuple | None = None) -> tuple:
        """Returns the result of a step on the next batch, the shares of the batch, and whether there is one.

        Args:
          iterator: An iterator over batches.
          with_logs: Whether to return logs.
          before: Whether there were steps in this execution, and the result of the last of them, which counts if there
            is no batch.
        """
        batch_status, inputs, rows = self._next_batch(iterator)
        taken: list = []

        def take() -> Any:
            taken[:] = self._one_step(inputs, rows, batch_status, with_logs), self._shares(batch_status)
            return tuple(taken)

        def otherwise() -> Any:
            def refuse() -> Any:
                return self._refuse(batch_status, iterator, tuple(taken))

            if before is None:
                return refuse()
            return tf.cond(before[0], lambda: self._unless_wrong(batch_status, before[1]), refuse)

        # Not only the inputs are conditional: what depends on none of them, such as `iterations.assign_add(1)`, would
        # run beside an error.
        outputs, shares = tf.cond(batch_status.goes_on, take, otherwise)
        return outputs, shares, batch_status.has_batch

    def _on_batch_body(self, batch: Any) -> Any:
        trace.graph_of_step(self._ring)
        inputs = split_rows(batch, self._replicas)
        with self._ring.scope():
            rows = [num_rows(element) for element in inputs]
            batch_status = status.before_step(self._ring, rows, True)
            with tf.control_dependencies(status.why_not(batch_status)):
                return self._one_step(inputs, rows, batch_status, True)

    def _logs_of_all_rows_body(self, outputs: Any, shares: tf.Tensor) -> Any:
        with self._ring.scope():
            [logs] = self._sum_and_finish([self._logs.pending_reduction(outputs, shares)])
            return logs

    # -- the batch -------------------------------------------------------------------------------------------------

    def _next_batch(self, iterator: Any) -> tuple[status.Status, list, list]:
        """Returns the status of all ranks before the step, and for each replica an element and its number of rows."""
        inputs, have_value = trace.next_batch(self._ring, lambda: _tf.next_or_dummy(iterator))
        fingerprint = None
        if isinstance(inputs[0], Shares):
            [(inputs, rows, fingerprint)] = inputs
            inputs, rows = list(inputs), list(rows)
        else:
            rows = [
                n if n is None else tf.where(drawn, tf.cast(n, tf.int64), 0)
                for n, drawn in zip(map(num_rows, inputs), have_value, strict=True)
            ]
        has_batch = have_value[0] if len(have_value) == 1 else tf.reduce_any(have_value)
        return status.before_step(self._ring, rows, has_batch, fingerprint), inputs, rows

    def _refuse(self, batch_status: status.Status, iterator: Any, like: Any) -> Any:
        """Raises the reason why there is no step. The result is never computed, and is like that of the step."""
        with tf.control_dependencies(status.why_not(batch_status)):
            # No rank has a batch: this raises OutOfRangeError, as Keras expects.
            drawn = tf.nest.flatten(_tf.next_or_error(iterator), expand_composites=True)
        with tf.control_dependencies([t for t in drawn if isinstance(t, tf.Tensor)]):
            return tf.nest.map_structure(_dummy_like, like, expand_composites=True)

    def _unless_wrong(self, batch_status: status.Status, results: Any) -> Any:
        with tf.control_dependencies(status.why_not(batch_status)):
            return tf.nest.map_structure(tf.identity, results, expand_composites=True)


def _dummy_like(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor of this dtype, and of this shape as far as it is static."""
    shape = tensor.shape
    if shape.is_fully_defined():
        return tf.zeros(shape, tensor.dtype)
    some = tf.zeros([n or 0 for n in shape] if shape.rank is not None else [], tensor.dtype)
    return tf.raw_ops.PlaceholderWithDefault(input=some, shape=shape)
